"""One item on the head's side, from the request to the last byte: the owner of its states."""
from __future__ import annotations

import re
import threading
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import torch

from mapsage.features.source import StreamingError
from mapsage.features.wire.link import Link
from mapsage.features.wire.payload import Layout, host_bytes

from .blocks import BlockPool
from .state import Progress, State


class Grant(NamedTuple):
    """The bytes that may be written into one block.

    Attributes:
        generation: Generation number of the block.
        offset: Position of the first byte in the item.
        nbytes: Number of bytes.
    """

    generation: int
    offset: int
    nbytes: int


class Credit(NamedTuple):
    """The blocks that were reserved for the next bytes of an item.

    Attributes:
        offset: Position of the first byte in the item.
        span: Number of bytes.
        blocks: Each block with its generation number, in the order of the bytes.
    """

    offset: int
    span: int
    blocks: List[Tuple[int, int]]


class RemoteItem:
    """An item that encoder ranks were asked for: its state, its blocks and its attempts.

    Everybody may read. The transitions (:meth:`ask` to :meth:`fail`) are called by the item's
    :class:`~mapsage.features.remote.inbox.Inbox` alone, which holds ``changed`` meanwhile; nothing
    else writes into an item. Each transition wakes those who :meth:`wait`.

    Bytes arrive in order. A new attempt begins at byte 0 again, and what was read before it is
    void; so compare :attr:`attempt` before and after reading.

    Args:
        number: Number of the item.
        images: Layout and bytes of the images to encode.
        pool: Blocks in which bytes arrive.
        changed: Condition that is held while anything here changes.
        on_wait: Function that :meth:`wait` calls first. It ends an overdue attempt or encodes the
            item locally, and returns the seconds after which it wants to be called again.
        causes: Reasons why some encoders cannot be asked at all.
    """

    def __init__(self, number: int, images: Tuple[Layout, torch.Tensor], pool: BlockPool,
                 changed: threading.Condition, on_wait: Callable[[RemoteItem], float],
                 causes: Iterable[str]) -> None:
        self.number = number
        self._progress = Progress()
        self._layout: Optional[Layout] = None
        self._error: Optional[str] = None
        self._images: Optional[Tuple[Layout, torch.Tensor]] = images
        self._link: Optional[Link] = None
        self._asked: Set[Link] = set()
        self._causes = list(causes)
        self._begun = time.monotonic()
        self._wanted: Optional[float] = None  # since when somebody waits for the item
        self._version = 0
        self._seen = 0
        self._pool, self._changed, self._on_wait = pool, changed, on_wait
        self._grants: Dict[int, Grant] = {}  # by block: the bytes that have not arrived
        self._pieces: List[Tuple[int, Grant]] = []  # blocks with the bytes that follow _host
        self._host: Optional[torch.Tensor] = None
        self._drained = 0  # bytes, from byte 0 on, that were moved from their blocks to _host

    @property
    def progress(self) -> Progress:
        """State and byte counts, as one value that belongs together."""
        return self._progress

    @property
    def state(self) -> State:
        """How far the item is; READY once all bytes have arrived and were checked."""
        return self._progress.state

    @property
    def attempt(self) -> int:
        """0, 1, ...: number of encoders that were asked for the item before this one."""
        return self._progress.attempt

    @property
    def total(self) -> Optional[int]:
        """Bytes of the features; None until the encoder reports it."""
        return self._progress.total

    @property
    def arrived(self) -> int:
        """Bytes, from byte 0 on, that may be read."""
        return self._progress.arrived

    @property
    def failed_encoders(self) -> List[int]:
        """Global ranks of the encoders that did not encode it."""
        found = (re.match(r'encoder rank (\d+): ', cause) for cause in self._causes)
        return sorted({int(match.group(1)) for match in found if match})

    @property
    def layout(self) -> Optional[Layout]:
        """Meaning of the bytes; None until the encoder reports it."""
        return self._layout

    @property
    def images(self) -> Optional[Tuple[Layout, torch.Tensor]]:
        """Layout and bytes of the images; None once no attempt can need them again."""
        return self._images

    @property
    def error(self) -> Optional[str]:
        """Reason why the item is FAILED, with the cause at every encoder; else None."""
        return self._error

    @property
    def link(self) -> Optional[Link]:
        """Link to the encoder of the present attempt; None if no encoder is left."""
        return self._link

    @property
    def owner(self) -> Tuple[int, int]:
        """Number and attempt, by which the pool knows whose a block is."""
        return self.number, self._progress.attempt

    @property
    def waited(self) -> float:
        """Seconds since somebody began to wait for the item, over all attempts."""
        return 0.0 if self._wanted is None else time.monotonic() - self._wanted

    def seconds_left(self, timeout: float) -> float:
        """Return what the present attempt has left of ``timeout`` seconds, and the item of two.

        They run while somebody waits for the item: an attempt nobody waits for is never overdue.
        """
        now = time.monotonic()
        return min(timeout - (now - max(self._wanted or now, self._begun)),
                   2 * timeout - self.waited)

    def was_asked(self, link: Link) -> bool:
        """Return whether an attempt went to this encoder, be it the present one."""
        return link in self._asked

    def may_ask_again(self, link: Link) -> None:
        """Forget that this encoder was asked: its connection was lost, for no fault of the item."""
        self._asked.discard(link)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return some of the bytes that arrived, uint8 (stop - start,), in host memory.

        Raises:
            StreamingError: If the bytes have not arrived, or are no longer kept.
        """
        with self._changed:
            if not 0 <= start <= stop <= self.arrived or self.state == State.CONSUMED:
                raise StreamingError(f'bytes {start} to {stop} of item {self.number} were asked '
                                     f'for, and it is {self.state.name} with {self.arrived}.')
            if self.state != State.READY:
                return self._copied(start, stop)
        # Only the consumer frees the blocks of a READY item, so that others need not wait here.
        return self._copied(start, stop)

    def wait(self, timeout: float) -> None:
        """Return when something changed since the last call returned, or after ``timeout`` seconds.

        The time that an attempt may take runs while somebody waits here. If no encoder is left, the
        item is encoded by this call.
        """
        with self._changed:
            self._wanted = self._wanted or time.monotonic()
        left = min(timeout, self._on_wait(self))
        with self._changed:
            if self._version == self._seen:
                self._changed.wait_for(lambda: self._version != self._seen, max(0.0, left))
            self._seen = self._version

    def ask(self, link: Link) -> None:
        """Begin the present attempt with the encoder behind ``link``."""
        self._begun, self._link = time.monotonic(), link
        self._asked.add(link)

    def offer(self, layout: Optional[Layout], total: int) -> None:
        """Take what the encoder reports of the features: their layout, and ``total`` bytes."""
        self._layout = layout
        self._move_to(self._progress.offered(total))

    def reserve(self) -> Credit:
        """Take free blocks for the next bytes: for all that are missing, or as many as there are.

        Raises:
            ProgressError: If the item wants no blocks, or none is free.
        """
        assert self.total is not None
        offset, size = self._progress.granted, self._pool.block_bytes
        count = min(-(-(self.total - offset) // size), self._pool.free)
        span = min(self.total - offset, count * size)
        progress = self._progress.reserved(span)
        blocks = []
        for block, begin in zip(self._pool.alloc(count, self.owner),
                                range(offset, offset + span, size)):
            generation = self._pool.generation(block, self.owner)
            self._grants[block] = Grant(generation, begin, min(size, offset + span - begin))
            blocks.append((block, generation))
        self._progress = progress
        return Credit(offset, span, blocks)

    def begin_write(self, block: int, grant: Grant) -> Optional[torch.Tensor]:
        """Return memory for a message's bytes, uint8 (nbytes,); None if they are not expected.

        The write ends with :meth:`BlockPool.end_write`, whatever becomes of the item meanwhile.
        """
        if self._grants.get(block) != grant:
            return None
        return self._pool.begin_write(block, grant.generation, self.owner)[:grant.nbytes]

    def receive(self, block: int) -> None:
        """Take the bytes that were expected in a block as arrived.

        If no further block is reserved for the item, its full blocks are emptied and freed.
        """
        grant = self._grants.pop(block)
        self._move_to(self._progress.received(grant.offset, grant.nbytes))
        self._pieces.append((block, grant))
        if self.state == State.PARTIAL:
            self._drain()

    def retry(self, cause: str) -> None:
        """End the present attempt; the next one begins with :meth:`ask`, or is local without it."""
        assert self._link is not None
        self._causes.append(f'{self._link.peer}: {cause}')
        self._free_blocks()
        self._link, self._begun = None, time.monotonic()
        self._move_to(self._progress.requeued())
        # Last, since some read without the lock: bytes of an attempt always have a layout.
        self._layout = None

    def encode(self, layout: Layout, data: torch.Tensor) -> None:
        """Take features that the head encoded locally, uint8 (n,), for the whole item."""
        self._layout, self._host, self._drained = layout, data, len(data)
        self._move_to(self._progress.encoded(len(data)))

    def consume(self) -> None:
        """Free what a READY item holds: its features were taken."""
        self._free_blocks()
        self._move_to(self._progress.consumed())

    def fail(self, why: str) -> None:
        """End the item without features; :attr:`error` lists ``why`` and all earlier causes."""
        self._free_blocks()
        causes = '; '.join([why] + self._causes)
        self._error = f'item {self.number} has no features: {causes}.'
        self._move_to(self._progress.failed())

    def _move_to(self, progress: Progress) -> None:
        self._progress = progress
        if progress.is_over:
            self._images = None
        self._version += 1
        self._changed.notify_all()

    def _free_blocks(self) -> None:
        blocks = list(self._grants) + [block for block, _ in self._pieces]
        self._grants, self._pieces = {}, []
        self._host, self._drained = None, 0
        self._pool.release(blocks, self.owner)

    def _drain(self) -> None:
        assert self.total is not None
        if self._host is None:
            self._host = host_bytes(self.total)
        for block, grant in self._pieces:
            self._host[grant.offset:grant.offset + grant.nbytes] = \
                self._pool.data(block, self.owner)[:grant.nbytes]
        self._drained = self.arrived
        blocks, self._pieces = [block for block, _ in self._pieces], []
        self._pool.release(blocks, self.owner)

    def _copied(self, start: int, stop: int) -> torch.Tensor:
        if self._host is not None and stop <= self._drained:
            return self._host[start:stop]  # these bytes are never written again
        data = host_bytes(stop - start)
        if self._host is not None and start < self._drained:
            data[:self._drained - start] = self._host[start:self._drained]
        for block, grant in self._pieces:
            begin, end = max(start, grant.offset), min(stop, grant.offset + grant.nbytes)
            if begin < end:
                data[begin - start:end - start] = self._pool.data(block, self.owner)[
                    begin - grant.offset:end - grant.offset]
        return data
