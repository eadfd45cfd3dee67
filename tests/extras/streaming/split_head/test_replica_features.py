"""Delivery in a replica of one rank; tests/extras/streaming/test_head_replicas.py has several ranks."""

from __future__ import annotations

from typing import Any, Tuple

import pytest
import torch
from arriving_items import Item, ready
from support import main_leg

from mapsage.accelerator import resolve_accelerator
from mapsage.extras.streaming import StreamingError
from mapsage.extras.streaming.remote.blocks import BlockPool
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.split_head.replica_features import ReplicaFeatures


def alone(device: str = 'cpu', timeout: float = 5) -> ReplicaFeatures:
    return ReplicaFeatures(None, BlockPool(2, 8), torch.device(device), timeout)


def test_a_replica_of_one_rank() -> None:
    replica = alone()
    levels = [torch.randn(1, 2, 3, 5), torch.randn(1, 1, 1, 1)]
    features = replica.deliver(ready(levels))
    assert all(torch.equal(mine, its) for mine, its in zip(features, levels))
    features[0].zero_()  # the caller's own
    assert torch.equal(replica.deliver(ready(levels))[0], levels[0])
    with pytest.raises(StreamingError, match='^item 4 failed on rank 0: out of memory$'):
        replica.deliver(Item(4, state=State.FAILED, error='out of memory'))
    with pytest.raises(StreamingError, match='item 5 failed on rank 0: the source was closed'):
        replica.deliver(Item(5, state=State.NEW))
    with pytest.raises(StreamingError, match='no rank of the replica holds an item'):
        replica.deliver()
    assert replica.report()['items'] == 2 and replica.report() == {}


def test_a_time_out_that_is_none() -> None:
    with pytest.raises(ValueError, match='timeout=0, expected a positive number'):
        alone(timeout=0)


@main_leg
def test_features_come_to_a_simulated_card() -> None:
    if resolve_accelerator('sim').device_count() < 1:
        pytest.skip('no simulated card')
    device = resolve_accelerator('sim').device(0)
    levels = [torch.randn(1, 2, 3, 5), torch.randn(0, 1, 1, 1)]
    features = alone(str(device)).deliver(ready(levels))
    assert all(
        mine.device == device and torch.equal(mine.cpu(), its)
        for mine, its in zip(features, levels)
    )


class Standing(Item):
    """An item that makes no progress, and on which waiting returns at once."""

    def wait(self, timeout: float) -> None:
        pass


def test_an_item_without_progress_fails_at_the_time_out() -> None:
    with pytest.raises(
        StreamingError,
        match='item 3 failed on rank 0: nothing came for 0.01 s; it '
        'is NEW with 0 of an unknown number bytes',
    ):
        alone(timeout=0.01).deliver(Standing(3, state=State.NEW))


class Damaged(Item):
    """An item whose bytes cannot be read as asked."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        return super().read(start, stop)[1:]


def test_the_next_item_comes_after_one_that_failed() -> None:
    replica, levels = alone(), [torch.randn(1, 2, 3, 5)]
    broken: Any = Damaged(**vars(ready(levels)))
    with pytest.raises(StreamingError, match=r'ValueError: read\(0, 8\) gave \(7,\) torch.uint8'):
        replica.deliver(broken)
    assert torch.equal(replica.deliver(ready(levels))[0], levels[0])
    replica.close()  # raises if a block was not given back


def pair(first: int, second: int) -> Tuple[Item, Item]:
    return ready([torch.ones(1, 1, 1, 2)], number=first), ready(
        [torch.ones(1, 1, 1, 3)], number=second
    )


def test_an_announced_item_needs_one_tick_and_must_be_the_next() -> None:
    replica = alone()
    first, second = pair(6, 7)
    replica.deliver(first, second)
    replica.deliver(second)
    assert replica.report()['ticks'] == 3  # two for the first item, one for the second
    replica.deliver(first, second)
    with pytest.raises(
        StreamingError, match='announced item 7 as following, and this rank brings item 6'
    ):
        replica.deliver(first)
