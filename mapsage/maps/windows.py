"""Where the windows of a scene lie, and how much each of their pixels counts. Pure."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List, Optional, Sequence, Tuple

import numpy as np


def window_starts(length: int, window: int, overlap: int) -> Tuple[int, ...]:
    """Return where the windows along an axis begin, in pixels.

    There are as few as possible, spread evenly: neighbors share ``overlap`` pixels or more, and the
    last one ends with the axis. Where the axis is not longer than a window, there is one at 0.

    Args:
        length: Length of the axis in pixels.
        window: Length of a window in pixels.
        overlap: Least number of pixels that neighbors share.

    Raises:
        ValueError: If a length is not positive or the overlap not in 0 .. window - 1.
    """
    if length < 1 or window < 1:
        raise ValueError(f'length={length} and window={window}, expected 1 pixel or more of each.')
    if not 0 <= overlap < window:
        raise ValueError(f'overlap={overlap} does not fit window={window}: expected 0 to '
                         f'{window - 1} pixels.')
    last = length - window
    if last <= 0:
        return (0,)
    gaps = -(-last // (window - overlap))
    return tuple(number * last // gaps for number in range(gaps + 1))


def blend_weights(window: int, overlap: int) -> np.ndarray:
    """Return how much the pixels of a window count along one axis.

    Squared sines rise over ``overlap`` pixels from either edge: the weights of two neighbors that
    share just these pixels sum to one. They are positive, so that a pixel in only one window,
    as at the border of a scene, takes that window's answer whole once it is divided by their sum.

    Args:
        window: Length of a window in pixels.
        overlap: Number of pixels over which the weight rises.

    Returns:
        ``(window,)`` float32 in (0, 1].
    """
    weights = np.ones(window)
    if overlap:
        rise = np.sin(np.pi / 2 * (np.arange(overlap) + 0.5) / overlap)**2
        weights[:overlap] = rise
        weights[window - overlap:] *= rise[::-1]
    return weights.astype(np.float32)


@dataclass(frozen=True)
class Grid:
    """The windows of a scene, in rows of windows.

    A strip is the rows of pixels that are finished once a row of windows is: from its first pixel
    row to that of the next row of windows, the last to the end of the scene.

    Attributes:
        height, width: Size of the scene in pixels.
        window: Height and width of a window in pixels.
        overlap: Least number of pixels that neighbors share.
        rows, columns: First pixels of the windows.
        kept: First columns of the windows that are predicted, for each row of windows; None for
            all.
    """

    height: int
    width: int
    window: Tuple[int, int]
    overlap: int
    kept: Optional[Tuple[Tuple[int, ...], ...]] = None

    @property
    def rows(self) -> Tuple[int, ...]:
        """First pixel rows of the windows; one entry a strip."""
        return window_starts(self.height, self.window[0], self.overlap)

    @property
    def columns(self) -> Tuple[int, ...]:
        """First pixel columns of the windows."""
        return window_starts(self.width, self.window[1], self.overlap)

    def columns_of(self, row: int) -> Tuple[int, ...]:
        """Return the first columns of the windows of a row that are predicted."""
        return self.columns if self.kept is None else self.kept[row]

    def strip(self, number: int) -> Tuple[int, int]:
        """Return the first pixel row of a strip and the one behind its last."""
        rows = self.rows
        return rows[number], rows[number + 1] if number + 1 < len(rows) else self.height

    def first_row(self, number: int) -> int:
        """Return the first row of windows that reaches into a strip."""
        start = self.rows[number]
        return next(index for index, row in enumerate(self.rows) if row + self.window[0] > start)


def runs(strips: Iterable[int]) -> List[Tuple[int, int]]:
    """Return the first and last of each run of consecutive numbers, in order."""
    found: List[Tuple[int, int]] = []
    for number in sorted(strips):
        if found and found[-1][1] == number - 1:
            found[-1] = (found[-1][0], number)
        else:
            found.append((number, number))
    return found


def owners(costs: Sequence[int], world_size: int) -> List[int]:
    """Return the rank that does each task of a list, so that ranks have about equal work.

    The tasks of a rank follow each other in the list.

    Args:
        costs: Cost of each task, in any unit.
        world_size: Number of ranks.
    """
    total, before = sum(costs), 0
    found = []
    for cost in costs:
        # the share of the total cost that lies before the middle of the task chooses its rank
        found.append(min((2 * before + cost) * world_size // (2 * total), world_size - 1))
        before += cost
    return found
