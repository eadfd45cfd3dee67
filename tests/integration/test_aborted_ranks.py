"""Ranks that a watchdog aborts are not what the launcher's last words begin with."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support import launch, main_leg, write_tiny_config

pytestmark = main_leg

# One rank sleeps in its third step. The others abort while they wait for it, as NCCL's watchdog
# does on a thread of its own; with WORD they have found out before for whom they wait.
HANG = """
import os, threading, time
from mmengine.hooks import Hook
from mmengine.registry import HOOKS
from mapsage.distributed.launcher_notes import note_for_launcher

HANGS = int(os.environ['HANGS'])


def abort():
    if os.environ['WORD']:
        note_for_launcher(f'rank {os.environ["RANK"]} has waited for rank {HANGS}', blamed=[HANGS])
    os.abort()


@HOOKS.register_module()
class HangHook(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 2 and runner.rank == HANGS:
            time.sleep(3600)
        if runner.iter == 2:
            threading.Timer(4 + runner.rank / 5, abort).start()
"""
SETTINGS = """
custom_imports = dict(imports=['mapsage', 'hang_hook'])
custom_hooks = [dict(type='HangHook')]
"""


@pytest.mark.parametrize('ranks, hangs, word', [(3, 1, ''), (3, 0, 'yes'), (2, 1, 'yes')])
def test_the_rank_that_hangs_is_named(
    ranks: int, hangs: int, word: str, tmp_path: Path, tiny_data: Path
) -> None:
    (tmp_path / 'hang_hook.py').write_text(HANG)
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SETTINGS)
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        ranks=ranks,
        environ={
            'ACCELERATOR': 'cpu',
            'WORD': word,
            'HANGS': str(hangs),
            'PYTHONPATH': str(tmp_path),
        },
    )
    assert finished.status != 0 and finished.left_running == []
    error = finished.final_error.strip()
    if word:
        assert error.startswith(f'error: rank(s) [{hangs}] was waited for in vain, rank'), error
    else:  # nothing says who is the cause
        assert re.match(
            rf'error: rank\(s\) \[[^\]]+\] aborted while rank\(s\) \[[^\]]*\b{hangs}\b'
            rf'[^\]]*\] still ran:\n',
            error,
        ), error
