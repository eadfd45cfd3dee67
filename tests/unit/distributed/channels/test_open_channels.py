"""Which channel a caller gets in one process; tests/distributed/ has several ranks."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from mapsage.distributed import SerialChannel, open_channel
from mapsage.distributed.channels.open_channels import _group_timeout
from mapsage.distributed.groups.process_group import DEFAULT_TIMEOUT_SECONDS


def test_without_a_process_group_a_channel_is_serial() -> None:
    assert isinstance(open_channel(), SerialChannel)
    with pytest.raises(ValueError, match='timeout=0, expected a positive number'):
        open_channel(timeout=0)


def test_a_process_group_of_one_rank_has_a_serial_channel(tmp_path: Path) -> None:
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    try:
        assert isinstance(open_channel(), SerialChannel)
        assert isinstance(open_channel(dist.new_group([0])), SerialChannel)
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, '_get_backend'),
    reason='a group of this torch has one backend for all devices',
)
def test_a_group_without_cpu_tensors_has_the_default_timeout(tmp_path: Path) -> None:
    dist.init_process_group(
        'cuda:gloo',
        init_method=f'file://{tmp_path}/store',
        rank=0,
        world_size=1,
        timeout=timedelta(seconds=5),
    )
    try:
        assert _group_timeout(dist.group.WORLD) == DEFAULT_TIMEOUT_SECONDS
    finally:
        dist.destroy_process_group()
