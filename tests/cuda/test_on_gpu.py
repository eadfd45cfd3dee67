"""tools/benchmarks/on_gpu.sh at toy sizes: a card's first hour is not spent on its mistakes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from cards import launch_on_cards
from support import check_finished

from mapsage.extras.demo import DemoParams, write_demo_data

STAGES = [
    'card_maps.py',
    'segmentors_gpu.py',
    'one_device',
    'step_overhead.py',
    'tests/contract',
    'tests/unit/distributed/wrappers',
    'segmentors_gpu.py',
    'all_devices',
    'dinov3_training.py',
    'feature_sources.py',
    'feature_sources.py',
    'feature_cache.py',
]


# It starts 30 processes, of which each imports everything.
@pytest.mark.timeout(1000)
def test_each_stage_runs_on_two_devices(tmp_path: Path) -> None:
    write_demo_data(tmp_path / 'demo', DemoParams(train_scenes=1, val_scenes=1, scene_size=256))
    finished = launch_on_cards(
        '--toy',
        command=['bash', 'tools/benchmarks/on_gpu.sh'],
        timeout=900.0,
        environ={
            'MAPSAGE_DEMO': str(tmp_path / 'demo'),
            'WORK_DIR': str(tmp_path / 'runs'),
            'MAPSAGE_NWPU': '',
        },
    )
    check_finished(finished)
    output = finished.output
    assert re.findall(r'^cuda:(\d) is ', output, re.M) == ['0', '1']
    assert '=== left out: the nwpu config' in output
    blocks = re.findall(r'^=== (?!took|left)(.*?)^=== took', output, re.M | re.S)
    assert len(blocks) == len(STAGES)
    for stage, block in zip(STAGES, blocks):
        assert stage in block.splitlines()[0], block[:200]
    # Stages that only look for a device may pass without one.
    assert all(re.search(r'\d+ passed', block) for block in blocks[4:6])
    assert 'world size 2, backend cpu:gloo,cuda:nccl' in blocks[7]
    assert 'accelerator cuda ' in blocks[2] and 'world size 1' in blocks[2]
    assert all('| ours |' in block for block in (blocks[1], blocks[6], blocks[8]))
    ratios = (tmp_path / 'runs' / 'ratios.md').read_text()
    assert '| a map / bare |' in ratios and '| stock / this |' in ratios


def test_it_ends_in_the_time_that_it_is_given(tmp_path: Path) -> None:
    start = time.monotonic()
    finished = launch_on_cards(
        '--seconds',
        30,
        '--toy',
        command=['bash', 'tools/benchmarks/on_gpu.sh'],
        environ={'WORK_DIR': str(tmp_path / 'runs'), 'MAPSAGE_NWPU': ''},
    )
    check_finished(finished)
    assert time.monotonic() - start < 60
    assert '=== left out, no time: ' in finished.output
    assert '=== failed' not in finished.output
