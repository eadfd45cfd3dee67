"""Decide from scores which groups of samples are valid.

The rules are pure; :class:`ScoreWindow` has the latest scores, for a threshold that follows them.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import List, NamedTuple, Optional, Sequence, SupportsFloat, Union

import torch

# Number of scores that estimate a share to within 6 %, sqrt(q (1 - q) / 64), and are soon renewed.
_WINDOW = 64


class ScoreWindow:
    """The latest scores and their quantiles.

    The window holds whole rounds. The scores of a round are in rank order, so a cut through a round
    would favor the last ranks.

    Args:
        size: Smallest number of scores in a full window.
    """

    def __init__(self, size: int = _WINDOW) -> None:
        self._size = size
        self._rounds: List[List[float]] = []

    def __len__(self) -> int:
        return sum(map(len, self._rounds))

    def add(self, scores: Sequence[float]) -> None:
        """Add the finite scores of a round."""
        finite = [score for score in scores if math.isfinite(score)]
        if finite:
            self._rounds.append(finite)
        while self._rounds and len(self) - len(self._rounds[0]) >= self._size:
            del self._rounds[0]

    def quantile(self, share: float) -> Optional[float]:
        """Return the largest score with at most this share of the scores below it.

        None while there are no scores. The result is one of the scores, never a value between two,
        so that it is the same number on every machine.
        """
        scores = sorted(itertools.chain(*self._rounds))
        return scores[min(len(scores) - 1, int(share * len(scores)))] if scores else None

    def latest(self) -> List[float]:
        """Return the latest scores, ``size`` of them in a full window."""
        return list(itertools.chain(*self._rounds))[-self._size :]

    def state_dict(self) -> List[List[float]]:
        """Return the scores by round."""
        return [list(scores) for scores in self._rounds]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Replace the scores by the ones that :meth:`state_dict` returned."""
        self._rounds = [list(scores) for scores in state]


NOT_FINITE, NO_SPREAD, TOO_LOW, TOO_HIGH = 'not_finite', 'no_spread', 'too_low', 'too_high'

Scores = Union[torch.Tensor, Sequence[SupportsFloat]]
"""One number for each sample: a tensor of any device, dtype and shape, or a sequence of numbers."""


class Verdict(NamedTuple):
    """The decision about a number of groups.

    Attributes:
        valid: Tensor of bool and shape ``(groups,)``.
        reasons: Why each group is dropped, one of the constants above; ``''`` for a valid group.
        means: Tensor of float64 and shape ``(groups,)``: the mean score of each group, NaN where
            one of its scores is not finite.
    """

    valid: torch.Tensor
    reasons: List[str]
    means: torch.Tensor


@dataclass(frozen=True)
class Validity:
    """The criteria of valid groups: finite scores, and all criteria that are not None.

    Attributes:
        eps: Smallest spread: ``max - min > eps`` over the scores of the group. The range is used
            and not the standard deviation, which float32 rounding made positive for 187 of 505
            constant groups. None for no such criterion.
        low: Lower bound of the group's mean score, excluded; None for no bound.
        high: Upper bound of the group's mean score, excluded; None for no bound.
        quantile: Share of the groups, those with the lowest mean scores, that is not valid. The
            lower bound is the quantile of the latest scores of all ranks, which follows them, for
            example when a loss falls. It is included, so that equal scores are valid. None for no
            such criterion.

    Raises:
        ValueError: If no criterion is given, ``eps`` is negative, the band is empty, or
            ``quantile`` is not between 0 and 1.
    """

    eps: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    quantile: Optional[float] = None

    def __post_init__(self) -> None:
        if self.eps is self.low is self.high is self.quantile is None:
            raise ValueError(
                'Validity() has no criterion: give eps (spread over a group), low or '
                'high (band of its mean score), or quantile (share of the lowest). '
                'Validity(eps=1e-6) is a common one.'
            )
        if self.eps is not None and not self.eps >= 0:
            raise ValueError(f'eps={self.eps}, expected 0 or a small positive number.')
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(
                f'low={self.low}, high={self.high}: no score is in this band. Expected low < high.'
            )
        if self.quantile is not None and not 0 < self.quantile < 1:
            raise ValueError(
                f'quantile={self.quantile}, expected a share between 0 and 1, for '
                f'example 0.3 to drop the lowest 30 %.'
            )
        if self.quantile is not None and self.low is not None:
            raise ValueError(
                f'quantile={self.quantile} and low={self.low} are both lower bounds. '
                f'Set one of them.'
            )

    @property
    def default_max_age(self) -> int:
        """Number of steps that surplus may wait where nobody sets it.

        A spread is judged from what the current model produced, such as completions or label maps.
        An older model's are off-policy, so they do not wait at all.
        """
        return 1 if self.eps is None else 0

    def check_group_size(self, group_size: int) -> None:
        """Raise ValueError if no group of this size can ever be valid."""
        if self.eps is not None and group_size < 2:
            raise ValueError(
                f'eps={self.eps} asks for a spread over the scores of a group, and '
                f'group_size={group_size} has none. Use low and high for single '
                f'samples, or group_size >= 2.'
            )

    def criteria(self) -> str:
        """Return the criteria as in a config, for example ``'low=0.2, high=3'``."""
        criteria = dict(eps=self.eps, low=self.low, high=self.high, quantile=self.quantile)
        return ', '.join(
            f'{name}={value:g}' for name, value in criteria.items() if value is not None
        )

    def judge(self, scores: Scores, group_size: int, threshold: Optional[float] = None) -> Verdict:
        """Decide about every group. Pure.

        Args:
            scores: One number for each sample, the groups one after the other.
            group_size: Number of scores in a group.
            threshold: Quantile of the latest scores, for the criterion ``quantile``. None while
                there are no scores: then every finite mean meets the criterion.

        Raises:
            ValueError: If the scores do not fill whole groups.
        """
        flat = to_float64(scores)
        if flat.numel() % group_size:
            raise ValueError(f'{flat.numel()} scores do not make whole groups of {group_size}.')
        groups = flat.view(-1, group_size)
        finite = torch.isfinite(groups).all(1)
        groups = torch.where(finite[:, None], groups, torch.zeros_like(groups))
        highest, lowest = (groups.max(1)[0], groups.min(1)[0]) if len(groups) else (flat, flat)
        # A mean lies between its extremes; the rounded mean of equal scores may not.
        mean = torch.min(torch.max(groups.mean(1), lowest), highest)
        bound = None if self.quantile is None else threshold
        reasons = [''] * len(groups)
        for reason, meets in (
            (NOT_FINITE, finite),
            (NO_SPREAD, None if self.eps is None else highest - lowest > self.eps),
            (TOO_LOW, None if self.low is None else mean > self.low),
            (TOO_LOW, None if bound is None else mean >= bound),
            (TOO_HIGH, None if self.high is None else mean < self.high),
        ):
            if meets is not None:
                reasons = [
                    known or ('' if good else reason)
                    for known, good in zip(reasons, meets.tolist())
                ]
        return Verdict(
            torch.tensor([not reason for reason in reasons], dtype=torch.bool),
            reasons,
            torch.where(finite, mean, torch.full_like(mean, math.nan)),
        )


def to_float64(scores: Scores) -> torch.Tensor:
    """Return scores as a flat float64 CPU tensor."""
    if isinstance(scores, torch.Tensor):
        # Move to the CPU first, because not every device has float64.
        return scores.detach().cpu().to(torch.float64).reshape(-1)
    return torch.tensor([float(score) for score in scores], dtype=torch.float64)
