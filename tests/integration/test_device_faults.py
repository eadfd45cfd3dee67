"""A device that is missing, full or hung ends every rank with an error that names it."""

from __future__ import annotations

from pathlib import Path

import pytest
from support import launch, write_tiny_config

from mapsage.extras.simulator.accelerator import SimAccelerator

reason = SimAccelerator.why_unavailable()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

DEADLINE = 10  # seconds a collective may take; the run itself gets as long as any bad input


@pytest.mark.parametrize(
    'fault, words',
    [
        ('absent=1', ['rank 1 failed first', 'gcu:1 does not answer', 'MAPSAGE_SIM_FAULTS']),
        (
            'allocation=400@1',
            ['rank 1 failed first', 'OutOfMemoryError', 'GCU out of memory', 'gcu:1'],
        ),
        # Both ranks have started it, and eccl does not say whose card hangs.
        (
            'stall=12@1',
            [
                'report:',
                'in collective 12 of its device backend, which every rank has '
                'started and its card has not ended within 10 s',
                'scripts/doctor.sh',
            ],
        ),
    ],
)
def test_faulty_devices(fault: str, words: list, tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(tmp_path / 'tiny.py', tiny_data)
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        '--cfg-options',
        f'env_cfg.dist_cfg.timeout={DEADLINE}',
        environ={'ACCELERATOR': 'sim', 'MAPSAGE_SIM_FAULTS': fault},
    )
    assert finished.status != 0, finished.output[-4000:]
    assert finished.left_running == []
    for word in words:
        assert word in finished.final_error, finished.output[-6000:]


def test_whole_int64_is_refused_at_the_start(tiny_data: Path, tmp_path: Path) -> None:
    """The ranks would start with different weights, and BatchNorm could not count."""
    finished = launch(
        write_tiny_config(tmp_path / 'tiny.py', tiny_data),
        '--work-dir',
        tmp_path / 'work',
        environ={'ACCELERATOR': 'sim', 'MAPSAGE_SIM_GCU': '2.10-int64'},
    )
    assert finished.status != 0 and finished.left_running == []
    assert (
        'MAPSAGE_SIM_GCU=2.10-int64: with it the simulated torch_gcu 2.10.0, '
        'TORCH_GCU_ENABLE_INT64_AND_UINT64=1 keeps int64 in 64 bits' in finished.output
    )
    assert 'unset MAPSAGE_SIM_GCU' in finished.final_error, finished.output[-4000:]


def test_a_buffer_registered_late_on_the_cpu(tiny_data: Path, tmp_path: Path) -> None:
    config = write_tiny_config(
        tmp_path / 'tiny.py',
        tiny_data,
        """
custom_imports = dict(imports=['mapsage', 'fault_hooks'])
custom_hooks = [dict(type='LateBufferOnRank1'), dict(type='DeviceCheckHook', interval=2)]
""",
    )
    finished = launch(
        config,
        '--work-dir',
        tmp_path / 'work',
        environ={'ACCELERATOR': 'sim', 'PYTHONPATH': str(Path(__file__).parent)},
    )
    assert finished.status != 0, finished.output[-4000:]
    assert finished.left_running == []
    for rank in (0, 1):
        assert (
            f'[rank {rank}] DeviceCheckError: the device check after iteration 4' in finished.output
        ), finished.output[-6000:]
    assert "rank 1: buffer 'decode_head.cache' is on cpu, expected gcu:1" in finished.final_error
