"""The scores of overlapping windows, added up over a band of rows."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np

from .errors import PredictError

NO_DATA = 255  # in class maps and in maps of the confidence and of probabilities
PROBABILITY_STEPS = 250  # a stored probability is a multiple of 1 / 250, a short decimal: 0.004


@dataclass(frozen=True)
class Blended:
    """Rows of a finished map.

    Attributes:
        classes: ``(rows, width)`` uint8 class indices, 255 where there is no data.
        confidence: ``(rows, width)`` uint8, the winner's score in per cent, at most 100, 255 where
            there is no data; None when not asked for.
        probabilities: ``(classes, rows, width)`` uint8, each class's score in steps of 0.004, 255
            where there is no data; None when not asked for.
    """

    classes: np.ndarray
    confidence: Optional[np.ndarray]
    probabilities: Optional[np.ndarray] = None


class RowBlender:
    """Adds up weighted scores over as many rows as a window has, and hands out finished rows.

    Windows come in rows, from the top; memory does not depend on the height of the scene.

    Args:
        scores: Number of scores of a pixel: one for each class, at most 255, or 1 for a binary
            model.
        rows: Number of rows that are held at a time.
        width: Number of columns.
        threshold: Score of a binary model above which a pixel is of class 1.
        confidence: Whether finished rows come with their confidence.
        probabilities: Whether finished rows come with the probabilities of all classes.
    """

    def __init__(self, scores: int, rows: int, width: int, threshold: float = 0.5,
                 confidence: bool = False, probabilities: bool = False) -> None:
        self._sums = np.zeros((scores, rows, width), np.float32)
        self._weights = np.zeros((rows, width), np.float32)
        self._valid = np.zeros((rows, width), bool)
        self._threshold = np.float32(threshold)
        self._confidence, self._probabilities = confidence, probabilities

    def add(self, column: int, scores: np.ndarray, weights: np.ndarray, valid: np.ndarray) -> None:
        """Add a window whose first row is the first one held.

        Args:
            column: First column of the window.
            scores: ``(scores, window height, window width)`` float32, times their weights.
            weights: ``(window height, window width)`` float32.
            valid: ``(h, w)`` bool, not larger: the part of the window in the scene, and which of
                its pixels hold data.
        """
        height, width = valid.shape
        columns = slice(column, column + width)
        # Class by class: less memory is touched at a time.
        for sums, more in zip(self._sums, scores):
            sums[:height, columns] += more[:height, :width]
        self._weights[:height, columns] += weights[:height, :width]
        self._valid[:height, columns] |= valid

    def take(self, rows: int) -> Blended:
        """Return the first ``rows`` rows, which no later window reaches, and move up by as many.

        Raises:
            PredictError: If a score is not a number.
        """
        sums, weights = self._sums[:, :rows], self._weights[:rows]
        best, classes = winners(sums) if len(sums) > 1 else self._threshold_of(sums[0], weights)
        # A pixel with data has no weight where its windows could not be read.
        known = self._valid[:rows] & (weights > 0)
        if np.isnan(best.max()):
            raise PredictError('the model gave scores that are not numbers (NaN): look at the '
                               'checkpoint, at mean and std of its data_preprocessor, and at the '
                               'values of the scene; float16 with --amp ends at 65,504.')
        confidence = None
        if self._confidence:
            # The scores of mask queries are sums, which may be above 1.
            percent = np.rint(100 * np.minimum(best / np.where(known, weights, 1), 1))
            confidence = np.where(known, percent, NO_DATA).astype(np.uint8)
        classes[~known] = NO_DATA
        probabilities = self._steps(sums, weights, known) if self._probabilities else None
        for plane in (*self._sums, self._weights, self._valid):
            left = len(plane) - rows
            plane[:left] = plane[rows:]
            plane[left:] = 0
        return Blended(classes, confidence, probabilities)

    def _steps(self, sums: np.ndarray, weights: np.ndarray, known: np.ndarray) -> np.ndarray:
        """Return the probabilities of all classes as they are stored, plane by plane."""
        per_step = np.where(known, weights, 1) / np.float32(PROBABILITY_STEPS)
        stored = np.empty((max(2, len(sums)), *known.shape), np.uint8)
        for plane, total in zip(stored[-len(sums):], sums):
            steps = np.minimum(np.rint(total / per_step), PROBABILITY_STEPS)
            plane[:] = np.where(known, steps, NO_DATA)
        if len(sums) == 1:  # a binary model's score is that of its second class
            stored[0] = np.where(known, PROBABILITY_STEPS - stored[1], NO_DATA)
        return stored

    def _threshold_of(self, sums: np.ndarray,
                      weights: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        classes = sums > self._threshold * weights
        return np.where(classes, sums, weights - sums), classes.astype(np.uint8)


def winners(sums: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return the largest of ``(scores, rows, width)`` sums and its index, the first where equal.

    What ``argmax`` returns, four times as fast along the first axis.

    Returns:
        ``(rows, width)`` of the sums' dtype, and ``(rows, width)`` uint8.
    """
    count = len(sums)
    best = sums.max(axis=0)
    rank = np.zeros(best.shape, np.uint8)
    for index, plane in enumerate(sums):
        np.maximum(rank, (plane == best).view(np.uint8) * np.uint8(count - index), out=rank)
    return best, np.uint8(count) - rank
