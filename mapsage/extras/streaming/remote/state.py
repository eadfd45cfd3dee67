"""The states of an item on its way from an encoder to a head, and the allowed transitions.

Pure values: a transition returns a new :class:`Progress`. `item.py` applies them to real bytes and
    blocks.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace
from typing import Optional, Tuple

from mapsage.extras.streaming.source import StreamingError


class State(enum.IntEnum):
    """State of an item on its way.

    Numbers grow along the way, so the minimum over many ranks is the slowest rank. FAILED is the
    smallest, because a failure on one rank is a failure on all ranks.
    """

    FAILED = 0
    NEW = 1
    RESERVED = 2
    FILLING = 3
    PARTIAL = 4
    RESUMING = 5
    READY = 6
    CONSUMED = 7


_WAITS_FOR_BYTES = (State.RESERVED, State.FILLING, State.RESUMING)
_OVER = (State.READY, State.CONSUMED, State.FAILED)


class ProgressError(StreamingError):
    """The state of an item does not allow a requested transition."""


@dataclass(frozen=True)
class Progress:
    """State and byte counts of an item. A transition returns a new value and changes nothing.

    An attempt goes through NEW, RESERVED, FILLING, READY if there are blocks for all of it at
    once, and otherwise through NEW, RESERVED, FILLING, PARTIAL, RESUMING, PARTIAL, RESUMING, ...,
    READY. The next attempt begins at NEW. ``(attempt, arrived)`` never becomes smaller.

    Attributes:
        state: State of the item.
        attempt: Number of encoders that were asked for the item earlier: 0, 1, ...
        total: Bytes of the item's features; None until the encoder reports it.
        arrived: Bytes, from byte 0 on, that were received and checked.
        granted: Bytes, from byte 0 on, for which blocks were reserved.
    """

    state: State = State.NEW
    attempt: int = 0
    total: Optional[int] = None
    arrived: int = 0
    granted: int = 0

    @property
    def order(self) -> Tuple[int, int]:
        """Attempt and arrived bytes: a pair that never becomes smaller."""
        return self.attempt, self.arrived

    @property
    def is_over(self) -> bool:
        """Whether nothing more can arrive: READY, CONSUMED or FAILED."""
        return self.state in _OVER

    @property
    def wants_blocks(self) -> bool:
        """Whether more bytes are to come and no reserved block is left to take them."""
        return self.total is not None and self.state in (State.NEW, State.PARTIAL)

    @property
    def has_all_blocks(self) -> bool:
        """Whether this attempt needs no more blocks."""
        return self.is_over or (self.total is not None and self.granted == self.total)

    def offered(self, total: int) -> Progress:
        """Return the progress once the total is known: NEW, or READY if there are no bytes.

        Raises:
            ProgressError: If the item is not NEW, or its total is known already.
        """
        self._check(
            self.state == State.NEW and self.total is None and total >= 0,
            f'offered with {total} bytes',
        )
        return replace(self, total=total, state=State.READY if total == 0 else State.NEW)

    def reserved(self, span: int) -> Progress:
        """Return the progress with blocks for ``span`` more bytes: RESERVED or RESUMING.

        Raises:
            ProgressError: If the item does not want blocks, or not for so many bytes.
        """
        self._check(
            self.wants_blocks and 0 < span <= (self.total or 0) - self.granted,
            f'given blocks for {span} bytes',
        )
        state = State.RESERVED if self.state == State.NEW else State.RESUMING
        return replace(self, granted=self.granted + span, state=state)

    def received(self, offset: int, nbytes: int) -> Progress:
        """Return the progress with more bytes: FILLING, RESUMING, PARTIAL or READY.

        Raises:
            ProgressError: If the bytes do not follow those that arrived, or have no blocks.
        """
        arrived = self.arrived + nbytes
        self._check(
            self.state in _WAITS_FOR_BYTES
            and offset == self.arrived
            and nbytes > 0
            and arrived <= self.granted,
            f'given bytes {offset} to {offset + nbytes}',
        )
        state = State.FILLING if self.state == State.RESERVED else self.state
        if arrived == self.granted:
            state = State.READY if arrived == self.total else State.PARTIAL
        return replace(self, arrived=arrived, state=state)

    def requeued(self) -> Progress:
        """Return the progress of the next attempt: NEW, without a byte.

        Raises:
            ProgressError: If the item is READY, CONSUMED or FAILED.
        """
        self._check(not self.is_over, 'begun again')
        return Progress(attempt=self.attempt + 1)

    def encoded(self, total: int) -> Progress:
        """Return the progress of an item that the head encoded locally: READY.

        Raises:
            ProgressError: If an encoder has begun to send the item.
        """
        self._check(self.state == State.NEW and self.total is None, 'encoded locally')
        return replace(self, state=State.READY, total=total, arrived=total, granted=total)

    def consumed(self) -> Progress:
        """Return the progress of an item whose features were taken: CONSUMED.

        Raises:
            ProgressError: If the item is not READY.
        """
        self._check(self.state == State.READY, 'consumed')
        return replace(self, state=State.CONSUMED)

    def failed(self) -> Progress:
        """Return the progress of an item that will not arrive: FAILED.

        Raises:
            ProgressError: If the item is READY, CONSUMED or FAILED.
        """
        self._check(not self.is_over, 'failed')
        return replace(self, state=State.FAILED)

    def _check(self, allowed: bool, change: str) -> None:
        if not allowed:
            raise ProgressError(f'an item cannot be {change} in its state: {self}.')
