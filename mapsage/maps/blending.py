"""Blend the scores of overlapping windows into finished rows of a map.

`RowBlender` holds as many rows as a window is high, whatever the height of the scene: windows are
added row by row of windows, and `take` hands out the rows that no later window reaches. Scores come
multiplied with their blending weights (`windows.blend_weights`) and are divided by the sum of the
weights only where that is needed: the winner is the same without the division.

Shapes: C scores of a pixel, R rows in memory, W columns of the scene.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np

from .errors import PredictError

# Value of pixels without data in class maps and in maps of confidence and probabilities.
NO_DATA = 255
# A stored probability is a multiple of 1 / 250 = 0.004, a short decimal.
PROBABILITY_STEPS = 250


@dataclass(frozen=True)
class Blended:
    """Rows of a finished map.

    Attributes:
        classes: ``(rows, width)`` uint8 class indices, 255 where there is no data.
        confidence: ``(rows, width)`` uint8, the winner's score in percent, at most 100, 255 where
            there is no data; None if the map has no confidence.
        probabilities: ``(classes, rows, width)`` uint8, each class's score in steps of 0.004, 255
            where there is no data; None if the map has no probabilities.
    """

    classes: np.ndarray
    confidence: Optional[np.ndarray]
    probabilities: Optional[np.ndarray] = None


class RowBlender:
    """Sums weighted scores over as many rows as a window has, and hands out finished rows.

    Windows come row by row, from the top. Memory does not depend on the height of the scene.

    Args:
        scores: Number of scores of a pixel: one for each class, at most 255, or 1 for a binary
            model.
        rows: Number of rows in memory: the height of a window.
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
        """Add a window that begins at the first row in memory.

        Args:
            column: First column of the window.
            scores: ``(scores, window height, window width)`` float32, multiplied with ``weights``.
            weights: ``(window height, window width)`` float32.
            valid: ``(h, w)`` bool, True where the scene has data. It covers the section of the
                window inside the scene, so it may be smaller than the window.
        """
        height, width = valid.shape
        columns = slice(column, column + width)
        # Class by class, because this touches less memory at a time.
        for class_sums, class_scores in zip(self._sums, scores):
            class_sums[:height, columns] += class_scores[:height, :width]
        self._weights[:height, columns] += weights[:height, :width]
        self._valid[:height, columns] |= valid

    def take(self, rows: int) -> Blended:
        """Return the first ``rows`` rows, which no later window reaches, and shift the rest up.

        Raises:
            PredictError: If a score is not a number.
        """
        sums, weights = self._sums[:, :rows], self._weights[:rows]
        best, classes = winners(sums) if len(sums) > 1 else self._binary_winners(sums[0], weights)
        # A valid pixel has no weight if its windows could not be read.
        known = self._valid[:rows] & (weights > 0)
        if np.isnan(best.max()):
            raise PredictError('the model gave scores that are not numbers (NaN): look at the '
                               'checkpoint, at mean and std of its data_preprocessor, and at the '
                               'values of the scene; float16 with --amp ends at 65,504.')
        confidence = None
        if self._confidence:
            # Scores of mask queries are sums over queries, which may exceed 1.
            percent = np.rint(100 * np.minimum(best / np.where(known, weights, 1), 1))
            confidence = np.where(known, percent, NO_DATA).astype(np.uint8)
        classes[~known] = NO_DATA
        probabilities = None
        if self._probabilities:
            probabilities = self._probability_steps(sums, weights, known)
        for plane in (*self._sums, self._weights, self._valid):
            remaining = len(plane) - rows
            plane[:remaining] = plane[rows:]
            plane[remaining:] = 0
        return Blended(classes, confidence, probabilities)

    def _probability_steps(self, sums: np.ndarray, weights: np.ndarray,
                           known: np.ndarray) -> np.ndarray:
        """Return the probabilities of all classes in stored steps, ``(classes, rows, width)``."""
        per_step = np.where(known, weights, 1) / np.float32(PROBABILITY_STEPS)
        stored = np.empty((max(2, len(sums)), *known.shape), np.uint8)
        for plane, total in zip(stored[-len(sums):], sums):
            steps = np.minimum(np.rint(total / per_step), PROBABILITY_STEPS)
            plane[:] = np.where(known, steps, NO_DATA)
        # A binary model scores class 1; class 0 has the rest.
        if len(sums) == 1:
            stored[0] = np.where(known, PROBABILITY_STEPS - stored[1], NO_DATA)
        return stored

    def _binary_winners(self, sums: np.ndarray,
                        weights: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return the winner's weighted score and its class for a model with a single score."""
        classes = sums > self._threshold * weights
        return np.where(classes, sums, weights - sums), classes.astype(np.uint8)


def winners(sums: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return the largest of ``(scores, rows, width)`` sums and its index, the first if equal.

    The same as ``argmax``, but four times as fast along the first axis.

    Returns:
        ``(rows, width)`` of the sums' dtype, and ``(rows, width)`` uint8.
    """
    count = len(sums)
    best = sums.max(axis=0)
    rank = np.zeros(best.shape, np.uint8)
    for index, plane in enumerate(sums):
        np.maximum(rank, (plane == best).view(np.uint8) * np.uint8(count - index), out=rank)
    return best, np.uint8(count) - rank
