"""Engines start, end and restart trainings, and the weights are those of MapSage's own launcher."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Tuple

import pytest
from checkpoint_bits import checkpoint_bits
from ranks import free_port
from support import ROOT, Launch, check_finished, launch, on_host, write_tiny_config

pytestmark = on_host

HOOKS = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
SHORT = """
custom_imports = dict(imports=['mapsage', 'engine_hooks'])
train_cfg = dict(type='IterBasedTrainLoop', max_iters=4, val_interval=1000)
default_hooks['checkpoint']['interval'] = 2
env_cfg['virtual_ranks'] = 2
"""
TORCHRUN = [sys.executable, '-m', 'torch.distributed.run']


@pytest.fixture(scope='module')
def reference(tmp_path_factory: pytest.TempPathFactory, tiny_data: Path) -> Dict[str, Any]:
    """The checkpoint after the last iteration of two ranks under MapSage's launcher."""
    folder = tmp_path_factory.mktemp('reference')
    config = write_tiny_config(folder / 'tiny.py', tiny_data, SHORT)
    check_finished(launch(config, '--work-dir', folder, environ={'PYTHONPATH': HOOKS}))
    return checkpoint_bits(folder / 'iter_4.pth')


def check_same(work: Path, reference: Dict[str, Any]) -> None:
    assert checkpoint_bits(work / 'iter_4.pth') == reference


def test_torchrun_restarts_a_killed_rank(
    reference: Dict[str, Any], tiny_data: Path, tmp_path: Path
) -> None:
    die = f"custom_hooks = [dict(type='DieOnce', iteration=3, mark={str(tmp_path / 'died')!r})]\n"
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT + die)
    finished = launch(
        *['--standalone', '--nproc-per-node', '2', '--max-restarts', '1', 'tools/train.py'],
        *[config, '--launcher', 'pytorch', '--work-dir', tmp_path, '--resume'],
        command=TORCHRUN,
        environ={'PYTHONPATH': HOOKS},
        cold=True,
    )
    assert (tmp_path / 'died').exists() and finished.status == 0, finished.output[-6000:]
    check_same(tmp_path, reference)


# torchrun numbers machines by their addresses.
@pytest.mark.parametrize('addresses', [('127.0.0.1', '127.0.0.2'), ('127.0.0.2', '127.0.0.1')])
def test_a_machine_joins_a_job_of_torchrun(
    addresses: Tuple[str, str], reference: Dict[str, Any], tiny_data: Path, tmp_path: Path
) -> None:
    """torchrun alone leaves it waiting for MASTER_ADDR; then all machines end.

    MapSage's watch over lost machines is off where the config says so.
    """
    meet = "env_cfg['dist_cfg'] = dict(env_cfg.get('dist_cfg', {}), heartbeat_timeout=0)\n" + (
        f"custom_hooks = [dict(type='MeetPeers', iteration=3, ranks=2, "
        f'reached={str(tmp_path / "reached")!r})]\n'
    )
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT + meet)
    options = [
        *['--nnodes', '1:2', '--nproc-per-node', '1', '--max-restarts', '2'],
        *['--rdzv-backend', 'c10d', '--rdzv-endpoint', f'127.0.0.1:{free_port()}'],
        *['--rdzv-id', 'join', '--rdzv-conf', 'last_call_timeout=2'],
        *['tools/train.py', config, '--launcher', 'pytorch', '--work-dir', tmp_path, '--resume'],
    ]
    environ = {'PYTHONPATH': HOOKS}
    machines = []
    for address in addresses:
        command = [*TORCHRUN, '--local-addr', address]
        machines.append(Launch(*options, command=command, environ=environ, cold=True))
        machines[0].wait_for(tmp_path / 'reached')
    for machine in machines:
        check_finished(machine.finish())
    assert not (tmp_path / 'watched').exists()
    check_same(tmp_path, reference)


@pytest.mark.parametrize('program', ['launcher', 'torchrun'])
def test_a_pod_that_is_stopped_and_started_again(
    program: str, reference: Dict[str, Any], tiny_data: Path, tmp_path: Path
) -> None:
    """The first process of the container gets SIGTERM, after docs/how-to/engines.md's preStop hook
    where it is torchrun; what it takes is less than a grace period."""
    slow = f"custom_hooks = [dict(type='SlowSteps', reached={str(tmp_path / 'reached')!r})]\n"
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT + slow)
    arguments: List[Any] = [config, '--work-dir', tmp_path, '--resume']
    command = ['bash', 'scripts/start_8card_training.sh']
    if program == 'torchrun':
        command = [*TORCHRUN, '--standalone', '--nproc-per-node', '2', 'tools/train.py']
        arguments += ['--launcher', 'pytorch']
    pods = []
    for _ in range(2):
        pods.append(Launch(*arguments, command=command, environ={'PYTHONPATH': HOOKS}, cold=True))
        if len(pods) == 1:
            pods[0].wait_for(tmp_path / 'reached')
            process = pods[0].process
            if program == 'torchrun':
                assert 'pkill -USR1 -P 1 &&' in (ROOT / 'docs/how-to/engines.md').read_text()
                subprocess.run(['pkill', '-USR1', '-P', str(process.pid)], check=True)
            else:
                process.terminate()
        finished = pods[-1].finish()
        assert finished.left_running == []
        assert (tmp_path / 'stopped.pth').exists(), finished.output[-6000:]
        assert (tmp_path / 'iter_4.pth').exists() == (len(pods) == 2), finished.output[-6000:]
    assert finished.status == 0 and 'resuming from' in finished.output
    check_same(tmp_path, reference)


def mpi_command() -> List[str]:
    # Where the session is root's, as in a container, Open MPI wants to be told.
    as_root = ['--allow-run-as-root'] if os.getuid() == 0 else []
    return ['mpirun', *as_root, '--oversubscribe', '-np', '2', sys.executable, 'tools/train.py']


@pytest.mark.skipif(shutil.which('mpirun') is None, reason='not installed: mpirun (openmpi-bin)')
def test_mpirun(reference: Dict[str, Any], tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)
    finished = launch(
        *[config, '--launcher', 'mpi', '--work-dir', tmp_path],
        command=mpi_command(),
        environ={'PYTHONPATH': HOOKS, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())},
    )
    check_finished(finished)
    check_same(tmp_path, reference)


@pytest.mark.skipif(shutil.which('mpirun') is None, reason='not installed: mpirun (openmpi-bin)')
def test_mpirun_passes_a_request_on(tiny_data: Path, tmp_path: Path) -> None:
    """SIGUSR1; after SIGTERM it kills the ranks within a second, which is less than such a step."""
    slow = (
        f"custom_hooks = [dict(type='SlowSteps', reached={str(tmp_path / 'reached')!r}, "
        f'seconds=2)]\n'
    )
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT + slow)
    run = Launch(
        *[config, '--launcher', 'mpi', '--work-dir', tmp_path],
        command=mpi_command(),
        environ={'PYTHONPATH': HOOKS, 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port())},
    )
    run.wait_for(tmp_path / 'reached')
    run.process.send_signal(signal.SIGUSR1)
    finished = run.finish()
    assert (tmp_path / 'stopped.pth').exists(), finished.output[-6000:]
    assert not (tmp_path / 'iter_4.pth').exists()


def test_pods_without_a_local_rank(
    reference: Dict[str, Any], tiny_data: Path, tmp_path: Path
) -> None:
    """Kubeflow's PyTorchJob starts one Python a pod."""
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT)
    job = {
        'PYTHONPATH': HOOKS,
        'WORLD_SIZE': '2',
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(free_port()),
        'KUBERNETES_SERVICE_HOST': '127.0.0.1',
    }
    pods = [
        Launch(
            *[config, '--launcher', 'pytorch', '--work-dir', tmp_path],
            command=[sys.executable, 'tools/train.py'],
            environ={**job, 'RANK': str(rank)},
        )
        for rank in range(2)
    ]
    for pod in pods:
        check_finished(pod.finish())
    check_same(tmp_path, reference)


def test_ray_restarts_a_killed_worker(
    reference: Dict[str, Any], tiny_data: Path, tmp_path: Path
) -> None:
    pytest.importorskip('ray', reason='needs Ray: bash scripts/run_tests.sh --leg engines')
    die = f"custom_hooks = [dict(type='DieOnce', iteration=3, mark={str(tmp_path / 'died')!r})]\n"
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SHORT + die)
    finished = launch(
        *['examples/ray_train.py', config, tmp_path],
        command=[sys.executable],
        environ={'PYTHONPATH': HOOKS, 'RAY_USAGE_STATS_ENABLED': '0'},
        cold=True,
    )
    assert (tmp_path / 'died').exists() and finished.status == 0, finished.output[-6000:]
    check_same(tmp_path, reference)
