"""The latest scores, and a threshold that follows them."""

from __future__ import annotations

import itertools
import math
from typing import List, Optional, Sequence

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
