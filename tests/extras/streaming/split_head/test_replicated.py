"""A replica's source with an encoder in the same process, over a real link."""

from __future__ import annotations

import threading
from typing import Iterator

import pytest
import torch
from link_pairs import open_pair

from mapsage.extras.streaming.remote.blocks import BlockPool
from mapsage.extras.streaming.remote.sender import serve
from mapsage.extras.streaming.remote.streamed import Streamed
from mapsage.extras.streaming.source import Features, Item, StreamingError
from mapsage.extras.streaming.split_head.replica_features import ReplicaFeatures
from mapsage.extras.streaming.split_head.replicated import Replicated

CPU = torch.device('cpu')


def encode(images: torch.Tensor) -> Features:
    if bool((images == 2).all()):
        raise ValueError('no such tile')
    return images / 7, images.sum(1, keepdim=True)


def item(number: int) -> Item:
    return Item(number, (), torch.full((1, 3, 5, 4), float(number)))


@pytest.fixture
def source() -> Iterator[Replicated]:
    link, theirs = open_pair()
    encoder = threading.Thread(target=serve, args=([theirs], encode, CPU), daemon=True)
    encoder.start()
    replicated = Replicated(
        ReplicaFeatures(None, BlockPool(4, 64), CPU, 30),
        Streamed([link], CPU, block_bytes=64),
        ahead=2,
    )
    yield replicated
    replicated.close()  # raises if a block was not given back
    replicated.close()
    encoder.join(30)
    assert not encoder.is_alive()


def check(source: Replicated, number: int) -> None:
    features = source.features(item(number))
    assert all(map(torch.equal, features, encode(item(number).images)))


def test_items_come_in_the_order_of_the_requests(source: Replicated) -> None:
    assert source.ahead == 2
    for number in (0, 1, 3):
        source.request(item(number))
    check(source, 0)
    with pytest.raises(
        StreamingError,
        match=r'item 3 was asked for, and of those requested '
        r'\[1, 3\] the first is next',
    ):
        source.features(item(3))
    check(source, 1)
    check(source, 3)
    with pytest.raises(StreamingError, match=r'requested \[\]'):
        source.features(item(3))
    report = source.report()
    assert report['items'] == 3 and report['items from encoder rank 1'] == 3


def test_items_after_one_that_failed_still_come(source: Replicated) -> None:
    for number in (1, 2, 3):
        source.request(item(number))
    check(source, 1)
    with pytest.raises(StreamingError, match='item 2 failed on rank 0: .*no such tile'):
        source.features(item(2))
    check(source, 3)


def test_a_rank_without_a_source_needs_another_that_has_one() -> None:
    replicated = Replicated(ReplicaFeatures(None, BlockPool(4, 64), CPU, 30), None, ahead=0)
    replicated.request(item(0))
    with pytest.raises(StreamingError, match='no rank of the replica holds an item'):
        replicated.features(item(0))
    replicated.close()
