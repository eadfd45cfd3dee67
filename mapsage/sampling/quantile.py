"""The latest scores, and a threshold that follows them."""
from __future__ import annotations

import math
from typing import List, Optional, Sequence

_WINDOW = 64  # scores: enough for a share to within 6 % (sqrt(q (1 - q) / 64)), and soon renewed


class ScoreWindow:
    """The latest scores, whole rounds of them, and their quantiles.

    Whole rounds, since the scores of a round come rank by rank: a part of them would be those of
    the last ranks.

    Args:
        size: Number of scores to keep at least, once there were so many.
    """

    def __init__(self, size: int = _WINDOW) -> None:
        self._size = size
        self._rounds: List[List[float]] = []

    def __len__(self) -> int:
        return sum(len(each) for each in self._rounds)

    def add(self, scores: Sequence[float]) -> None:
        """Add the scores of a round. Those that are not finite are left out."""
        finite = [score for score in scores if math.isfinite(score)]
        if finite:
            self._rounds.append(finite)
        while self._rounds and len(self) - len(self._rounds[0]) >= self._size:
            del self._rounds[0]

    def quantile(self, share: float) -> Optional[float]:
        """Return the largest score with at most this share of the scores below it.

        None while there are no scores. One of the scores is returned, never a value between two:
        it is the same number on every machine.
        """
        scores = sorted(score for each in self._rounds for score in each)
        return scores[min(len(scores) - 1, int(share * len(scores)))] if scores else None

    def latest(self) -> List[float]:
        """Return the latest scores, the number of them that the window has for its size."""
        return [score for each in self._rounds for score in each][-self._size:]

    def state_dict(self) -> List[List[float]]:
        """Return the scores by round."""
        return [list(each) for each in self._rounds]

    def load_state_dict(self, state: Sequence[Sequence[float]]) -> None:
        """Replace the scores by those of :meth:`state_dict`."""
        self._rounds = [list(each) for each in state]
