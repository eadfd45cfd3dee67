"""A launched run that gets SIGTERM or SIGUSR1 saves, leaves with its own status, and continues."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any, Callable, Dict

import pytest
from frozen_config import PLAIN
from support import Launch, launch, on_host, write_tiny_config

HOOKS = str(Path(__file__).parents[1] / 'integration')  # folder of fault_hooks.py
PAUSED = """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='PauseBeforeIteration', iteration=2)]
train_dataloader['num_workers'] = 1
train_cfg['max_iters'] = 4
"""
STREAMED = "feature_source = dict(type='Streamed', encoders=1, local_fallback=False)\n"


def launcher(run: Launch) -> None:
    os.kill(run.process.pid, signal.SIGTERM)
    run.wait_for(notes(run) / 'stop')  # where its ranks look


def one_rank(run: Launch) -> None:
    os.kill(run.ranks()[1], signal.SIGUSR1)


def every_process(run: Launch) -> None:
    """What Slurm and systemd do: launcher, fork server, ranks and loaders' workers."""
    for pid in run.running():
        os.kill(pid, signal.SIGTERM)


def encoder(run: Launch) -> None:
    (pid,) = [int(path.name.split('-')[-1]) for path in (notes(run) / 'encoders').iterdir()]
    os.kill(pid, signal.SIGTERM)


def notes(run: Launch) -> Path:
    """Return the folder of the launcher's notes."""
    environ = Path(f'/proc/{run.ranks()[0]}/environ').read_text().split('\0')
    return Path(
        next(each.split('=', 1)[1] for each in environ if each.startswith('MAPSAGE_ERROR_NOTES='))
    )


@pytest.mark.parametrize(
    'ask, ranks, more, cold',
    [
        (launcher, 2, '', False),
        pytest.param(one_rank, 3, '', False, marks=on_host),
        pytest.param(every_process, 2, '', True, marks=on_host),
        pytest.param(encoder, 3, PLAIN + STREAMED, False, marks=on_host),
    ],
)
def test_a_run_that_is_asked_to_stop_can_be_queued_again(
    ask: Callable[[Launch], None],
    ranks: int,
    more: str,
    cold: bool,
    tiny_data: Path,
    tmp_path: Path,
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, PAUSED + more)
    work, go = tmp_path / 'work', tmp_path / 'go'
    settings: Dict[str, Any] = dict(
        ranks=ranks,
        environ={
            'PYTHONPATH': HOOKS,
            'MAPSAGE_TEST_GO': str(go),
            'MAPSAGE_TEST_REACHED': str(tmp_path / 'reached'),
        },
    )
    run = Launch(config, '--work-dir', work, cold=cold, **settings)
    run.wait_for(tmp_path / 'reached')
    ask(run)
    go.touch()
    finished = run.finish()
    assert finished.status == 85, finished.output[-4000:]
    assert finished.left_running == [] and 'left, as they were asked to' in finished.output
    assert (work / 'last_checkpoint').read_text() == str(work / 'stopped.pth')
    assert not (work / 'iter_4.pth').exists()
    if ask is launcher:  # the others leave the same files
        resumed = launch(config, '--work-dir', work, '--resume', **settings)
        assert resumed.status == 0, resumed.output[-4000:]
        assert f'resuming from {work}/stopped.pth' in resumed.output
        assert 'Iter(train) [4/4]' in resumed.output and '[2/4]' not in resumed.output


@pytest.mark.parametrize('stopped', [True, False])
def test_one_process_ends_with_its_workers(stopped: bool, tiny_data: Path, tmp_path: Path) -> None:
    paused = (
        PAUSED
        if stopped
        else PAUSED.replace('PauseBeforeIteration', 'SyncBuffersHook').replace(', iteration=2', '')
    )
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, paused)
    go = tmp_path / 'go'
    command = [sys.executable, 'tools/train.py']
    run = Launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        command=command,
        environ={
            'PYTHONPATH': HOOKS,
            'MAPSAGE_TEST_GO': str(go),
            'MAPSAGE_TEST_REACHED': str(tmp_path / 'reached'),
        },
    )
    if stopped:
        run.wait_for(tmp_path / 'reached')
        os.kill(run.process.pid, signal.SIGTERM)
        go.touch()
    finished = run.finish()
    assert finished.status == (85 if stopped else 0), finished.output[-4000:]
    assert finished.left_running == []
