"""One item on the head's side, while its bytes come."""
from __future__ import annotations

import threading
import time
from typing import Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import torch

from mapsage.features.source import StreamingError
from mapsage.features.wire.link import Link
from mapsage.features.wire.payload import Layout, host_bytes

from .blocks import BlockPool
from .progress import Progress
from .state import State


class Grant(NamedTuple):
    """What may be written into one block.

    Attributes:
        generation: Of the block.
        offset: Of the first byte in the item.
        nbytes: How many.
    """

    generation: int
    offset: int
    nbytes: int


class Arriving:
    """An item that was requested. Who waits for it reads; only :class:`.inbox.Inbox` writes.

    Bytes come in order. An attempt that follows another begins at byte 0 again, and what was read
    before is then void; so ask :attr:`attempt` before and after.

    Args:
        number: Of the item.
        images: What is to be encoded, and its bytes.
        pool: The blocks in which bytes arrive.
        changed: Held while anything here changes.
        tend: Called by :meth:`wait`: gives up what is overdue, encodes what nobody else will.
    """

    def __init__(self, number: int, images: Tuple[Layout, torch.Tensor], pool: BlockPool,
                 changed: threading.Condition, tend: Callable[[Arriving], float]) -> None:
        self.number = number
        self.layout: Optional[Layout] = None
        self.error: Optional[str] = None
        self.progress = Progress()
        self.images: Optional[Tuple[Layout, torch.Tensor]] = images
        self.link: Optional[Link] = None  # of the encoder that was asked last; None: nobody is left
        self.asked: Set[Link] = set()
        self.causes: List[str] = []
        self.begun = time.monotonic()  # of the attempt
        self.wanted: Optional[float] = None  # since when somebody waits for it
        self.version = 0
        self._seen = 0
        self._pool, self._changed, self._tend = pool, changed, tend
        self._grants: Dict[int, Grant] = {}  # by block: what has not arrived
        self._pieces: List[Tuple[int, Grant]] = []  # block and what is in it, behind _host
        self._host: Optional[torch.Tensor] = None
        self._drained = 0  # bytes from 0 on that left their blocks for _host

    @property
    def attempt(self) -> int:
        """0, 1, ...: which of the encoders asked for it, one after the other."""
        return self.progress.attempt

    @property
    def state(self) -> State:
        """How far it is; READY once all bytes are here and checked."""
        return self.progress.state

    @property
    def total(self) -> Optional[int]:
        """Bytes; None before the header came."""
        return self.progress.total

    @property
    def arrived(self) -> int:
        """Bytes from 0 on that may be read."""
        return self.progress.arrived

    @property
    def owner(self) -> Tuple[int, int]:
        """As the pool knows it."""
        return self.number, self.progress.attempt

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes of those that arrived, uint8 (stop - start,), in host memory.

        Raises:
            StreamingError: If they are not here, or not here any more.
        """
        with self._changed:
            if not 0 <= start <= stop <= self.arrived or self.state == State.CONSUMED:
                raise StreamingError(f'bytes {start} to {stop} of item {self.number} were asked '
                                     f'for, and it is {self.state.name} with {self.arrived}.')
            if self.state != State.READY:
                return self._copied(start, stop)
        # nobody but its consumer takes the blocks of a READY item away: others go on meanwhile
        return self._copied(start, stop)

    def wait(self, timeout: float) -> None:
        """Return when something changed since the last call returned, or after ``timeout`` seconds.

        The time an attempt has, on the whole, runs while somebody waits here. An item that no
        encoder is left for is encoded here.
        """
        left = min(timeout, self._tend(self))
        with self._changed:
            if self.version == self._seen:
                self._changed.wait_for(lambda: self.version != self._seen, max(0.0, left))
            self._seen = self.version

    def grant(self, count: int) -> List[Tuple[int, int]]:
        """Take ``count`` blocks for the bytes behind those granted; return (block, generation)."""
        blocks = self._pool.alloc(count, self.owner)
        granted = []
        offset, size = self.progress.granted, self._pool.block_bytes
        assert self.total is not None
        span = min(self.total - offset, count * size)
        for block, begin in zip(blocks, range(offset, offset + span, size)):
            generation = self._pool.generation(block, self.owner)
            self._grants[block] = Grant(generation, begin, min(size, offset + span - begin))
            granted.append((block, generation))
        self.progress = self.progress.reserved(span)
        return granted

    def granted(self, block: int) -> Optional[Grant]:
        """Return what may still be written into a block, or None."""
        return self._grants.get(block)

    def add(self, block: int) -> None:
        """Take what was granted for a block as arrived; where no block is left, empty them all."""
        grant = self._grants.pop(block)
        self.progress = self.progress.received(grant.offset, grant.nbytes)
        self._pieces.append((block, grant))
        if self.state == State.PARTIAL:
            self._drain()
        self.version += 1

    def hold(self, data: torch.Tensor) -> None:
        """Take bytes that were made here, uint8 (n,), for all of the item."""
        self._host, self._drained = data, len(data)
        self.progress = self.progress.encoded(len(data))
        self.version += 1

    def let_go(self) -> None:
        """Free the blocks and forget the bytes."""
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
            return self._host[start:stop]  # never written twice
        data = host_bytes(stop - start)
        if self._host is not None and start < self._drained:
            data[:self._drained - start] = self._host[start:self._drained]
        for block, grant in self._pieces:
            begin, end = max(start, grant.offset), min(stop, grant.offset + grant.nbytes)
            if begin < end:
                data[begin - start:end - start] = self._pool.data(block, self.owner)[
                    begin - grant.offset:end - grant.offset]
        return data
