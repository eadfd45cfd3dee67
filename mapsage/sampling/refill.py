"""How much to fetch when valid samples are missing."""
from __future__ import annotations

import math
from typing import Dict

_MEMORY = 0.9  # share of what is known of the pass rate that a step takes over from the former


class PassRate:
    """The share of valid samples, recent ones weighing more; fed alike on all ranks."""

    def __init__(self) -> None:
        self._judged = self._passed = 0.0

    def age(self) -> None:
        """Begin a step."""
        self._judged *= _MEMORY
        self._passed *= _MEMORY

    def add(self, judged: int, passed: int) -> None:
        """Count samples judged on all ranks."""
        self._judged += judged
        self._passed += passed

    @property
    def value(self) -> float:
        """The running share; 0 before any sample was judged."""
        return self._passed / self._judged if self._judged else 0.0

    def state_dict(self) -> Dict[str, float]:
        """Return what :meth:`load_state_dict` takes."""
        return dict(judged=self._judged, passed=self._passed)

    def load_state_dict(self, state: Dict[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self._judged, self._passed = state['judged'], state['passed']


def refill_rounds(deficit: int, pass_rate: float, in_a_round: int, limit: int) -> int:
    """Return how many batches each rank fetches for one resample. Pure.

    Args:
        deficit: Samples missing on all ranks together.
        pass_rate: Share of samples that are valid. At 0 nothing says that more would help: 1.
        in_a_round: Samples that all ranks fetch together in one round.
        limit: The largest answer.
    """
    if pass_rate <= 0:
        return 1
    found = pass_rate * in_a_round
    return limit if deficit >= limit * found else max(1, math.ceil(deficit / found))
