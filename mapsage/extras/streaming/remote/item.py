"""One item on the head's side, from the request to the last byte.

The possible states and their order are in `state.py`; this file adds the bytes, the blocks and the
attempts. `inbox.py` drives the transitions.
"""

from __future__ import annotations

import re
import threading
import time
from typing import Callable, Dict, Iterable, List, NamedTuple, Optional, Set, Tuple

import torch

from mapsage.extras.streaming.source import StreamingError
from mapsage.extras.streaming.wire.link import Link
from mapsage.extras.streaming.wire.payload import Layout, host_bytes

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

    Any thread may read. Only the item's :class:`~mapsage.extras.streaming.remote.inbox.Inbox` calls the
    transitions (:meth:`ask` to :meth:`fail`), and it holds ``changed`` during the call. Each
    transition wakes the threads in :meth:`wait`.

    Bytes arrive in order. A new attempt begins at byte 0 again and makes earlier reads invalid, so
    compare :attr:`attempt` before and after reading.

    Args:
        number: Number of the item.
        images: Layout and bytes of the images to encode.
        pool: Blocks in which bytes arrive.
        changed: Condition that is held while anything here changes.
        on_wait: Function that :meth:`wait` calls first. It ends an overdue attempt or encodes the
            item locally, and returns the seconds after which it wants to be called again.
        causes: Reasons why some encoders cannot be asked at all.
    """

    def __init__(
        self,
        number: int,
        images: Tuple[Layout, torch.Tensor],
        pool: BlockPool,
        changed: threading.Condition,
        on_wait: Callable[[RemoteItem], float],
        causes: Iterable[str],
    ) -> None:
        self.number = number
        self._progress = Progress()
        self._layout: Optional[Layout] = None
        self._error: Optional[str] = None
        self._images: Optional[Tuple[Layout, torch.Tensor]] = images
        self._link: Optional[Link] = None
        self._asked: Set[Link] = set()
        self._causes = list(causes)
        self._begun = time.monotonic()
        # Time since which a thread waits for the item.
        self._wanted: Optional[float] = None
        self._version = 0
        self._seen = 0
        self._pool, self._changed, self._on_wait = pool, changed, on_wait
        # Block -> bytes that are expected in it and have not arrived.
        self._grants: Dict[int, Grant] = {}
        # Full blocks. Their bytes follow the first _drained bytes, which were moved to _host.
        self._pieces: List[Tuple[int, Grant]] = []
        self._host: Optional[torch.Tensor] = None
        self._drained = 0

    @property
    def progress(self) -> Progress:
        """State and byte counts, as one consistent value."""
        return self._progress

    @property
    def state(self) -> State:
        """State of the item; READY once all bytes have arrived and were checked."""
        return self._progress.state

    @property
    def attempt(self) -> int:
        """Number of encoders that were asked for the item earlier: 0, 1, ..."""
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
        matches = (re.match(r'encoder rank (\d+): ', cause) for cause in self._causes)
        return sorted({int(match.group(1)) for match in matches if match})

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
        """Link to the encoder of the current attempt; None if no encoder is left."""
        return self._link

    @property
    def owner(self) -> Tuple[int, int]:
        """Number and attempt, by which the pool identifies the owner of a block."""
        return self.number, self._progress.attempt

    @property
    def waited(self) -> float:
        """Seconds since a thread began to wait for the item, over all attempts."""
        return 0.0 if self._wanted is None else time.monotonic() - self._wanted

    def seconds_left(self, timeout: float) -> float:
        """Return the remaining seconds of the current attempt, or of the item if these are fewer.

        An attempt has ``timeout`` seconds and an item twice as many. The time runs only while a
        thread waits for the item.
        """
        now = time.monotonic()
        return min(
            timeout - (now - max(self._wanted or now, self._begun)), 2 * timeout - self.waited
        )

    def was_asked(self, link: Link) -> bool:
        """Return whether an attempt, possibly the current one, went to this encoder."""
        return link in self._asked

    def may_ask_again(self, link: Link) -> None:
        """Allow another attempt at this encoder, whose connection was lost."""
        self._asked.discard(link)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return some of the bytes that arrived, uint8 (stop - start,), in host memory.

        Raises:
            StreamingError: If the bytes have not arrived, or are no longer kept.
        """
        with self._changed:
            if not 0 <= start <= stop <= self.arrived or self.state == State.CONSUMED:
                raise StreamingError(
                    f'bytes {start} to {stop} of item {self.number} were asked '
                    f'for, and it is {self.state.name} with {self.arrived}.'
                )
            if self.state != State.READY:
                return self._copy_bytes(start, stop)
        # Only the consumer frees the blocks of a READY item, so this copy needs no lock.
        return self._copy_bytes(start, stop)

    def wait(self, timeout: float) -> None:
        """Wait until something has changed since the last call, at most ``timeout`` seconds.

        The time of an attempt runs while a thread waits here. If no encoder is left, this call
        encodes the item.
        """
        with self._changed:
            self._wanted = self._wanted or time.monotonic()
        left = min(timeout, self._on_wait(self))
        with self._changed:
            if self._version == self._seen:
                self._changed.wait_for(lambda: self._version != self._seen, max(0.0, left))
            self._seen = self._version

    def ask(self, link: Link) -> None:
        """Begin the current attempt with the encoder behind ``link``."""
        self._begun, self._link = time.monotonic(), link
        self._asked.add(link)

    def offer(self, layout: Optional[Layout], total: int) -> None:
        """Store the encoder's report about the features: their layout, and ``total`` bytes."""
        self._layout = layout
        self._move_to(self._progress.offered(total))

    def reserve(self) -> Credit:
        """Take free blocks for the next bytes: for all missing bytes, or as many as are free.

        Raises:
            ProgressError: If the item wants no blocks, or none is free.
        """
        assert self.total is not None
        offset, size = self._progress.granted, self._pool.block_bytes
        count = min(-(-(self.total - offset) // size), self._pool.free)
        span = min(self.total - offset, count * size)
        progress = self._progress.reserved(span)
        blocks = []
        for block, begin in zip(
            self._pool.alloc(count, self.owner), range(offset, offset + span, size)
        ):
            generation = self._pool.generation(block, self.owner)
            self._grants[block] = Grant(generation, begin, min(size, offset + span - begin))
            blocks.append((block, generation))
        self._progress = progress
        return Credit(offset, span, blocks)

    def begin_write(self, block: int, grant: Grant) -> Optional[torch.Tensor]:
        """Return memory for a message's bytes, uint8 (nbytes,); None if they are not expected.

        The write ends with :meth:`BlockPool.end_write`, even if the item ends during it.
        """
        if self._grants.get(block) != grant:
            return None
        return self._pool.begin_write(block, grant.generation, self.owner)[: grant.nbytes]

    def receive(self, block: int) -> None:
        """Mark the bytes that were expected in a block as arrived.

        If no further block is reserved for the item, its full blocks are emptied and freed.
        """
        grant = self._grants.pop(block)
        self._move_to(self._progress.received(grant.offset, grant.nbytes))
        self._pieces.append((block, grant))
        if self.state == State.PARTIAL:
            self._drain()

    def retry(self, cause: str) -> None:
        """End the current attempt; the next one begins with :meth:`ask`, or is local without it."""
        assert self._link is not None
        self._causes.append(f'{self._link.peer}: {cause}')
        self._free_blocks()
        self._link, self._begun = None, time.monotonic()
        self._move_to(self._progress.requeued())
        # This comes last, because some threads read without the lock: bytes always have a layout.
        self._layout = None

    def encode(self, layout: Layout, data: torch.Tensor) -> None:
        """Store the features of the whole item, encoded locally by the head, uint8 (n,)."""
        self._layout, self._host, self._drained = layout, data, len(data)
        self._move_to(self._progress.encoded(len(data)))

    def consume(self) -> None:
        """Free the blocks of a READY item, because its features were taken."""
        self._free_blocks()
        self._move_to(self._progress.consumed())

    def fail(self, reason: str) -> None:
        """End the item without features; :attr:`error` lists ``reason`` and all earlier causes."""
        self._free_blocks()
        causes = '; '.join([reason] + self._causes)
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
            self._host[grant.offset : grant.offset + grant.nbytes] = self._pool.data(
                block, self.owner
            )[: grant.nbytes]
        self._drained = self.arrived
        blocks, self._pieces = [block for block, _ in self._pieces], []
        self._pool.release(blocks, self.owner)

    def _copy_bytes(self, start: int, stop: int) -> torch.Tensor:
        if self._host is not None and stop <= self._drained:
            # These bytes are never written again.
            return self._host[start:stop]
        data = host_bytes(stop - start)
        if self._host is not None and start < self._drained:
            data[: self._drained - start] = self._host[start : self._drained]
        for block, grant in self._pieces:
            begin, end = max(start, grant.offset), min(stop, grant.offset + grant.nbytes)
            if begin < end:
                data[begin - start : end - start] = self._pool.data(block, self.owner)[
                    begin - grant.offset : end - grant.offset
                ]
        return data
