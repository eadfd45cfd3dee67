"""Choice of the windows to label next: uncertain, of rare classes, not too close, and diverse.

Pure functions on arrays; `ranking.py` calls them and turns the chosen indices into suggestions.

Shapes:
    scores      (windows,)           doubt of the model; a window with a score of 0 is never chosen
    positions   (windows, 2)         centers, in units of a window's side
    features    (windows, channels)  mean of the backbone's last feature map
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import numpy as np

# The diversity criterion looks at the `_POOL_FACTOR * count` most uncertain windows only.
_POOL_FACTOR = 5
_MAX_WEIGHT = 5.0


def class_weights(pixels: np.ndarray) -> np.ndarray:
    """Return the weight of each class's doubt in the score of a window.

    The weight is proportional to the inverse square root of the class's share of the pixels, and
    scaled so that the mean over all pixels is 1. It is at most 5, because a class that is
    predicted at only a few pixels is mostly noise.

    Args:
        pixels: Pixels by predicted class in all windows, ``(classes,)``.

    Returns:
        ``(classes,)`` float64; 1 for a class without pixels.
    """
    share = pixels / max(1, pixels.sum())
    weights = np.where(share > 0, 1 / np.sqrt(np.where(share > 0, share, 1)), 0)
    total = float((share * weights).sum())
    return np.where(share > 0, np.minimum(weights / (total or 1), _MAX_WEIGHT), 1)


def choose(
    scores: np.ndarray,
    positions: np.ndarray,
    count: int,
    apart: float,
    features: Optional[np.ndarray] = None,
    first: Sequence[int] = (),
) -> List[int]:
    """Return the indices of the chosen windows, in the order in which they were chosen.

    The window with the highest score comes first. Each further window has the largest product of
    its score and its feature distance to the nearest chosen window. This is k-center greedy (Sener
    and Savarese, ICLR 2018), weighted by the score and restricted to the ``5 * count`` most
    uncertain windows that are still available. Ties are broken by index.

    Args:
        scores: ``(windows,)``; windows with a score of 0 or less are never chosen.
        positions: Centers of the windows, ``(windows, 2)``.
        count: Largest number of windows.
        apart: Minimum distance between the centers of two chosen windows.
        features: ``(windows, channels)``; if None, windows are chosen by score only.
        first: Indices of windows that come before all others, in this order, whatever their
            scores and distances.
    """
    order = np.argsort(-scores, kind='stable')
    order = order[scores[order] > 0]
    available = np.zeros(len(scores), bool)
    available[order] = True
    # Distance of each window to the nearest chosen one, in standardized features.
    distance = np.ones(len(scores))
    standardized = None if features is None else _standardize(features)
    chosen: List[int] = []
    while (len(chosen) < len(first) or available.any()) and len(chosen) < count:
        if len(chosen) < len(first):
            best = int(first[len(chosen)])
        else:
            pool = order[available[order]][: max(1, _POOL_FACTOR * count - len(chosen))]
            gains = scores[pool] * distance[pool]
            best = int(pool[gains.argmax()]) if chosen and gains.max() > 0 else int(pool[0])
        chosen.append(best)
        available[best] = False
        available &= np.hypot(*(positions - positions[best]).T) >= apart - 1e-9
        if standardized is not None:
            to_best = np.sqrt(((standardized - standardized[best]) ** 2).sum(1))
            distance = to_best if len(chosen) == 1 else np.minimum(distance, to_best)
    return chosen


def _standardize(features: np.ndarray) -> np.ndarray:
    values = features.astype(np.float64)
    spread = values.std(0)
    # The last bits of features differ between machines. Rounding to thousandths keeps them from
    # deciding which window is chosen.
    return np.round((values - values.mean(0)) / np.where(spread > 0, spread, 1), 3)
