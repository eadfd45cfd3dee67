"""Blend the scores of overlapping windows into finished rows of a map.

Windows are added row by row of windows, from left to right. `RowBlender` finishes pixels as soon as
no later window reaches them, so it holds the sums of one window, and over the whole width only of
the rows that the next row of windows shares. Scores come multiplied with their blending weights
(`windows.blend_weights`) and are divided by the sum of the weights only where that is needed: the
winner is the same without the division.

Shapes: C scores of a pixel, R rows of a window, W columns of the scene.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Iterator, Optional, Tuple

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


class _BoxSums:
    """Sums of the windows that cover a pixel, over a box of pixels.

    Args:
        scores: Number of scores of a pixel.
        rows, columns: Size of the box in pixels.

    Attributes:
        scores: ``(C, rows, columns)`` float32, sums of weighted scores.
        weights: ``(rows, columns)`` float32, sums of the weights.
        valid: ``(rows, columns)`` bool, where the scene has data.
    """

    def __init__(self, scores: int, rows: int, columns: int) -> None:
        self.scores = np.zeros((scores, rows, columns), np.float32)
        self.weights = np.zeros((rows, columns), np.float32)
        self.valid = np.zeros((rows, columns), bool)

    def planes(self) -> Iterator[np.ndarray]:
        """Yield all ``(rows, columns)`` planes, because a plane at a time fits the cache."""
        yield from self.scores
        yield self.weights
        yield self.valid


class RowBlender:
    """Sums the weighted scores of windows, and hands out finished rows.

    Memory depends on the width of the scene only by the rows that two rows of windows share: it
    takes about 4 * C * (shared rows * W + pixels of a window) bytes.

    Args:
        scores: Number of scores of a pixel: one for each class, at most 255, or 1 for a binary
            model.
        window: Height and width of a window.
        width: Number of columns of the scene.
        shared_rows: Largest number of rows that a row of windows shares with the next one.
        threshold: Score of a binary model above which a pixel is of class 1.
        confidence: Whether finished rows come with their confidence.
        probabilities: Whether finished rows come with the probabilities of all classes.
    """

    def __init__(
        self,
        scores: int,
        window: Tuple[int, int],
        width: int,
        shared_rows: int,
        threshold: float = 0.5,
        confidence: bool = False,
        probabilities: bool = False,
    ) -> None:
        self._scores, self._height, self._width = scores, window[0], width
        self._shared = self._new_sums(scores, shared_rows, width)
        # The columns from _left to _right that are not finished, at the left of the box.
        self._open = self._new_sums(scores, *window)
        self._left = self._right = 0
        # Rows at the top that the row of windows above has left in _shared.
        self._shared_above = 0
        self._threshold = np.float32(threshold)
        self._confidence, self._probabilities = confidence, probabilities

    def begin(self, rows: int) -> None:
        """Begin a row of windows, of which the first ``rows`` rows are reached by no later one."""
        self._rows = rows
        count = max(2, len(self._open.scores))
        self._finished = Blended(
            np.empty((rows, self._width), np.uint8),
            np.empty((rows, self._width), np.uint8) if self._confidence else None,
            np.empty((count, rows, self._width), np.uint8) if self._probabilities else None,
        )

    def add(self, column: int, scores: np.ndarray, weights: np.ndarray, valid: np.ndarray) -> None:
        """Add a window of the current row of windows.

        Args:
            column: First column of the window, not left of the windows before.
            scores: ``(scores, window height, window width)`` float32, multiplied with ``weights``.
            weights: ``(window height, window width)`` float32.
            valid: ``(h, w)`` bool, True where the scene has data. It covers the section of the
                window inside the scene, so it may be smaller than the window.

        Raises:
            PredictError: If a score is not a number.
        """
        height, width = valid.shape
        box = self._open_box(column, valid.shape)
        # Plane by plane, because this touches less memory at a time.
        for plane, window_scores in zip(self._open.scores, scores):
            plane[box] += window_scores[:height, :width]
        self._open.weights[box] += weights[:height, :width]
        self._open.valid[box] |= valid

    def take(self) -> Blended:
        """End the row of windows and return its finished rows.

        Raises:
            PredictError: If a score is not a number.
        """
        self._end_row()
        return self._finished

    def _new_sums(self, scores: int, rows: int, columns: int) -> Any:
        return _BoxSums(scores, rows, columns)

    def _open_box(self, column: int, shape: Tuple[int, ...]) -> Tuple[slice, slice]:
        """Make room for a window; return its rows and columns among the open ones."""
        height, width = shape
        if column + width > self._left + self._open.valid.shape[1]:
            self._finish(column)
        self._widen(column + width)
        first = column - self._left
        return slice(height), slice(first, first + width)

    def _end_row(self) -> None:
        self._finish(self._width)
        self._left = self._right = 0
        self._shared_above = self._height - self._rows

    def _widen(self, stop: int) -> None:
        """Open the columns before ``stop``, with the sums of the row of windows above."""
        first, last = self._right - self._left, stop - self._left
        if last <= first:
            return
        above = self._shared_above
        for plane, shared in zip(self._open.planes(), self._shared.planes()):
            plane[..., :above, first:last] = shared[..., :above, self._right : stop]
            plane[..., above:, first:last] = 0
        self._right = stop

    def _finish(self, stop: int) -> None:
        """Finish the columns before ``stop``."""
        capacity = self._open.valid.shape[1]
        while self._left < stop:
            end = min(stop, self._left + capacity)
            self._widen(end)
            count, remaining = end - self._left, self._right - end
            self._finish_box(count, slice(self._left, end))
            below = self._height - self._rows
            for plane, shared in zip(self._open.planes(), self._shared.planes()):
                shared[..., :below, self._left : end] = plane[..., self._rows :, :count]
                # In pieces that do not overlap, because PyTorch copies no tensor onto itself.
                for first in range(0, remaining, count):
                    last = min(first + count, remaining)
                    plane[..., first:last] = plane[..., first + count : last + count]
            self._left = end

    def _finish_box(self, count: int, columns: slice) -> None:
        """Compute the finished rows of the first ``count`` open columns."""
        box = np.s_[: self._rows, :count]
        sums, weights = self._open.scores[(slice(None), *box)], self._open.weights[box]
        best, classes = winners(sums) if len(sums) > 1 else self._binary_winners(sums[0], weights)
        # A valid pixel has no weight if its windows could not be read.
        known = self._open.valid[box] & (weights > 0)
        self._check_numbers(not np.isnan(best.max()))
        if self._finished.confidence is not None:
            # Scores of mask queries are sums over queries, which may exceed 1.
            percent = np.rint(100 * np.minimum(best / np.where(known, weights, 1), 1))
            self._finished.confidence[:, columns] = np.where(known, percent, NO_DATA)
        self._finished.classes[:, columns] = np.where(known, classes, np.uint8(NO_DATA))
        if self._finished.probabilities is not None:
            self._write_probabilities(
                self._finished.probabilities[:, :, columns], sums, weights, known
            )

    def _check_numbers(self, finite: bool) -> None:
        if not finite:
            raise PredictError(
                'the model gave scores that are not numbers (NaN): look at the '
                'checkpoint, at mean and std of its data_preprocessor, and at the '
                'values of the scene; float16 ends at 65,504, and --no-amp computes in float32.'
            )

    def _write_probabilities(
        self, stored: np.ndarray, sums: np.ndarray, weights: np.ndarray, known: np.ndarray
    ) -> None:
        """Write the probabilities in steps into ``stored``, ``(classes, rows, columns)``."""
        per_step = np.where(known, weights, 1) / np.float32(PROBABILITY_STEPS)
        for plane, total in zip(stored[-len(sums) :], sums):
            steps = np.minimum(np.rint(total / per_step), PROBABILITY_STEPS)
            plane[:] = np.where(known, steps, NO_DATA)
        # A binary model scores class 1; class 0 has the rest.
        if len(sums) == 1:
            stored[0] = np.where(known, PROBABILITY_STEPS - stored[1], NO_DATA)

    def _binary_winners(
        self, sums: np.ndarray, weights: np.ndarray
    ) -> Tuple[np.ndarray, np.ndarray]:
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
