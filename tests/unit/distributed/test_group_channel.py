"""Which channel a caller gets in one process; tests/distributed/ has several ranks."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from mapsage.distributed import SerialChannel, group_channel, open_channel


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


def test_channels_over_the_same_ranks_count_apart() -> None:
    """As the ranks of the only head replica and the default group are, or two Runners in turn."""
    prefixes = [group_channel._new_prefix(ranks) for ranks in ([0, 1], [0, 1], [0, 1, 2], [1, 2])]
    assert len(set(prefixes)) == 4
