"""An item's transitions, block by block, without links."""

from __future__ import annotations

import threading
from typing import Any, List, Tuple

import pytest
import torch

from mapsage.extras.streaming.remote.blocks import BlockPool
from mapsage.extras.streaming.remote.item import Grant, RemoteItem
from mapsage.extras.streaming.remote.state import ProgressError, State
from mapsage.extras.streaming.source import StreamingError
from mapsage.extras.streaming.wire.payload import Layout, pack_images

SIZE = 4
LAYOUT = Layout(((1, 1, 1, 10),), torch.uint8, torch.uint8)
BYTES = torch.arange(10, dtype=torch.uint8)


class Encoder:
    """What an item knows of a link: the name of its peer."""

    def __init__(self, number: int) -> None:
        self.peer = f'encoder {number}'


def item_in(pool: BlockPool, on_wait: Any = None, **settings: Any) -> RemoteItem:
    return RemoteItem(
        3,
        pack_images(torch.zeros(1, 3, 2, 2)),
        pool,
        threading.Condition(threading.RLock()),
        on_wait or (lambda item: 0.0),
        settings.get('causes', ()),
    )


def offered(pool: BlockPool, **settings: Any) -> RemoteItem:
    item = item_in(pool, **settings)
    with item._changed:
        item.ask(Encoder(0))  # type: ignore[arg-type]
        item.offer(LAYOUT, 10)
    return item


def fill(item: RemoteItem, pool: BlockPool) -> List[Tuple[int, int]]:
    """Give the item the blocks that it can have, and all their bytes; return (offset, nbytes)."""
    written = []
    with item._changed:
        credit = item.reserve()
        for position, (block, generation) in enumerate(credit.blocks):
            offset = credit.offset + position * SIZE
            nbytes = min(SIZE, credit.offset + credit.span - offset)
            memory = item.begin_write(block, Grant(generation, offset, nbytes))
            assert memory is not None
            memory.copy_(BYTES[offset : offset + nbytes])
            pool.end_write(block)
            item.receive(block)
            written.append((offset, nbytes))
    return written


def test_all_blocks_at_once() -> None:
    pool = BlockPool(3, SIZE)
    item = offered(pool)
    assert fill(item, pool) == [(0, 4), (4, 4), (8, 2)]
    assert item.state == State.READY and item.images is None and pool.free == 0
    assert torch.equal(item.read(0, 10), BYTES) and torch.equal(item.read(3, 9), BYTES[3:9])
    with item._changed:
        item.consume()
    assert item.state == State.CONSUMED and pool.free == 3
    with pytest.raises(StreamingError, match='bytes 0 to 1 of item 3 .* CONSUMED with 10'):
        item.read(0, 1)


def test_parts_leave_their_blocks_and_can_be_read_across() -> None:
    pool = BlockPool(2, SIZE)
    item = offered(pool)
    assert fill(item, pool) == [(0, 4), (4, 4)]
    assert item.state == State.PARTIAL and item.arrived == 8 and pool.free == 2
    with pytest.raises(StreamingError, match='bytes 0 to 9'):
        item.read(0, 9)
    assert torch.equal(item.read(2, 8), BYTES[2:8])
    assert fill(item, pool) == [(8, 2)]
    assert item.state == State.READY and pool.free == 1
    assert torch.equal(item.read(6, 10), BYTES[6:])  # half of it from the last block


def test_the_next_attempt_begins_without_a_byte_and_keeps_the_cause() -> None:
    pool = BlockPool(2, SIZE)
    item = offered(pool, causes=['encoder 9: it went away'])
    fill(item, pool)
    with item._changed:
        item.retry('no such tile')
    assert (item.attempt, item.arrived, item.total, item.layout) == (1, 0, None, None)
    assert item.link is None and item.images is not None and pool.free == 2
    with item._changed:
        item.ask(Encoder(1))  # type: ignore[arg-type]
        item.fail('no encoder is left')
    assert item.error == (
        'item 3 has no features: no encoder is left; encoder 9: it went away; '
        'encoder 0: no such tile.'
    )
    assert item.state == State.FAILED and item.images is None


def test_bytes_that_were_not_granted_are_refused() -> None:
    pool = BlockPool(3, SIZE)
    item = offered(pool)
    with item._changed:
        (block, generation), *_ = item.reserve().blocks
        for grant in (
            Grant(generation + 1, 0, 4),
            Grant(generation, 4, 4),
            Grant(generation, 0, 3),
        ):
            assert item.begin_write(block, grant) is None
        assert item.begin_write(block + 3, Grant(generation, 0, 4)) is None
        with pytest.raises(ProgressError, match='given blocks'):
            item.reserve()
    assert pool.free == 0


def test_blocks_of_an_attempt_that_ends_during_a_write_come_back_after_it() -> None:
    pool = BlockPool(1, SIZE)
    item = offered(pool)
    with item._changed:
        ((block, generation),) = item.reserve().blocks
        assert item.begin_write(block, Grant(generation, 0, 4)) is not None
        item.retry('it is late')
    assert pool.free == 0
    pool.end_write(block)
    assert pool.free == 1


def test_features_that_the_head_computed() -> None:
    pool = BlockPool(1, SIZE)
    item = item_in(pool)
    with item._changed:
        item.encode(LAYOUT, BYTES)
    assert item.state == State.READY and item.layout == LAYOUT
    assert torch.equal(item.read(0, 10), BYTES) and pool.free == 1
    with pytest.raises(ProgressError, match='cannot be encoded locally'), item._changed:
        item.encode(LAYOUT, BYTES)


def test_time_runs_while_somebody_waits_and_a_transition_ends_the_wait() -> None:
    asked = threading.Event()
    pool = BlockPool(3, SIZE)

    def on_wait(item: RemoteItem) -> float:
        asked.set()
        return 60.0

    item = item_in(pool, on_wait)
    first = item.seconds_left(10)
    assert item.seconds_left(10) == first == 10  # nobody waits
    waiting = threading.Thread(target=item.wait, args=(60,))
    waiting.start()
    assert asked.wait(30) and item.seconds_left(10) < 10
    with item._changed:
        item.fail('the source was closed')
    waiting.join(30)
    assert not waiting.is_alive()
