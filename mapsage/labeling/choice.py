"""Which windows to label next: uncertain, of rare classes, far apart, and diverse. Pure."""
from __future__ import annotations

from typing import List, Optional, Sequence

import numpy as np

_POOL = 5  # times the count: how many of the most uncertain windows are looked at first
_MOST = 5.0  # times the weight of an average pixel that one of a rare class counts


def class_weights(pixels: np.ndarray) -> np.ndarray:
    """Return how much doubt about each class counts.

    The weight is the inverse square root of a class's share of the pixels; an average pixel has
    weight 1, and none more than 5, as a class that is predicted at a few pixels is mostly noise.

    Args:
        pixels: Pixels by predicted class in all windows, ``(classes,)``.

    Returns:
        ``(classes,)`` float64; 1 for a class without pixels.
    """
    share = pixels / max(1, pixels.sum())
    weights = np.where(share > 0, 1 / np.sqrt(np.where(share > 0, share, 1)), 0)
    total = float((share * weights).sum())
    return np.where(share > 0, np.minimum(weights / (total or 1), _MOST), 1)


def choose(scores: np.ndarray, positions: np.ndarray, count: int, apart: float,
           features: Optional[np.ndarray] = None, first: Sequence[int] = ()) -> List[int]:
    """Return the numbers of the chosen windows, in the order in which they were chosen.

    The first has the highest score. Each further one has the largest product of its score and its
    distance, in features, to the nearest chosen one: k-center greedy (Sener and Savarese, ICLR
    2018), weighted by the score, over the most uncertain windows that are left, five times
    ``count`` of them. Equal ones are taken in their order.

    Args:
        scores: ``(windows,)``; those that are not above 0 are never chosen.
        positions: Places of their middles, ``(windows, 2)``.
        count: Largest number of windows.
        apart: Least distance of the middles of two of them.
        features: ``(windows, channels)``; None chooses by the score alone.
        first: Numbers of windows that are chosen before all others, in this order, whatever their
            scores and distances.
    """
    order = np.argsort(-scores, kind='stable')
    order = order[scores[order] > 0]
    free = np.zeros(len(scores), bool)
    free[order] = True
    distance = np.ones(len(scores))
    scaled = None if features is None else _standardized(features)
    chosen: List[int] = []
    while (len(chosen) < len(first) or free.any()) and len(chosen) < count:
        if len(chosen) < len(first):
            best = int(first[len(chosen)])
        else:
            pool = order[free[order]][:max(1, _POOL * count - len(chosen))]
            values = scores[pool] * distance[pool]
            best = int(pool[values.argmax()]) if chosen and values.max() > 0 else int(pool[0])
        chosen.append(best)
        free[best] = False
        free &= np.hypot(*(positions - positions[best]).T) >= apart - 1e-9
        if scaled is not None:
            there = np.sqrt(((scaled - scaled[best]) ** 2).sum(1))
            distance = there if len(chosen) == 1 else np.minimum(distance, there)
    return chosen


def _standardized(features: np.ndarray) -> np.ndarray:
    values = features.astype(np.float64)
    spread = values.std(0)
    # In thousandths: the last bits of features, which differ between machines, choose nothing.
    return np.round((values - values.mean(0)) / np.where(spread > 0, spread, 1), 3)
