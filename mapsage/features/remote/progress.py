"""How far an item is, as a value that pure functions move along."""
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Optional, Tuple

from mapsage.features.source import StreamingError

from .state import State

_WAITS_FOR_BYTES = (State.RESERVED, State.FILLING, State.RESUMING)
_OVER = (State.READY, State.CONSUMED, State.FAILED)


class ProgressError(StreamingError):
    """An item was asked to go where it cannot go from its state."""


@dataclass(frozen=True)
class Progress:
    """How far an item is on its way to the head. Sizes are in bytes.

    An attempt goes NEW, RESERVED, FILLING, READY where all of it has blocks at once, and NEW,
    RESERVED, FILLING, PARTIAL, RESUMING, PARTIAL, RESUMING, ..., READY where it has not; another
    attempt begins at NEW. ``(attempt, arrived)`` never becomes smaller.

    Attributes:
        state: See :class:`~mapsage.features.remote.state.State`.
        attempt: 0, 1, ...: which of the encoders asked for it, one after the other.
        total: Of its features; None before the encoder told.
        arrived: From 0 on, received and checked.
        granted: From 0 on, for which there were blocks.
    """

    state: State = State.NEW
    attempt: int = 0
    total: Optional[int] = None
    arrived: int = 0
    granted: int = 0

    @property
    def order(self) -> Tuple[int, int]:
        """What never becomes smaller."""
        return self.attempt, self.arrived

    @property
    def wants_blocks(self) -> bool:
        """Whether all blocks it had are full, or it had none, and more bytes are to come."""
        return self.total is not None and self.state in (State.NEW, State.PARTIAL)

    @property
    def has_all_blocks(self) -> bool:
        """Whether it will ask for no more blocks in this attempt."""
        return self.state in _OVER or (self.total is not None and self.granted == self.total)

    def offered(self, total: int) -> Progress:
        """Return it with its total known: NEW, or READY where there is nothing to send.

        Raises:
            ProgressError: If it is not NEW, or the total was told before.
        """
        self._check(self.state == State.NEW and self.total is None and total >= 0,
                    f'offered with {total} bytes')
        return replace(self, total=total, state=State.READY if total == 0 else State.NEW)

    def reserved(self, span: int) -> Progress:
        """Return it with blocks for ``span`` more bytes: RESERVED or RESUMING.

        Raises:
            ProgressError: If it does not want blocks, or not so many.
        """
        self._check(self.wants_blocks and 0 < span <= (self.total or 0) - self.granted,
                    f'given blocks for {span} bytes')
        state = State.RESERVED if self.state == State.NEW else State.RESUMING
        return replace(self, granted=self.granted + span, state=state)

    def received(self, offset: int, nbytes: int) -> Progress:
        """Return it with more bytes: FILLING, RESUMING, PARTIAL or READY.

        Raises:
            ProgressError: If they do not follow those that arrived, or were not granted.
        """
        arrived = self.arrived + nbytes
        self._check(self.state in _WAITS_FOR_BYTES and offset == self.arrived and nbytes > 0
                    and arrived <= self.granted, f'given bytes {offset} to {offset + nbytes}')
        state = State.FILLING if self.state == State.RESERVED else self.state
        if arrived == self.granted:
            state = State.READY if arrived == self.total else State.PARTIAL
        return replace(self, arrived=arrived, state=state)

    def requeued(self) -> Progress:
        """Return its next attempt: NEW, without a byte.

        Raises:
            ProgressError: If it is READY, CONSUMED or FAILED.
        """
        self._check(self.state not in _OVER, 'begun again')
        return Progress(attempt=self.attempt + 1)

    def encoded(self, total: int) -> Progress:
        """Return it READY: it was encoded in place.

        Raises:
            ProgressError: If an encoder has begun to send it.
        """
        self._check(self.state == State.NEW and self.total is None, 'encoded in place')
        return replace(self, state=State.READY, total=total, arrived=total, granted=total)

    def consumed(self) -> Progress:
        """Return it CONSUMED.

        Raises:
            ProgressError: If it is not READY.
        """
        self._check(self.state == State.READY, 'consumed')
        return replace(self, state=State.CONSUMED)

    def failed(self) -> Progress:
        """Return it FAILED.

        Raises:
            ProgressError: If it is READY, CONSUMED or FAILED.
        """
        self._check(self.state not in _OVER, 'failed')
        return replace(self, state=State.FAILED)

    def _check(self, good: bool, what: str) -> None:
        if not good:
            raise ProgressError(f'an item cannot be {what} where it is: {self}.')
