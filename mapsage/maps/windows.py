"""Positions of the windows of a scene, and the blending weights of their pixels.

Pure functions and one dataclass, `Grid`. A *strip* is the unit of work and of resuming: the rows of
the map that are complete as soon as one row of windows is. A window is higher than its strip, so
the first strip of a run also needs the rows of windows above it (`Grid.first_row`). A scene that is
too wide for the memory has strips in several blocks of columns, one block after the other.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Iterable, List, Optional, Tuple

import numpy as np

# Bytes of the sums that a row of windows leaves to the next one, in a block of columns.
_SUM_BYTES = 768 << 20


def window_starts(length: int, window: int, overlap: int) -> Tuple[int, ...]:
    """Return the first pixels of the windows along an axis.

    There are as few windows as possible, spread evenly: neighbors share ``overlap`` pixels or more,
    and the last window ends with the axis. An axis that is not longer than a window has one window,
    at 0.

    Args:
        length: Length of the axis in pixels.
        window: Length of a window in pixels.
        overlap: Least number of pixels that neighbors share.

    Raises:
        ValueError: If a length is not positive, or the overlap is not in 0 .. window - 1.
    """
    if length < 1 or window < 1:
        raise ValueError(f'length={length} and window={window}, expected 1 pixel or more of each.')
    if not 0 <= overlap < window:
        raise ValueError(
            f'overlap={overlap} does not fit window={window}: expected 0 to {window - 1} pixels.'
        )
    last = length - window
    if last <= 0:
        return (0,)
    gaps = -(-last // (window - overlap))
    return tuple(number * last // gaps for number in range(gaps + 1))


def blend_weights(window: int, overlap: int) -> np.ndarray:
    """Return the blending weight of each pixel of a window along one axis.

    A squared sine rises over ``overlap`` pixels from either edge, so the weights of two neighbors
    that share exactly these pixels sum to one. All weights are positive: a pixel in a single
    window, such as one at the border of a scene, gets that window's score unchanged once the sum is
    divided by the weights.

    Args:
        window: Length of a window in pixels.
        overlap: Number of pixels over which the weight rises.

    Returns:
        ``(window,)`` float32 in (0, 1].
    """
    weights = np.ones(window)
    if overlap:
        rise = np.sin(np.pi / 2 * (np.arange(overlap) + 0.5) / overlap) ** 2
        weights[:overlap] = rise
        weights[window - overlap :] *= rise[::-1]
    return weights.astype(np.float32)


@dataclass(frozen=True)
class Grid:
    """The windows of a scene, arranged in rows of windows.

    Strip ``n`` consists of the pixel rows that are finished once row ``n`` of windows is: from the
    first pixel row of these windows to the first one of the next row of windows. The last strip
    ends with the scene. With R rows of windows, strip ``n + R`` has the same rows in the next block
    of columns.

    Attributes:
        height, width: Size of the scene in pixels.
        window: Height and width of a window in pixels.
        overlap: Least number of pixels that neighbors share.
        chosen_columns: First pixel columns of the windows to predict, for each row of windows;
            None to predict all windows.
        blocks: Number of blocks of columns.
        rows, columns: First pixel rows and columns of all windows.
    """

    height: int
    width: int
    window: Tuple[int, int]
    overlap: int
    chosen_columns: Optional[Tuple[Tuple[int, ...], ...]] = None
    blocks: int = 1

    def bounded(self, scores: int) -> Grid:
        """Return this grid in so many blocks that the sums of a row of windows take 768 MiB at most.

        Args:
            scores: Number of scores of a pixel.
        """
        total = 4 * (scores + 1) * self.shared_rows * self.width
        return replace(self, blocks=min(len(self.columns), max(1, -(-total // _SUM_BYTES))))

    @property
    def strip_count(self) -> int:
        """Number of strips."""
        return len(self.rows) * self.blocks

    @property
    def rows(self) -> Tuple[int, ...]:
        """First pixel rows of the windows."""
        return window_starts(self.height, self.window[0], self.overlap)

    @property
    def columns(self) -> Tuple[int, ...]:
        """First pixel columns of the windows."""
        return window_starts(self.width, self.window[1], self.overlap)

    @property
    def shared_rows(self) -> int:
        """Largest number of pixel rows that a row of windows shares with the next one."""
        rows = self.rows
        return max(
            (self.window[0] - (below - above) for above, below in zip(rows, rows[1:])), default=0
        )

    def columns_of(self, number: int) -> Tuple[int, ...]:
        """Return the first pixel columns of the windows to predict for a strip, in its own row.

        They include those of the next block that reach into the strip.
        """
        columns = self.columns
        if self.chosen_columns is not None:
            columns = self.chosen_columns[number % len(self.rows)]
        return columns if self.blocks == 1 else self._touching(number, columns)

    def strip(self, number: int) -> Tuple[int, int]:
        """Return the first pixel row of a strip, and the row after its last one."""
        rows = self.rows
        row = number % len(rows)
        return rows[row], rows[row + 1] if row + 1 < len(rows) else self.height

    def span(self, number: int) -> Tuple[int, int]:
        """Return the first pixel column of a strip, and the column after its last one."""
        columns, block = self.columns, number // len(self.rows)
        first, last = (len(columns) * each // self.blocks for each in (block, block + 1))
        return columns[first], columns[last] if block + 1 < self.blocks else self.width

    def reach(self, number: int) -> Tuple[int, int]:
        """Return the pixel columns of all windows that touch a strip, as :meth:`span`."""
        columns = self._touching(number, self.columns)
        return columns[0], min(columns[-1] + self.window[1], self.width)

    def _touching(self, number: int, columns: Tuple[int, ...]) -> Tuple[int, ...]:
        start, stop = self.span(number)
        return tuple(
            column for column in columns if column < stop and column + self.window[1] > start
        )

    def first_row(self, number: int) -> int:
        """Return the strip in whose row the first windows are that reach into a strip."""
        rows = self.rows
        block, row = divmod(number, len(rows))
        start = rows[row]
        first = next(index for index, row in enumerate(rows) if row + self.window[0] > start)
        return block * len(rows) + first

    def runs(self, strips: Iterable[int]) -> List[Tuple[int, int]]:
        """Return the first and the last strip of each run below each other, in order."""
        return consecutive_runs(strips, len(self.rows))


def consecutive_runs(numbers: Iterable[int], most: int) -> List[Tuple[int, int]]:
    """Return the first and the last number of each run of consecutive numbers, in order.

    A multiple of ``most`` begins a run.
    """
    bounds: List[Tuple[int, int]] = []
    for number in sorted(numbers):
        if bounds and bounds[-1][1] == number - 1 and number % most:
            bounds[-1] = (bounds[-1][0], number)
        else:
            bounds.append((number, number))
    return bounds
