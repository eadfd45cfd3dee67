"""The seam index: how much more an embedding changes across borders of windows than elsewhere."""

from __future__ import annotations

from typing import Optional, Sequence

import numpy as np

from .blending import AlignedGrid
from .vectors import NO_DATA, dequantize

# Rows that are compared at a time.
_ROWS = 32


class SeamIndex:
    """Mean step across borders of windows over the mean step elsewhere; 1 without any seam.

    A step is the Euclidean distance of the vectors of two neighboring cells. Borders are the first
    and the last cells of windows, which blending weighs least. Interpolated vectors change more or
    less by their position between two vectors of the encoder, so only steps in the position of the
    borders are compared.

    Args:
        grid: Windows of the embedding, in cells.
    """

    def __init__(self, grid: AlignedGrid) -> None:
        height, width = grid.window
        # Whether the step to a cell crosses a border, and whether it is compared at all.
        self._columns = _borders(grid.columns, width, grid.width, grid.step)
        self._rows = _borders(grid.rows, height, grid.height, grid.step)
        # Sum and number of steps elsewhere, and across borders.
        self._sums, self._counts = np.zeros(2), np.zeros(2)
        self._row = 0
        self._last: Optional[np.ndarray] = None

    def add(self, vectors: np.ndarray) -> None:
        """Add the next rows, (C, rows, W) int8."""
        for first in range(0, vectors.shape[1], _ROWS):
            rows = vectors[:, first : first + _ROWS]
            self._note(rows[:, :, :-1], rows[:, :, 1:], self._columns[:, None, 1:])
            joined = rows if self._last is None else np.concatenate([self._last, rows], 1)
            stop = self._row + rows.shape[1]
            start = stop - joined.shape[1] + 1
            self._note(joined[:, :-1], joined[:, 1:], self._rows[:, start:stop, None])
            self._row, self._last = stop, rows[:, -1:]

    def _note(self, before: np.ndarray, after: np.ndarray, borders: np.ndarray) -> None:
        known = (before[0] != NO_DATA) & (after[0] != NO_DATA)
        difference = dequantize(after) - dequantize(before)
        steps = np.sqrt(np.einsum('chw,chw->hw', difference, difference))
        for number, wanted in enumerate(borders):
            chosen = known & wanted
            self._sums[number] += float(steps[chosen].sum(dtype=np.float64))
            self._counts[number] += int(chosen.sum())

    def value(self) -> Optional[float]:
        """Return the index; None without borders, or without any step elsewhere."""
        if not self._counts.all() or not self._sums[0]:
            return None
        elsewhere, borders = self._sums / self._counts
        return round(float(borders / elsewhere), 4)


def _borders(starts: Sequence[int], window: int, length: int, step: int) -> np.ndarray:
    """Return the cells of an axis whose step from the cell before counts, bool (2, length).

    The first row has the steps elsewhere, the second those across borders of windows.
    """
    borders = np.zeros(length + 1, bool)
    for start in starts:
        borders[[start, min(start + window, length)]] = True
    compared = np.arange(length) % step == 0
    compared[0] = False
    return np.stack([compared & ~borders[:length], compared & borders[:length]])
