"""scripts/slurm_train.sh and arrays under a real Slurm of one node: `apt-get install slurm-wlm munge`.

The test starts daemons of its own."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Tuple

import pytest
from ranks import free_port
from support import ROOT, on_host, write_tiny_config
from warm_python import warm_python

PROGRAMS = ('munged', 'slurmctld', 'slurmd', 'sbatch', 'scontrol')
WHERE = f'{os.environ.get("PATH", "")}:/usr/sbin'
MISSING = [name for name in PROGRAMS if shutil.which(name, path=WHERE) is None]
pytestmark = [
    on_host,
    pytest.mark.skipif(
        bool(MISSING), reason=f'not installed: {", ".join(MISSING)} (slurm-wlm, munge)'
    ),
]

# Slurm starts a job that was queued again once its old credentials have expired.
SLURM_CONF = """
ClusterName=tests
SlurmctldHost=localhost
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldPort={controller}
SlurmdPort={node}
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
SchedulerParameters=defer,bf_interval=1,sched_interval=2
NodeName=localhost NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes=localhost Default=YES MaxTime=INFINITE State=UP
"""
PAUSED = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='PauseBeforeIteration', iteration=2)]
train_dataloader['num_workers'] = 1
train_cfg['max_iters'] = 4
"""


def await_true(what: Callable[[], bool], why: Callable[[], str], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why()
        time.sleep(0.1)


@pytest.fixture(scope='module')
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    """Return a function that runs a command of Slurm and returns what it prints."""
    folder = tmp_path_factory.mktemp('slurm')
    for name in ('state', 'spool'):
        (folder / name).mkdir()
    folder.chmod(0o755)
    (folder / 'munge.key').write_bytes(os.urandom(64))
    (folder / 'munge.key').chmod(0o600)
    (folder / 'slurm.conf').write_text(
        SLURM_CONF.format(
            folder=folder, user=getpass.getuser(), controller=free_port(), node=free_port()
        )
    )
    environ = {**os.environ, 'PATH': WHERE, 'SLURM_CONF': str(folder / 'slurm.conf')}
    commands: List[List[str]] = [
        [
            'munged',
            '--foreground',
            '--force',
            f'--socket={folder}/munge.socket',
            f'--key-file={folder}/munge.key',
            f'--pid-file={folder}/munge.pid',
            f'--seed-file={folder}/munge.seed',
            f'--log-file={folder}/munge.log',
        ],
        ['slurmctld', '-D', '-c'],
        ['slurmd', '-D', '-N', 'localhost'],
    ]
    daemons = []
    try:
        for command in commands:
            with open(folder / f'{command[0]}.out', 'w') as log:
                daemons.append(subprocess.Popen(command, env=environ, stdout=log, stderr=log))
            if command[0] == 'munged':
                await_true((folder / 'munge.socket').exists, lambda: 'munged does not start', 10)

        def run(*command: Any, **more: str) -> str:
            return subprocess.run(
                list(map(str, command)),
                env={**environ, **more},
                cwd=str(folder),
                timeout=60,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                universal_newlines=True,
            ).stdout

        await_true(lambda: 'idle' in run('sinfo'), lambda: run('sinfo'), 30)
        yield run
        run('scancel', '--signal=KILL', '--full', '--user', getpass.getuser())
    finally:
        for daemon in reversed(daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(20)
            except subprocess.TimeoutExpired:
                daemon.kill()


@pytest.mark.parametrize(
    'signals, options, states',
    [
        (
            ['--signal=USR1', '--batch'],
            [],
            ['COMPLETED', 'Restarts=1'],
        ),  # the batch script is asked
        (
            ['--signal=USR1'],
            ['--no-requeue'],
            ['FAILED', 'ExitCode=85:0'],
        ),  # tasks and their workers
        ([], [], ['CANCELLED', 'Restarts=0']),
    ],
)  # SIGTERM to all: nobody wants the job any more
def test_a_job_saves_and_goes_on_by_itself(
    signals: List[str],
    options: List[str],
    states: List[str],
    slurm: Callable[..., str],
    tiny_data: Path,
    tmp_path: Path,
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, PAUSED)
    environ: Dict[str, str] = {
        'MAPSAGE_PYTHON': warm_python(),
        'WORK_DIR': str(tmp_path / 'work'),
        'PYTHONPATH': str(ROOT / 'tests' / 'integration'),
        'MAPSAGE_TEST_GO': str(tmp_path / 'go'),
        'MAPSAGE_TEST_REACHED': str(tmp_path / 'reached'),
        'MASTER_PORT': str(free_port()),
    }
    output = tmp_path / 'job.out'
    job = slurm(
        'sbatch',
        '--parsable',
        '--ntasks',
        2,
        '--ntasks-per-node',
        2,
        '--output',
        output,
        *options,
        ROOT / 'scripts' / 'slurm_train.sh',
        config,
        **environ,
    ).strip()

    def facts() -> str:
        return (
            slurm('scontrol', 'show', 'job', job)
            + (output.read_text() if output.exists() else '')[-3000:]
        )

    await_true((tmp_path / 'reached').exists, facts)
    slurm('scancel', *signals, job)
    time.sleep(1)  # the signal goes through two daemons
    (tmp_path / 'go').touch()
    await_true(lambda: f'JobState={states[0]}' in facts(), facts)
    await_true(lambda: (tmp_path / 'work' / 'stopped.pth').exists(), facts)
    assert all(each in facts() for each in states), facts()
    text = output.read_text()
    assert 'the run was asked to stop' in text and 'ends after iteration 3' in text
    resumed = f'resuming from {tmp_path}/work/stopped.pth' in text
    assert resumed == (tmp_path / 'work' / 'iter_4.pth').exists() == (states[0] == 'COMPLETED')


def test_the_tasks_of_an_array_share_a_folder_of_maps(
    slurm: Callable[..., str], model: Tuple[Path, Path], tmp_path: Path
) -> None:
    """An array of two, and an array of one that begins with 7; docs/how-to/engines.md has the command."""
    from color_model import paint, write_scene

    (tmp_path / 'scenes').mkdir()
    for number in range(4):
        write_scene(tmp_path / 'scenes' / f'{number}.tif', paint(200 + number, 150))
    environ = {'PYTHONPATH': str(ROOT / 'tests')}
    program = f'{warm_python()} {ROOT}/tools/predict.py {model[0]} {model[1]} {tmp_path}/scenes'
    assert (
        'sbatch --array 0-7 --wrap "python tools/predict.py'
        in (ROOT / 'docs/how-to/engines.md').read_text()
    )
    for array in ('0-1', '7'):
        out = tmp_path / array
        log = out.with_suffix('.%a.out')
        slurm(
            'sbatch',
            '--array',
            array,
            '--output',
            log,
            '--wrap',
            f'{program} --out {out}',
            **environ,
        )
    logs = [tmp_path / f'{name}.out' for name in ('0-1.0', '0-1.1', '7.7')]

    def facts() -> str:
        return slurm('squeue') + ''.join(log.read_text()[-2000:] for log in logs if log.exists())

    await_true(lambda: not slurm('squeue', '--noheader').strip(), facts, 180)
    maps = [
        [path.read_bytes() for path in sorted((tmp_path / array).glob('*.tif'))]
        for array in ('0-1', '7')
    ]
    assert len(maps[0]) == 4 and maps[0] == maps[1], facts()
    assert list(tmp_path.glob('*/.*')) == []
