"""Confidence thresholds of pseudo-labels, by class.

Pure functions on counts of pixels. `pseudo_masks.py` counts them over all maps and applies the
thresholds.

Shapes:
    counts      (classes, PERCENT)  pixels by predicted class and confidence in per cent
    thresholds  (classes,)          minimum confidence of a label, per cent
"""
from __future__ import annotations

import math

import numpy as np

PERCENT = 101
"""Number of steps of a confidence: 0 to 100 per cent."""


def class_thresholds(counts: np.ndarray, least: float, share: float) -> np.ndarray:
    """Return the minimum confidence of a pseudo-label for each class.

    The threshold is ``least``. A class that would keep less than ``share`` of its pixels gets a
    lower one: the highest threshold that keeps this share. So a rare class, of which a model is
    seldom sure, gets labels too; one threshold for all classes would only teach the frequent
    classes, more so in every round of self-training.

    The quantile by class comes from class-balanced self-training (Zou, Yu, Kumar and Wang, ECCV
    2018). There it is the threshold of every class, with a share that grows from round to round;
    here it applies only where it is below ``least``.

    Args:
        counts: Pixels by predicted class and confidence in per cent, integers
            ``(classes, PERCENT)``.
        least: Confidence from which pixels of any class are kept, 0 to 1. Fractions of a per cent
            are rounded up.
        share: Minimum share of each class that is kept, 0 to 1; with 0, ``least`` is the threshold
            of all classes.

    Returns:
        ``(classes,)`` int64, per cent. A class without pixels has ``least``.
    """
    limit = math.ceil(round(100 * least, 6))
    # Pixels with at least this confidence.
    above = counts[:, ::-1].cumsum(1)[:, ::-1]
    total = above[:, :1]
    enough = above >= np.ceil(share * total)
    quantile = np.where(enough, np.arange(PERCENT), 0).max(1)
    return np.where((total[:, 0] > 0) & (share > 0), np.minimum(quantile, limit), limit)
