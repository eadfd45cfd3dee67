"""A device that is full ends the run with PyTorch's sentence about it."""

from __future__ import annotations

from pathlib import Path

from cards import launch_on_cards
from support import write_tiny_config

FULL = """
custom_imports = dict(imports=['mapsage', 'device_faults'])
custom_hooks = [dict(type='FillCardOfRank1')]
"""


def test_out_of_memory_on_one_rank_ends_the_run_with_its_sentence(
    tiny_data: Path, tmp_path: Path
) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data, FULL)
    finished = launch_on_cards(
        config, '--work-dir', tmp_path / 'work', environ={'CUDA_DOUBLE_MEMORY': '256'}
    )
    assert finished.status != 0 and finished.left_running == []
    for message in (
        'rank 1 failed first',
        'OutOfMemoryError: CUDA out of memory',
        'GPU 1',
        'total capacity of 256.00 MiB',
    ):
        assert message in finished.final_error, finished.output[-6000:]
