"""What a head has asked of encoders, and what comes of it: blocks, credits, failures."""
from __future__ import annotations

import threading
import time
from typing import Dict, Optional, Sequence

import torch

from mapsage.features.source import Encode
from mapsage.features.wire.header import Header, Kind
from mapsage.features.wire.link import Link, LinkError, Receiver
from mapsage.features.wire.payload import Layout, pack_images, pack_levels

from .arriving import Arriving
from .blocks import BlockPool
from .state import State

_OVER = (State.READY, State.CONSUMED, State.FAILED)


class Inbox(Receiver):
    """Items under way from encoders to one head. Safe to use from several threads.

    Blocks are given strictly in the order of items: one gets blocks once every item before it has
    all of its own. So the item the head needs next can always come, however few blocks there are.

    Args:
        links: To the encoders, started by :meth:`start`.
        pool: Where bytes arrive.
        encode: What encodes an item no encoder is left for, in the thread that waits for it; such
            an item fails where it is None.
        device: Where ``encode`` wants the images.
        digest: Of the weights the features must come from.
        timeout: Seconds an attempt may take while it is waited for.
        wire: Dtype in which features travel; as computed when None.
    """

    def __init__(self, links: Sequence[Link], pool: BlockPool, encode: Optional[Encode],
                 device: torch.device, digest: int, timeout: float,
                 wire: Optional[torch.dtype]) -> None:
        self._links, self._pool, self._encode = list(links), pool, encode
        self._device, self._digest, self._timeout, self._wire = device, digest, timeout, wire
        self._changed = threading.Condition(threading.RLock())
        self._items: Dict[int, Arriving] = {}  # in order
        self._last = -1
        self._turn = 0
        self._writing: Dict[Link, int] = {}  # the block into which a link writes now
        self._lost: Dict[Link, str] = {}
        self._closed = False
        self._counts: Dict[str, float] = {}

    def start(self) -> None:
        """Begin to listen."""
        for link in self._links:
            link.start(self)

    def request(self, number: int, images: torch.Tensor) -> Arriving:
        """Ask the least busy encoder for an item.

        Args:
            number: Larger than those before.
            images: (n, channels, height, width), on any device.

        Raises:
            ValueError: If the number is not larger, or the images are not such.
        """
        if number <= self._last:
            raise ValueError(f'item {number} was requested after item {self._last}: items are '
                             f'requested once and in order.')
        packed = pack_images(images)
        with self._changed:
            self._last = number
            arriving = Arriving(number, packed, self._pool, self._changed, self._tend)
            arriving.causes += [f'{link.peer}: {why}' for link, why in self._lost.items()]
            self._items[number] = arriving
            self._ask(arriving)
            return arriving

    def release(self, arriving: Arriving) -> None:
        """Forget an item that is READY or FAILED; its blocks go to those that wait for them."""
        with self._changed:
            if arriving.state == State.READY:
                arriving.let_go()
                arriving.progress = arriving.progress.consumed()
            del self._items[arriving.number]
            self._grant()

    def drop(self, arriving: Arriving) -> None:
        """Forget an item in any state; one that is under way is given up."""
        with self._changed:
            if arriving.state not in _OVER:
                self._drop_and_fail(arriving, 'it was given up')
            self.release(arriving)

    def counts(self) -> Dict[str, float]:
        """Return what happened since the last call, by name."""
        with self._changed:
            told, self._counts = self._counts, {}
            return told

    def close(self, timeout: float) -> None:
        """Close the links, and free the blocks once nothing can write into them.

        Args:
            timeout: Seconds for each encoder to answer.

        Raises:
            BlockError: If a block did not come back.
        """
        with self._changed:
            self._closed = True
            for link in self._links:
                link.send(Header(Kind.CLOSE))
        for link in self._links:
            link.close(timeout)
        with self._changed:
            for arriving in list(self._items.values()):
                if arriving.state not in _OVER:
                    self._fail(arriving, 'the source was closed')
                self.release(arriving)
        self._pool.close()

    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:  # noqa: D102
        if header.kind != Kind.DATA:
            return None
        with self._changed:
            arriving = self._current(link, header)
            grant = None if arriving is None else arriving.granted(header.block)
            if arriving is None or grant is None or grant != (
                    header.generation, header.offset, header.nbytes):
                self._count(duplicates=1)  # comes late or again: received, and not kept
                return None
            self._writing[link] = header.block
            return self._pool.begin_write(header.block, header.generation,
                                          arriving.owner)[:header.nbytes]

    def received(self, link: Link, header: Header, payload: torch.Tensor,  # noqa: D102
                 damage: Optional[str]) -> None:
        with self._changed:
            block = self._writing.pop(link, None)
            if block is not None:
                self._pool.end_write(block)
            arriving = self._current(link, header)
            if header.kind == Kind.HEARTBEAT:
                link.send(Header(Kind.HEARTBEAT))
            elif header.kind == Kind.OFFER:
                self._take_offer(arriving, header)
            elif header.kind == Kind.DATA:
                self._take_data(arriving, block, len(payload), damage)
            elif header.kind == Kind.FAILED:
                if arriving is not None:
                    why = damage or bytes(payload.tolist()).decode(errors='replace')
                    self._fail_attempt(arriving, why)
            else:
                raise LinkError(f'{header.kind.name} of item {header.item} came to a head.')
            self._grant()

    def lost(self, link: Link, reason: Optional[str]) -> None:  # noqa: D102
        with self._changed:
            self._lost[link] = reason or 'it closed its link'
            if reason is not None:
                self._count(lost=1)
            for arriving in list(self._items.values()):
                if arriving.link is link and arriving.state not in _OVER:
                    self._fail_attempt(arriving, self._lost[link])
            self._grant()

    def _current(self, link: Link, header: Header) -> Optional[Arriving]:
        """Return the item a message is about, if it still goes by this link and attempt."""
        arriving = self._items.get(header.item)
        if arriving is None or arriving.link is not link or arriving.state in _OVER \
                or arriving.attempt != header.attempt:
            return None
        return arriving

    def _ask(self, arriving: Arriving) -> None:
        """Ask the least busy of the encoders that were not asked yet."""
        arriving.begun, arriving.link = time.monotonic(), None
        turns = self._links[self._turn:] + self._links[:self._turn]
        left = [link for link in turns if link.alive and link not in arriving.asked
                and link not in self._lost]
        if not left or self._closed:
            if self._encode is None:
                self._fail(arriving, 'no encoder is left')
            return
        busy = [each.link for each in self._items.values() if each.state not in _OVER]
        link = min(left, key=busy.count)
        self._turn = (self._links.index(link) + 1) % len(self._links)
        arriving.asked.add(link)
        arriving.link = link
        assert arriving.images is not None
        layout, data = arriving.images
        link.send(Header(Kind.REQUEST, *arriving.owner, nbytes=len(data), layout=layout,
                         wire=self._wire), data)

    def _take_offer(self, arriving: Optional[Arriving], header: Header) -> None:
        if arriving is None or arriving.total is not None:
            self._count(duplicates=1)
            return
        assert arriving.link is not None
        peer, capacity = arriving.link.peer, self._pool.total * self._pool.block_bytes
        if header.digest != self._digest:
            self._drop_and_fail(
                arriving, f'{peer} has weights {header.digest:08x}, expected {self._digest:08x} as '
                f'this head has them: give both the same encoder')
        elif header.total > capacity:
            self._drop_and_fail(
                arriving, f'its features are {header.total} bytes and the pool holds {capacity}: '
                f'raise pool_bytes to {header.total} or more, or lower the batch or tile size')
        else:
            arriving.layout = header.layout
            arriving.progress = arriving.progress.offered(header.total)
            self._came(arriving)

    def _take_data(self, arriving: Optional[Arriving], block: Optional[int], nbytes: int,
                   damage: Optional[str]) -> None:
        if arriving is None or block is None:
            return  # counted when it was placed, or given up while it was received
        if damage is not None:
            self._fail_attempt(arriving, damage)
            return
        arriving.add(block)
        self._count(bytes=nbytes)
        self._came(arriving)

    def _came(self, arriving: Arriving) -> None:
        """Note that an item changed; a READY one cannot need its images again."""
        if arriving.state == State.READY:
            assert arriving.link is not None
            self._count(**{f'items from {arriving.link.peer}': 1})
            arriving.images = None
        arriving.version += 1
        self._changed.notify_all()

    def _grant(self) -> None:
        for arriving in self._items.values():
            progress = arriving.progress
            if arriving.link is None or progress.state in _OVER:
                continue  # encoded in place, it needs no blocks
            if progress.wants_blocks and self._pool.free:
                self._send_credit(arriving)
            if not arriving.progress.has_all_blocks:
                return

    def _send_credit(self, arriving: Arriving) -> None:
        assert arriving.link is not None and arriving.total is not None
        offset = arriving.progress.granted
        needed = -(-(arriving.total - offset) // self._pool.block_bytes)
        blocks = arriving.grant(min(needed, self._pool.free))
        if len(blocks) < needed:
            self._count(partial=1)
        payload = torch.frombuffer(torch.tensor(blocks, dtype=torch.int64).numpy(),
                                   dtype=torch.uint8)
        arriving.link.send(Header(
            Kind.CREDIT, *arriving.owner, total=arriving.total, offset=offset,
            span=arriving.progress.granted - offset, blocks=len(blocks),
            block_bytes=self._pool.block_bytes), payload)

    def _fail_attempt(self, arriving: Arriving, cause: str) -> None:
        """Give the item to the next encoder."""
        assert arriving.link is not None
        arriving.causes.append(f'{arriving.link.peer}: {cause}')
        self._drop(arriving)
        arriving.progress = arriving.progress.requeued()
        arriving.layout = None
        self._count(failovers=1)
        self._ask(arriving)
        arriving.version += 1
        self._changed.notify_all()

    def _drop(self, arriving: Arriving) -> None:
        """Free the blocks of an attempt and tell its encoder to forget it."""
        if arriving.link is not None:
            arriving.link.send(Header(Kind.FAILED, *arriving.owner))
        arriving.let_go()

    def _drop_and_fail(self, arriving: Arriving, why: str) -> None:
        self._drop(arriving)
        self._fail(arriving, why)

    def _fail(self, arriving: Arriving, why: str) -> None:
        arriving.let_go()
        causes = [why] + arriving.causes
        arriving.error = f"item {arriving.number} has no features: {'; '.join(causes)}."
        arriving.progress = arriving.progress.failed()
        arriving.images = None
        arriving.version += 1
        self._changed.notify_all()

    def _tend(self, arriving: Arriving) -> float:
        """Do what an item needs of who waits for it; return the seconds until it may need more."""
        with self._changed:
            now = time.monotonic()
            arriving.wanted = arriving.wanted or now
            orphan = arriving.link is None and arriving.state == State.NEW
            left = max(arriving.wanted, arriving.begun) + self._timeout - now
            if not orphan and arriving.state not in _OVER and left <= 0:
                self._fail_attempt(arriving, self._overdue(arriving))
                self._grant()
                return 0.0
        if orphan:
            self._encode_in_place(arriving)
            return 0.0
        return left if arriving.state not in _OVER else self._timeout

    def _overdue(self, arriving: Arriving) -> str:
        total = 'an unknown number' if arriving.total is None else arriving.total
        return (f'it is {arriving.state.name} with {arriving.arrived} of {total} bytes after '
                f'{self._timeout:g} s of waiting: raise timeout if the encoder is only slow')

    def _encode_in_place(self, arriving: Arriving) -> None:
        """Encode an item no encoder is left for; nobody else touches it."""
        assert self._encode is not None and arriving.images is not None
        layout: Optional[Layout] = None
        try:
            images, = arriving.images[0].unpack(arriving.images[1], self._device)
            with torch.no_grad():
                layout, data = pack_levels(self._encode(images), self._wire)
        except Exception as error:  # raised where the features are asked for
            with self._changed:
                self._fail(arriving, f'encoding it in place raised {type(error).__name__}: {error}')
            return
        with self._changed:
            arriving.layout, arriving.images = layout, None
            arriving.hold(data)
            self._count(local=1)
            self._changed.notify_all()

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self._counts[name] = self._counts.get(name, 0.0) + value
