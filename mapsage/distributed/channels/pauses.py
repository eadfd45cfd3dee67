"""Records the pauses of this process, in which it could not answer other ranks.

In a pause, the process or its machine was stopped, or native code held the interpreter's lock. A
thread that runs regularly calls :meth:`Pauses.tick` and notices that time has passed.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Deque, Tuple

# Shortest pause that is recorded, in seconds.
_SHORTEST_SECONDS = 2.0


class Pauses:
    """The latest pauses of this process."""

    def __init__(self) -> None:
        # End and length in seconds.
        self._pauses: Deque[Tuple[float, float]] = deque(maxlen=100)
        self._last_tick = time.monotonic()

    def tick(self) -> None:
        """Record a pause if the last tick was long ago. Call it at least once a second."""
        now = time.monotonic()
        if now - self._last_tick >= _SHORTEST_SECONDS:
            self._pauses.append((now, now - self._last_tick))
        self._last_tick = now

    def longest(self, seconds: float) -> float:
        """Return the length of the longest recent pause in seconds, or 0.0. Any thread may ask.

        Args:
            seconds: How long ago the pause may have ended.
        """
        since = time.monotonic() - seconds
        # The thread that calls tick() may not have recorded the last pause yet.
        open_pause = time.monotonic() - self._last_tick
        pauses = [pause for end, pause in list(self._pauses) if end >= since]
        return max([*pauses, open_pause if open_pause >= _SHORTEST_SECONDS else 0.0])


def is_late(paused: float, waited: float) -> bool:
    """Return whether a pause of a process may be the reason why others waited too long. Pure.

    Args:
        paused: Length of the pause in seconds.
        waited: Seconds that a rank may be late.
    """
    return paused > 0 and paused >= waited / 2
