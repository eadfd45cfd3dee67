"""Windows of one size at regular steps: which of them have data, and which pixels of them count.

To find out which windows have data, scenes with gaps are read once at a low resolution, and
`shared_scan.py` caches the result. In tests every pixel counts in one window only.
"""

from __future__ import annotations

import bisect
from typing import Iterator, List, Optional, Tuple

import numpy as np

from mapsage.geo import Raster

from .shared_scan import scan_scenes

# Number of pixels examined in each direction of a window. If none is valid, the whole window is
# read.
_SAMPLES = 32


class WindowGrid:
    """A grid of windows over scenes of any size; the last window of a side ends with the scene.

    Args:
        window: Side of a window in pixels.
        stride: Step between two windows in pixels.
    """

    def __init__(self, window: int, stride: int) -> None:
        self._window, self._stride = window, stride

    def corners(self, scenes: List[Raster]) -> List[List[Tuple[int, int]]]:
        """Return (column, row) of each window with a valid pixel, for each scene.

        A scene that may have gaps is read once at a low resolution, by one rank of a machine.

        Raises:
            GeoError: If a scene cannot be read.
        """

        def scan(scene: Raster) -> np.ndarray:
            return np.array(list(self._scan(scene)), np.int32).reshape(-1, 2)

        scanned = iter(
            scan_scenes(
                [scene for scene in scenes if scene.may_have_gaps],
                ('windows', self._window, self._stride),
                scan,
            )
        )
        return [
            list(map(tuple, next(scanned).tolist()))
            if scene.may_have_gaps
            else list(self._scan(scene))
            for scene in scenes
        ]

    def share(self, start: int, size: int) -> Tuple[int, int]:
        """Return which pixels of a window along a side count, as (start, end), the end excluded.

        The overlap of two neighbors is divided in its middle.

        Args:
            start: First pixel of the window.
            size: Length of the side of the scene in pixels.
        """
        starts, window = self._starts(size), self._window
        number = bisect.bisect_left(starts, start)
        cuts = [
            (starts[i - 1] + window + starts[i]) // 2 - start
            for i in (number, number + 1)
            if 0 < i < len(starts)
        ]
        first = max(0, cuts[0]) if number > 0 else 0
        last = min(window, cuts[-1]) if number + 1 < len(starts) else window
        return first, last

    def _starts(self, size: int) -> List[int]:
        """Return the start of each window along a side."""
        starts = list(range(0, max(size - self._window, 0) + 1, self._stride))
        return starts if starts[-1] + self._window >= size else starts + [size - self._window]

    def _scan(self, scene: Raster) -> Iterator[Tuple[int, int]]:
        """Yield (column, row) of each window with a valid pixel."""
        factor = max(1, self._window // _SAMPLES)
        for row in self._starts(scene.height):
            # Row by row of windows, so that memory does not grow with the scene.
            valid: Optional[np.ndarray] = None
            if scene.may_have_gaps:
                rows = min(self._window, scene.height - row)
                valid = np.logical_or.reduce(scene.read_reduced(factor, row, rows)[1])
            for column in self._starts(scene.width):
                if (
                    valid is None
                    or valid[_reduced_window(column, self._window, scene.width, len(valid))].any()
                    or scene.read(column, row, self._window, self._window)[1].any()
                ):
                    yield column, row


def _reduced_window(start: int, window: int, size: int, cells: int) -> slice:
    """Return which pixels of a reduced side (``cells`` for ``size`` pixels) lie in a window."""
    return slice(-(-start * cells // size), (start + window) * cells // size)
