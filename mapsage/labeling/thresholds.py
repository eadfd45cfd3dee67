"""From which confidence on a pixel's predicted class becomes its label. Pure."""
from __future__ import annotations

import math

import numpy as np

PERCENT = 101
"""Number of steps of a confidence: 0 to 100 per cent."""


def class_thresholds(counts: np.ndarray, least: float, share: float) -> np.ndarray:
    """Return the least confidence of a label, for each class.

    It is ``least``, and lower for a class of which less than ``share`` would be kept then: as high
    as keeps this share of it, its most confident pixels. A rare class, of which a model is seldom
    sure, so has labels, too; a single threshold for all teaches the frequent ones alone, and each
    round anew. The quantile by class is that of class-balanced self-training (Zou, Yu, Kumar and
    Wang, ECCV 2018), where the share grows from round to round; there it is the threshold
    of every class, here only where it is below ``least``.

    Args:
        counts: Pixels by predicted class and confidence in per cent, integers
            ``(classes, PERCENT)``.
        least: Confidence from which on pixels of any class are kept, 0 to 1. Fractions of a per
            cent are rounded up.
        share: Share of each class that is kept at least, 0 to 1; 0 for ``least`` alone.

    Returns:
        ``(classes,)`` int64, per cent; that of ``least`` for a class without pixels.
    """
    limit = math.ceil(round(100 * least, 6))
    above = counts[:, ::-1].cumsum(1)[:, ::-1]  # pixels of at least this confidence
    total = above[:, :1]
    enough = above >= np.ceil(share * total)
    quantile = np.where(enough, np.arange(PERCENT), 0).max(1)
    return np.where((total[:, 0] > 0) & (share > 0), np.minimum(quantile, limit), limit)
