"""A rank that hangs while others wait for it in NCCL is named before the watchdog ends them."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import launch, write_tiny_config

# Rank HANGS of the run sleeps in its third step, or is stopped there; the others start theirs.
HANG = """
import os, signal, time
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


@HOOKS.register_module()
class HangHook(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 2 and os.environ['RANK'] == os.environ['HANGS']:
            if os.environ['HOW'] == 'stopped':
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(3600)
"""
SETTINGS = """
custom_imports = dict(imports=['mapsage', 'hang_hook'])
custom_hooks = [dict(type='HangHook')]
env_cfg['dist_cfg']['timeout'] = 8
"""


@pytest.mark.parametrize(
    'how, ranks, hangs',
    [
        ('sleeps', 3, 1),
        pytest.param('stopped', 2, 1, marks=pytest.mark.long),
        pytest.param('sleeps', 2, 0, marks=pytest.mark.long),
    ],
)
def test_the_rank_that_hangs_is_named(
    how: str, ranks: int, hangs: int, tmp_path: Path, tiny_data: Path
) -> None:
    (tmp_path / 'hang_hook.py').write_text(HANG)
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, SETTINGS)
    finished = launch(
        config,
        ranks=ranks,
        environ={
            'ACCELERATOR': 'cuda',
            'CUDA_DOUBLE_DEVICES': str(ranks),
            'HOW': how,
            'HANGS': str(hangs),
            'PYTHONPATH': str(tmp_path),
            'WORK_DIR': str(tmp_path / 'work'),
        },
    )
    assert finished.status != 0 and finished.left_running == []
    error = finished.final_error
    assert f'rank(s) [{hangs}] did not come to it' in error, finished.output[-4000:]
    assert f'rank {hangs} failed first' not in error and 'SIGABRT' not in error
    assert ('does not answer' in error) == (how == 'stopped')
    # NCCL's own watchdog waits for another minute before it ends the process.
    assert 'taking the entire process down' not in finished.output
