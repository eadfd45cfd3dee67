"""Blend the vectors of overlapping windows into finished rows of an embedding.

`mapsage/maps/strips.py` reads, computes and blends, with windows of a `CellScene` that lie as an
`AlignedGrid` says. A `VectorBlender` hands out finished rows with unit length and 8 bits.

A cell is a vector of the embedding: a step of the encoder's stride, or a pixel. Shapes: C
components, W columns of the embedding in cells.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

import numpy as np

from mapsage.maps.blending import RowBlender
from mapsage.maps.inputs import Scene
from mapsage.maps.reading import Window
from mapsage.maps.windows import Grid, window_starts

from .errors import EmbeddingError
from .vectors import NO_DATA, quantize, to_unit


@dataclass(frozen=True)
class AlignedGrid(Grid):
    """Windows that begin at multiples of a step, so that all windows divide a scene alike.

    The last window may reach beyond the scene by less than a step.

    Attributes:
        step: Cells between two vectors of the encoder; 1 unless they are interpolated.
    """

    step: int = 1

    @property
    def rows(self) -> Tuple[int, ...]:
        """First rows of the windows; one entry for each strip."""
        return self._starts(self.height, self.window[0])

    @property
    def columns(self) -> Tuple[int, ...]:
        """First columns of the windows."""
        return self._starts(self.width, self.window[1])

    def _starts(self, length: int, window: int) -> Tuple[int, ...]:
        step = self.step
        starts = window_starts(-(-length // step), window // step, self.overlap // step)
        return tuple(start * step for start in starts)


class CellScene(Scene):
    """A scene whose windows are counted in cells and come with context around them.

    Args:
        scene: The scene.
        cell: Side of a cell in pixels.
        margin: Pixels of context on each side of a window; beyond the scene they are mirrored.
    """

    def __init__(self, scene: Scene, cell: int, margin: int) -> None:
        # Not of Scene's own arguments: the file is open.
        self._scene, self._cell, self._margin = scene, cell, margin
        self.raster, self.is_picture = scene.raster, scene.is_picture

    def read(self, column: int, row: int, window: Tuple[int, int]) -> Window:
        """Read a window.

        Args:
            column, row: First cell of the window.
            window: Height and width of the window in cells, without its context.

        Returns:
            Pixels with context, ``(bands, height, width)``; ``(h, w)`` bool, the cells inside the
            scene of whose pixels at least half have data; and lines about damaged blocks.
        """
        cell, margin = self._cell, self._margin
        first = row * cell - margin, column * cell - margin
        # What lies above and to the left of the scene.
        above, before = (max(0, -start) for start in first)
        sides = tuple(side * cell + 2 * margin for side in window)
        values, valid, damage = self._scene.read(
            first[1] + before, first[0] + above, (sides[0] - above, sides[1] - before)
        )
        if above or before:
            values = np.pad(values, ((0, 0), (above, 0), (before, 0)), mode='reflect')
        inner = valid[margin - above :, margin - before :]
        return values, _cells_with_data(inner[: window[0] * cell, : window[1] * cell], cell), damage


def _cells_with_data(valid: np.ndarray, cell: int) -> np.ndarray:
    """Return which cells have data, from their pixels inside the scene."""
    if cell == 1:
        return valid
    height, width = valid.shape
    starts = np.arange(0, height, cell), np.arange(0, width, cell)
    pixels = np.add.reduceat(np.add.reduceat(valid, starts[0], 0, dtype=np.int64), starts[1], 1)
    rows, columns = np.diff([*starts[0], height]), np.diff([*starts[1], width])
    return 2 * pixels >= np.outer(rows, columns)


class VectorBlender(RowBlender):
    """Sums the weighted vectors of windows, and hands out finished rows of unit vectors.

    Finished rows have the bytes of (C, rows, W) int8 vectors as probabilities, and as classes 1
    where there is data.
    """

    def _finish_box(self, count: int, columns: slice) -> None:
        box = np.s_[: self._rows, :count]
        weights = self._open.weights[box]
        known = self._open.valid[box] & (weights > 0)
        mean = self._open.scores[(slice(None), *box)] / np.where(known, weights, 1)
        if not np.isfinite(mean).all():
            raise EmbeddingError(
                'the encoder gave features that are not finite numbers: look at the '
                'checkpoint, at mean and std of its data_preprocessor, and at the values of '
                'the scene; float16 with --amp ends at 65,504.'
            )
        vectors = np.where(known, quantize(to_unit(mean)), np.int8(NO_DATA))
        assert self._finished.probabilities is not None
        self._finished.probabilities[:, :, columns] = vectors.view(np.uint8)
        self._finished.classes[:, columns] = known
