"""However a run ends, all of it ends."""
from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Callable

import pytest
from support import Launch, write_tiny_config

WAITING = '''
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='StopBeforeIteration', iteration=2)]
train_dataloader['num_workers'] = 1
'''


def interrupt_launcher(run: Launch) -> None:
    os.kill(run.process.pid, signal.SIGINT)  # bash has become the launcher


def press_ctrl_c(run: Launch) -> None:
    os.killpg(run.process.pid, signal.SIGINT)  # what a terminal sends


def kill_launcher(run: Launch) -> None:
    os.kill(run.process.pid, signal.SIGKILL)


def kill_rank(run: Launch) -> None:
    os.kill(run.ranks()[1], signal.SIGKILL)


@pytest.mark.parametrize('end, words', [
    (interrupt_launcher, ['stopped by SIGINT']),
    (press_ctrl_c, ['stopped by SIGINT']),
    (kill_launcher, []),
    (kill_rank, ['failed first', 'killed by SIGKILL']),
])
def test_nothing_is_left_running(end: Callable[[Launch], None], words: list, tiny_data: Path,
                                 tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, WAITING)
    run = Launch(config, '--work-dir', tmp_path / 'work', cold=True, environ={
        'PYTHONPATH': str(Path(__file__).parent),
        'MAPSAGE_TEST_REACHED': str(tmp_path / 'reached')})
    run.wait_for(tmp_path / 'reached')
    assert len(run.ranks()) == 2
    end(run)
    finished = run.finish(timeout=30)
    assert finished.status != 0
    assert finished.left_running == []
    tail = finished.output[-600:]
    assert all(word in tail for word in words), finished.output[-4000:]
