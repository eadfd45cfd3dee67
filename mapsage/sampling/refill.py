"""Estimate how many batches to fetch when valid samples are missing."""
from __future__ import annotations

import math
from typing import Dict

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


def refill_rounds(deficit: int, pass_rate: float, in_a_round: int, limit: int) -> int:
    """Return how many batches each rank fetches for one resample. Pure.

    Args:
        deficit: Number of samples missing on all ranks together.
        pass_rate: Share of samples that are valid. At 0 the answer is 1, because nothing suggests
            that more rounds would help.
        in_a_round: Number of samples that all ranks fetch together in one round.
        limit: Largest number to return.
    """
    if pass_rate <= 0:
        return 1
    valid_in_a_round = pass_rate * in_a_round
    if deficit >= limit * valid_in_a_round:
        return limit
    return max(1, math.ceil(deficit / valid_in_a_round))
