"""Which process groups are watched, and what a roll call reads off them.

tests/cuda/test_hung_ranks.py has ranks that hang beside ranks that wait in NCCL.
"""
from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
import torch.distributed as dist

from mapsage.distributed.nodes.backend_watch import BackendLane, _groups, watch_backends


@pytest.fixture
def group(tmp_path: Path) -> Iterator[Any]:
    """The default group of one rank, over gloo."""
    dist.init_process_group('gloo', store=dist.FileStore(str(tmp_path / 'store'), 1), rank=0,
                            world_size=1)
    yield dist.distributed_c10d._get_default_group()
    dist.destroy_process_group()


def watchers() -> int:
    return sum(thread.name == 'mapsage backend watch' for thread in threading.enumerate())


def test_host_tensors_are_not_watched(group: Any) -> None:
    watch_backends('cpu')
    assert watchers() == 0


def test_a_group_without_a_backend_for_the_device_is_not_watched(group: Any) -> None:
    watch_backends('cuda')
    assert watchers() == 0 and not list(_groups('cuda'))


@pytest.mark.skipif(
    not hasattr(getattr(torch._C._distributed_c10d, 'Backend', None), 'get_error'),
    reason='the gloo group of this PyTorch does not say whether it has failed (2.14 does)')
def test_groups_that_are_made_later_are_found_and_their_collectives_counted(group: Any) -> None:
    before = {found.name for found in _groups('cpu')}
    later = dist.new_group([0])
    found = {found.name: found for found in _groups('cpu')}
    name = dist.distributed_c10d._pg_names[later]
    assert name in set(found) - before
    assert found[name].error == 'SUCCESS' and found[name].ranks == [0]
    lane = BackendLane('lane', [0], name, 'cpu')
    assert (lane.entered, lane.inside) == (0, False)
    for count in (1, 2):
        dist.all_reduce(torch.ones(2), group=later)
        assert lane.entered == count
