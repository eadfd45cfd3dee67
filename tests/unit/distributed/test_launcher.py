"""The variables of each launcher, and what is said when they are not there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.distributed import (
    LauncherError,
    apply_launcher_environment,
    launcher,
    launcher_environment,
)

TORCHRUN = dict(RANK='3', WORLD_SIZE='4', LOCAL_RANK='1', MASTER_ADDR='node1', MASTER_PORT='29')
MPI = dict(
    OMPI_COMM_WORLD_RANK='3',
    OMPI_COMM_WORLD_SIZE='4',
    OMPI_COMM_WORLD_LOCAL_RANK='1',
    OMPI_COMM_WORLD_LOCAL_SIZE='2',
    MASTER_ADDR='node1',
)
SLURM = dict(
    SLURM_PROCID='3',
    SLURM_NTASKS='4',
    SLURM_LOCALID='1',
    SLURM_NODELIST='node[1-2]',
    SLURM_JOB_ID='4711',
    SLURM_NTASKS_PER_NODE='2',
)


def first(node_list: str) -> str:
    return node_list.replace('[1-2]', '1')


def test_pytorch() -> None:
    assert launcher_environment('pytorch', dict(TORCHRUN, OTHER='x')) == TORCHRUN


def test_one_process_in_each_pod_has_no_local_rank() -> None:
    pod = {name: value for name, value in TORCHRUN.items() if name != 'LOCAL_RANK'}
    assert launcher_environment('pytorch', pod) == dict(TORCHRUN, LOCAL_RANK='0')
    with pytest.raises(LauncherError, match='needs the environment variable.s. LOCAL_RANK, '):
        launcher_environment('pytorch', dict(pod, LOCAL_WORLD_SIZE='2'))


def test_mpi() -> None:
    want = dict(TORCHRUN, MASTER_PORT='29500', LOCAL_WORLD_SIZE='2')
    assert launcher_environment('mpi', MPI) == want
    assert launcher_environment('mpi', dict(MPI, MASTER_PORT='7'))['MASTER_PORT'] == '7'


def test_slurm() -> None:
    want = dict(TORCHRUN, MASTER_PORT='24711', LOCAL_WORLD_SIZE='2')
    assert launcher_environment('slurm', SLURM, first) == want
    own = dict(SLURM, MASTER_ADDR='other', MASTER_PORT='7')
    got = launcher_environment('slurm', own, first)
    assert (got['MASTER_ADDR'], got['MASTER_PORT']) == ('other', '7')


def test_slurm_with_empty_variables() -> None:
    """`export MASTER_PORT=` is not a choice of a port."""
    got = launcher_environment('slurm', dict(SLURM, MASTER_ADDR='', MASTER_PORT=''), first)
    assert (got['MASTER_ADDR'], got['MASTER_PORT']) == ('node1', '24711')


@given(st.integers(1, 2**31))
def test_slurm_port_is_between_the_services_and_the_ephemeral_ports(job: int) -> None:
    port = launcher_environment('slurm', dict(SLURM, SLURM_JOB_ID=str(job)), first)['MASTER_PORT']
    assert 20000 <= int(port) < 32768


@pytest.mark.parametrize(
    'launcher, variables', [('pytorch', TORCHRUN), ('mpi', MPI), ('slurm', SLURM)]
)
def test_every_missing_variable_is_named(launcher: str, variables: Dict[str, str]) -> None:
    optional = {
        'LOCAL_RANK',
        'OMPI_COMM_WORLD_LOCAL_SIZE',
        'SLURM_JOB_ID',
        'SLURM_NTASKS_PER_NODE',
    }
    for name in set(variables) - optional:
        rest = {key: value for key, value in variables.items() if key != name}
        with pytest.raises(LauncherError, match=f'{launcher!r} needs .* {name}, .*--launcher none'):
            launcher_environment(launcher, rest, first)


AGENT = dict(TORCHRUN, LOCAL_WORLD_SIZE='4')
RUN = dict(MPI, **launcher_environment('mpi', MPI))
TASK = dict(SLURM, **launcher_environment('slurm', SLURM, first))
HEAD = dict(TORCHRUN, WORLD_SIZE='2', LOCAL_WORLD_SIZE='2', MAPSAGE_ENCODERS='2')


@pytest.mark.parametrize(
    'environ, one',
    [
        ({}, False),
        (dict(AGENT, GROUP_WORLD_SIZE='1'), True),
        (dict(AGENT, GROUP_WORLD_SIZE='2'), False),
        # all heads on the first machine, all encoders on the second
        (dict(HEAD, GROUP_WORLD_SIZE='2'), False),
        (dict(HEAD, GROUP_WORLD_SIZE='1'), True),
        (HEAD, False),
        # two launchers on one machine count as two machines
        (dict(AGENT, GROUP_WORLD_SIZE='2', MASTER_ADDR='127.0.0.1'), False),
        # torchrun within an allocation of Slurm
        (dict(AGENT, SLURM_NNODES='2', GROUP_WORLD_SIZE='1'), True),
        (dict(AGENT, SLURM_NNODES='1', GROUP_WORLD_SIZE='2'), False),
        (RUN, False),
        (dict(RUN, OMPI_COMM_WORLD_LOCAL_SIZE='4'), True),
        # mpirun within an allocation: Slurm's variables are those of mpirun itself
        (dict(RUN, SLURM_NNODES='1'), False),
        (dict(TASK, SLURM_NNODES='2'), False),
        (dict(TASK, SLURM_NNODES='1'), True),
        # a step on one node of two
        (dict(TASK, SLURM_NNODES='2', SLURM_STEP_NUM_NODES='1'), True),
        (TASK, False),
        # started by hand
        (AGENT, True),
        (TORCHRUN, False),
        (dict(AGENT, LOCAL_WORLD_SIZE='2'), False),
        (dict(TORCHRUN, MASTER_ADDR='127.0.0.1'), True),
        (dict(TORCHRUN, MASTER_ADDR='localhost'), True),
        (dict(TORCHRUN, MASTER_ADDR='::1'), True),
        (dict(TORCHRUN, MASTER_ADDR='127.example.com'), False),
        (dict(TORCHRUN, MASTER_ADDR='127.0.0.1', GROUP_WORLD_SIZE='x'), True),
    ],
)
def test_whether_all_ranks_are_on_one_machine(environ: Dict[str, str], one: bool) -> None:
    assert launcher.on_one_machine(environ) is one


@pytest.mark.parametrize('job', ['x', ':', '-1', '12 13'])
def test_a_slurm_job_that_is_no_number(job: str) -> None:
    with pytest.raises(LauncherError, match='SLURM_JOB_ID=.*expected the number of a job'):
        launcher_environment('slurm', dict(SLURM, SLURM_JOB_ID=job), first)


def test_unknown_launcher() -> None:
    with pytest.raises(LauncherError, match="'horovod': expected none, pytorch, slurm or mpi"):
        launcher_environment('horovod', {})


def test_without_scontrol(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(LauncherError, match=r"SLURM_NODELIST='node\[1-2\]'.*Export MASTER_ADDR"):
        launcher_environment('slurm', SLURM)


@pytest.mark.parametrize(
    'script, words',
    [('echo node1; echo node2', ''), ('exit 1', 'Export MASTER_ADDR'), ('', 'Export MASTER_ADDR')],
    ids=['works', 'fails', 'silent'],
)
def test_scontrol(script: str, words: str, monkeypatch: Any, tmp_path: Path) -> None:
    (tmp_path / 'scontrol').write_text(f'#!/bin/sh\n{script}\n')
    (tmp_path / 'scontrol').chmod(0o755)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    if not words:
        assert launcher_environment('slurm', SLURM)['MASTER_ADDR'] == 'node1'
        return
    with pytest.raises(LauncherError, match=words):
        launcher_environment('slurm', SLURM)


def test_applied_to_the_environment() -> None:
    environ = dict(MPI, RANK='stale')
    assert apply_launcher_environment('mpi', environ) == 1
    assert environ['RANK'] == '3' and environ['WORLD_SIZE'] == '4'


PARENT = """
import importlib.util, multiprocessing, os, signal, sys, threading, time
spec = importlib.util.spec_from_file_location('launcher', sys.argv[1])
launcher = importlib.util.module_from_spec(spec)
spec.loader.exec_module(launcher)


def work(ready, seconds, state):
    time.sleep(seconds)
    launcher.die_with_parent()
    ready.set()
    if state == 'stopped':
        os.kill(os.getpid(), signal.SIGSTOP)
    while True:
        time.sleep(60)


def start(child, ready, seconds):  # as a loader is that is read in the background
    child.start()
    if not seconds:
        ready.wait()


for seconds, state in ((0, 'runs'), (0.5, 'runs'), (0, 'stopped')):
    if os.fork():
        continue
    ready = multiprocessing.Event()
    child = multiprocessing.Process(target=work, args=(ready, seconds, state))
    starter = threading.Thread(target=start, args=(child, ready, seconds))
    starter.start()
    starter.join()
    time.sleep(0.2)
    print(os.getpid(), child.pid, child.is_alive(), flush=True)
    time.sleep(60)
"""


@pytest.mark.long
@pytest.mark.skipif(sys.platform != 'linux', reason='prctl is Linux only')
def test_a_worker_outlives_the_thread_that_started_it_and_dies_with_the_process() -> None:
    """Of three processes, one dies before its worker asks for that, and one worker is stopped."""
    with subprocess.Popen(
        [sys.executable, '-c', PARENT, launcher.__file__], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        lines = [program.stdout.readline().split() for _ in range(3)]
        workers = [int(worker) for _, worker, _ in lines]
        for process, _, _ in lines:
            os.kill(int(process), signal.SIGKILL)
        program.wait()
        deadline = time.monotonic() + 60
        while any(map(_runs, workers)) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = list(filter(_runs, workers))
        for worker in left:
            os.kill(worker, signal.SIGKILL)
    assert not left and [alive for _, _, alive in lines] == ['True'] * 3


def _runs(pid: int) -> bool:
    try:
        return Path(f'/proc/{pid}/stat').read_text().rsplit(')', 1)[1].split()[0] != 'Z'
    except OSError:
        return False
