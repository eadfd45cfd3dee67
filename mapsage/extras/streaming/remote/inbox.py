"""A head's requests to encoders: routes messages, gives blocks to items and picks encoders.

Flow of an item: REQUEST to an encoder, OFFER with the size of its features, CREDIT with blocks for
them, DATA into the blocks. If the encoder fails, the item starts again at another encoder, and in
the end locally.
"""

from __future__ import annotations

import threading
from typing import Callable, Dict, List, Optional, Sequence, Set

import torch

from mapsage.distributed import error_text
from mapsage.extras.streaming.source import Encode
from mapsage.extras.streaming.wire.header import Header, Kind
from mapsage.extras.streaming.wire.link import Link, LinkError, Receiver
from mapsage.extras.streaming.wire.payload import pack_images, pack_levels

from .blocks import BlockPool
from .item import Grant, RemoteItem
from .notices import Log, Notices, log_plainly
from .state import State


class Inbox(Receiver):
    """The items on their way from encoders to one head. Safe to use from several threads.

    Blocks are given strictly in the order of items: an item gets blocks once every earlier item has
    all of its blocks. So the item that the head needs next can always arrive, even with few blocks.

    Args:
        links: Links to the encoders, which :meth:`start` starts.
        pool: Blocks in which bytes arrive.
        grow: Function that takes the number of blocks of an item, and returns the number that the
            pool shall have at least; None if it keeps its size.
        encode: Encoder for items that no encoder rank is left for, called in the thread that waits
            for such an item. Without it these items fail.
        device: Device on which ``encode`` wants the images.
        digest: Digest of the weights that the features must come from.
        timeout: Seconds that an attempt may take while somebody waits for it, and half of those
            that an item may take before it is encoded locally, or fails.
        wire: Dtype in which features travel; the computed dtype when None.
        log: Function that logs a text at a level of :mod:`logging`.
    """

    def __init__(
        self,
        links: Sequence[Link],
        pool: BlockPool,
        encode: Optional[Encode],
        device: torch.device,
        digest: int,
        timeout: float,
        wire: Optional[torch.dtype],
        log: Log = log_plainly,
        grow: Optional[Callable[[int], int]] = None,
    ) -> None:
        self._links, self._pool, self._encode = list(links), pool, encode
        self._notices, self._grow = Notices(log, encode is not None), grow
        self._device, self._digest, self._timeout, self._wire = device, digest, timeout, wire
        self._changed = threading.Condition(threading.RLock())
        # Items in the order of their numbers.
        self._items: Dict[int, RemoteItem] = {}
        self._last = -1
        # Index of the link that is considered first for the next item.
        self._next_link = 0
        # Items that are being encoded locally.
        self._local: List[RemoteItem] = []
        # The block into which a link is writing.
        self._writing: Dict[Link, int] = {}
        self._lost: Dict[Link, str] = {}
        # Encoders that were overdue and have not answered since.
        self._late: Set[Link] = set()
        self._closed = False
        self._counts: Dict[str, float] = {}

    def start(self) -> None:
        """Begin to listen."""
        for link in self._links:
            link.start(self)

    def request(self, number: int, images: torch.Tensor) -> RemoteItem:
        """Ask the least busy encoder for an item.

        Args:
            number: Number of the item, larger than those requested before.
            images: (n, channels, height, width), on any device.

        Raises:
            ValueError: If the number is not larger, or the images have another shape or dtype.
        """
        if number <= self._last:
            raise ValueError(
                f'item {number} was requested after item {self._last}: items are '
                f'requested once and in order.'
            )
        packed = pack_images(images)
        with self._changed:
            self._last = number
            item = RemoteItem(
                number,
                packed,
                self._pool,
                self._changed,
                self._on_wait,
                [f'{link.peer}: {reason}' for link, reason in self._lost.items()],
            )
            self._items[number] = item
            self._ask(item)
            return item

    def release(self, item: RemoteItem) -> None:
        """Forget an item that is READY or FAILED; its blocks go to the items that wait for them."""
        with self._changed:
            if item.state == State.READY:
                item.consume()
            del self._items[item.number]
            self._grant()

    def drop(self, item: RemoteItem) -> None:
        """Forget an item in any state; if it is on its way, it is canceled."""
        with self._changed:
            if not item.progress.is_over:
                self._cancel_and_fail(item, 'it was given up')
            self.release(item)

    def counts(self) -> Dict[str, float]:
        """Return how often each thing happened since the last call, by its name."""
        with self._changed:
            counts, self._counts = self._counts, {}
            return counts

    def close(self, timeout: float) -> None:
        """Close the links, and free the blocks once nothing can write into them.

        Args:
            timeout: Seconds that each encoder has to answer.

        Raises:
            BlockError: If a block was not given back.
        """
        with self._changed:
            self._closed = True
            for link in self._links:
                link.send(Header(Kind.CLOSE))
        for link in self._links:
            link.close(timeout)
        with self._changed:
            for item in list(self._items.values()):
                if not item.progress.is_over:
                    item.fail('the source was closed')
                self.release(item)
        self._pool.close()

    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:  # noqa: D102
        if header.kind != Kind.DATA:
            return None
        with self._changed:
            item = self._current(link, header)
            memory = (
                None
                if item is None
                else item.begin_write(
                    header.block, Grant(header.generation, header.offset, header.nbytes)
                )
            )
            if memory is None:
                # Late bytes, or bytes that arrive for the second time, are received and dropped.
                self._count(duplicates=1)
            else:
                self._writing[link] = header.block
            return memory

    def received(  # noqa: D102
        self,
        link: Link,
        header: Header,
        payload: torch.Tensor,
        damage: Optional[str],
    ) -> None:
        with self._changed:
            item = self._current(link, header)
            if header.kind in (Kind.OFFER, Kind.FAILED) and link in self._late:
                self._late.discard(link)
                self._ask_orphans()
            if header.kind == Kind.OFFER:
                self._take_offer(item, header)
            elif header.kind == Kind.DATA:
                self._take_data(item, link, len(payload), damage)
            elif header.kind == Kind.FAILED:
                if item is not None:
                    reason = damage or bytes(payload.tolist()).decode(errors='replace')
                    self._fail_attempt(item, reason)
            else:
                raise LinkError(f'{header.kind.name} of item {header.item} came to a head.')
            self._grant()

    def lost(self, link: Link, reason: Optional[str]) -> None:  # noqa: D102
        with self._changed:
            known = link in self._lost
            self._lost[link] = reason or 'it closed its link'
            if reason is not None and not known:
                self._count(lost=1)
            if not self._closed and (not known or not link.reopens):
                self._notices.lost(link, reason, any(encoder.alive for encoder in self._links))
            for item in list(self._items.values()):
                if item.link is link and not item.progress.is_over:
                    item.may_ask_again(link)
                    self._fail_attempt(item, self._lost[link])
            self._ask_orphans()
            self._grant()

    def opened(self, link: Link) -> None:  # noqa: D102
        with self._changed:
            self._lost.pop(link, None)
            self._late.discard(link)
            self._count(reopened=1)
            self._notices.opened(link)
            self._ask_orphans()
            self._grant()

    def _ask_orphans(self) -> None:
        """Ask for the items that have no encoder, if there is one for them now."""
        for item in list(self._items.values()):
            if item.link is None and item.state == State.NEW and item not in self._local:
                self._ask(item)

    def _current(self, link: Link, header: Header) -> Optional[RemoteItem]:
        """Return the item that a message is about, unless its attempt or the item is over."""
        item = self._items.get(header.item)
        if (
            item is None
            or item.link is not link
            or item.progress.is_over
            or item.attempt != header.attempt
        ):
            return None
        return item

    def _ask(self, item: RemoteItem) -> None:
        """Give an item to the least busy of the encoders that were not asked yet."""
        candidates = self._links[self._next_link :] + self._links[: self._next_link]
        left = [
            link
            for link in candidates
            if link.alive and not item.was_asked(link) and link not in self._lost
        ]
        # A late encoder is asked again once it has answered, or if nothing else can encode.
        prompt = [link for link in left if link not in self._late]
        left = prompt or (left if self._encode is None else [])
        if not left or self._closed:
            returns = any(link.reopens and not link.alive for link in self._links)
            if self._encode is None and (self._closed or not returns):
                item.fail('no encoder is left')
            # Otherwise the thread that waits for the item encodes it, or waits for an encoder.
            return
        busy = [pending.link for pending in self._items.values() if not pending.progress.is_over]
        link = min(left, key=busy.count)
        self._next_link = (self._links.index(link) + 1) % len(self._links)
        item.ask(link)
        assert item.images is not None
        layout, data = item.images
        link.send(
            Header(Kind.REQUEST, *item.owner, nbytes=len(data), layout=layout, wire=self._wire),
            data,
        )

    def _take_offer(self, item: Optional[RemoteItem], header: Header) -> None:
        if item is None or item.total is not None:
            self._count(duplicates=1)
            return
        assert item.link is not None
        if self._grow is not None:
            missing = self._grow(-(-header.total // self._pool.block_bytes)) - self._pool.total
            if missing > 0:
                self._pool.grow(missing)
        peer, capacity = item.link.peer, self._pool.total * self._pool.block_bytes
        if header.digest != self._digest:
            self._cancel_and_fail(
                item,
                f'{peer} has weights {header.digest:08x}, expected {self._digest:08x} as '
                f'this head has them: give both the same encoder',
            )
        elif header.total > capacity:
            self._cancel_and_fail(
                item,
                f'its features are {header.total} bytes and the pool holds {capacity}: '
                f'raise pool_bytes to {header.total} or more, or lower the batch or tile size',
            )
        else:
            item.offer(header.layout, header.total)
            self._count_ready(item)

    def _take_data(
        self, item: Optional[RemoteItem], link: Link, nbytes: int, damage: Optional[str]
    ) -> None:
        block = self._writing.pop(link, None)
        if block is None:
            # place() has counted it.
            return
        self._pool.end_write(block)
        if item is None:
            # The attempt ended while the bytes were received.
            return
        if damage is not None:
            self._fail_attempt(item, damage)
            return
        item.receive(block)
        self._count(bytes=nbytes)
        self._count_ready(item)

    def _count_ready(self, item: RemoteItem) -> None:
        if item.state == State.READY:
            assert item.link is not None
            self._count(**{f'items from {item.link.peer}': 1})

    def _grant(self) -> None:
        for item in self._items.values():
            if item.link is None or item.progress.is_over:
                # An item that is encoded locally needs no blocks.
                continue
            if item.progress.wants_blocks and self._pool.free:
                self._send_credit(item, item.link)
            if not item.progress.has_all_blocks:
                return

    def _send_credit(self, item: RemoteItem, link: Link) -> None:
        credit = item.reserve()
        if not item.progress.has_all_blocks:
            self._count(partial=1)
        payload = torch.frombuffer(
            torch.tensor(credit.blocks, dtype=torch.int64).numpy(), dtype=torch.uint8
        )
        assert item.total is not None
        link.send(
            Header(
                Kind.CREDIT,
                *item.owner,
                total=item.total,
                offset=credit.offset,
                span=credit.span,
                blocks=len(credit.blocks),
                block_bytes=self._pool.block_bytes,
            ),
            payload,
        )

    def _fail_attempt(self, item: RemoteItem, cause: str) -> None:
        """Give the item to the next encoder."""
        assert item.link is not None
        if item.link not in self._lost and not self._closed:
            self._notices.failed(item.link, cause)
        self._cancel(item)
        item.retry(cause)
        self._count(failovers=1)
        self._ask(item)

    def _cancel(self, item: RemoteItem) -> None:
        """Tell the encoder of the current attempt to forget the item."""
        if item.link is not None:
            item.link.send(Header(Kind.FAILED, *item.owner))

    def _cancel_and_fail(self, item: RemoteItem, reason: str) -> None:
        self._cancel(item)
        item.fail(reason)

    def _on_wait(self, item: RemoteItem) -> float:
        """Advance an item in its waiting thread; return the seconds until the next call."""
        with self._changed:
            if not item.progress.is_over and item.seconds_left(self._timeout) <= 0:
                self._end_overdue(item)
                self._grant()
            if item.progress.is_over:
                return self._timeout
            if item.link is not None or item.state != State.NEW or self._encode is None:
                return max(0.0, item.seconds_left(self._timeout))
            self._local.append(item)
        try:
            self._encode_locally(item)
        finally:
            with self._changed:
                self._local.remove(item)
        return 0.0

    def _end_overdue(self, item: RemoteItem) -> None:
        """End an attempt that took too long, and the attempts that wait behind it, or the item."""
        cause, link = self._overdue(item), item.link
        if link is not None:
            # An encoder that has reported the total has answered; only the transfer is slow.
            if item.total is None:
                self._late.add(link)
            for pending in list(self._items.values()):
                if (
                    pending.link is link
                    and not pending.progress.is_over
                    and (pending is item or pending.total is None)
                ):
                    self._fail_attempt(pending, cause)
        if item.progress.is_over or item.waited < 2 * self._timeout:
            if link is None and self._encode is None and not item.progress.is_over:
                item.fail(f'no encoder came back within {self._timeout:g} s')
        elif self._encode is None:
            self._cancel_and_fail(item, cause)
        elif item.link is not None:
            # The item's time is over, so the attempt that has just begun is ended as well.
            self._cancel(item)
            item.retry(cause)

    def _overdue(self, item: RemoteItem) -> str:
        total = 'an unknown number' if item.total is None else item.total
        return (
            f'it is {item.state.name} with {item.arrived} of {total} bytes after '
            f'{self._timeout:g} s of waiting: raise timeout if the encoder is only slow'
        )

    def _encode_locally(self, item: RemoteItem) -> None:
        """Encode an item for which no encoder is left. No other thread changes it meanwhile."""
        assert self._encode is not None and item.images is not None
        try:
            (images,) = item.images[0].unpack(item.images[1], self._device)
            with torch.no_grad():
                layout, data = pack_levels(self._encode(images), self._wire)
        except Exception as error:
            # The encoder may raise anything. The error is handed to the thread that asks for the
            # features, which raises it.
            with self._changed:
                item.fail(f'encoding it locally raised {error_text(error)}')
            return
        with self._changed:
            item.encode(layout, data)
            self._count(local=1)
            if not any(link.alive and link not in self._late for link in self._links):
                self._notices.encodes_locally()

    def _count(self, **more: float) -> None:
        for name, value in more.items():
            self._counts[name] = self._counts.get(name, 0.0) + value
