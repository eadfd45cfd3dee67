"""Estimate how many samples to fetch when valid ones are missing."""

from __future__ import annotations

import math
from typing import Dict, List

# Factor by which the counts of earlier steps lose weight in every step.
_MEMORY = 0.9


class PassRate:
    """The share of valid samples, weighted toward recent steps; equal on all ranks."""

    def __init__(self) -> None:
        self._judged = self._passed = self._not_finite = 0.0

    def age(self) -> None:
        """Begin a step: the counts of earlier steps lose weight."""
        self._judged *= _MEMORY
        self._passed *= _MEMORY
        self._not_finite *= _MEMORY

    def add(self, judged: int, passed: int, not_finite: int = 0) -> None:
        """Add counts of all ranks: samples that were judged, that passed, that were not finite."""
        self._judged += judged
        self._passed += passed
        self._not_finite += not_finite

    @property
    def value(self) -> float:
        """The running share; 0 before any sample was judged."""
        return self._passed / self._judged if self._judged else 0.0

    def kept(self, keep_fraction: float) -> float:
        """Return the running share of samples with finite scores that are valid or kept at random.

        Args:
            keep_fraction: Probability with which a sample that is not valid is kept.
        """
        finite = self._judged - self._not_finite
        valid = self._passed / finite if finite > 0 else 1.0
        return valid + (1 - valid) * keep_fraction

    def state_dict(self) -> Dict[str, float]:
        """Return what :meth:`load_state_dict` takes."""
        return dict(judged=self._judged, passed=self._passed, not_finite=self._not_finite)

    def load_state_dict(self, state: Dict[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self._judged, self._passed = state['judged'], state['passed']
        self._not_finite = state.get('not_finite', 0.0)


def refill_size(deficit: int, pass_rate: float, limit: int, deviations: float = 0.0) -> int:
    """Return how many groups all ranks together ask for in one resample. Pure.

    Of n groups, ``n p`` are expected to be valid, with a standard deviation of
    ``sqrt(n p (1 - p))``. Asking for ``deficit / p`` is too much or too little equally often.

    Args:
        deficit: Number of groups missing on all ranks together, at least 1.
        pass_rate: Share of groups that is usable. At 0 the answer is the deficit, because nothing
            suggests that more would help.
        limit: Largest number to return.
        deviations: Number of standard deviations by which the deficit lies above the expected
            number of valid groups. 1 asks for less, so that hardly any surplus comes; -2 asks for
            more, so that hardly any group is missing.
    """
    if pass_rate <= 0:
        return min(deficit, limit)
    rate = min(pass_rate, 1.0)
    # Compare before dividing: a tiny rate makes the quotient infinite.
    if deficit >= limit * rate:
        return limit
    # The positive root of rate * x**2 + shift * x = deficit, with x = sqrt(n).
    shift = deviations * math.sqrt(rate * (1 - rate))
    groups = ((math.sqrt(shift**2 + 4 * rate * deficit) - shift) / (2 * rate)) ** 2
    # Rounding errors must not ask for one group more.
    whole = math.floor(groups + 0.5) if deviations > 0 else math.ceil(groups * (1 - 1e-12))
    return max(1, min(whole, limit))


def divide_groups(groups: int, ranks: int, first: int) -> List[int]:
    """Return how many groups each rank asks for, equal to within one. Pure.

    Args:
        groups: Number of groups that all ranks together ask for.
        ranks: Number of ranks.
        first: Rank that gets the first group of the remainder. It changes with the step, so that
            all ranks draw equally often.
    """
    share, remainder = divmod(groups, ranks)
    return [share + ((rank - first) % ranks < remainder) for rank in range(ranks)]
