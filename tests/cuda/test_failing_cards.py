"""A rank whose process stops or whose device is full: the launch ends, and the error names it."""
from __future__ import annotations

from pathlib import Path

import pytest
from cards import launch_on_cards
from support import write_tiny_config

BROKEN = '''
custom_imports = dict(imports=['mapsage', 'device_faults'])
custom_hooks = [dict(type={hook!r})]
env_cfg['dist_cfg']['timeout'] = 10
default_hooks['preview'] = None
'''


@pytest.mark.parametrize('hook, messages', [
    ('StopRank1', ['rank(s) [1] did not come']),
    ('FillCardOfRank1', ['rank 1 failed first', 'OutOfMemoryError: CUDA out of memory', 'GPU 1'])])
def test_the_rank_at_fault_is_named(hook: str, messages: list, tiny_data: Path,
                                    tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, BROKEN.format(hook=hook))
    # A process that is stopped gets 30 s to end before it is killed.
    finished = launch_on_cards(config, '--work-dir', tmp_path / 'work', timeout=70.0,
                               environ={'CUDA_DOUBLE_MEMORY': '256'})
    assert finished.status != 0 and finished.left_running == []
    for message in messages:
        assert message in finished.final_error, finished.output[-6000:]
