"""Blend the vectors of overlapping windows into finished rows of an embedding.

`VectorBlender` sums weighted vectors of windows over the whole width, and hands out rows once no
later window reaches them, with unit length and 8 bits. `embed_strips` reads, computes and blends.
As in `mapsage/maps/strips.py`, a batch never spans two rows of windows and vectors are added in a
fixed order, so a strip is the same bits whichever other strips are computed in the same call.

A cell is a vector of the embedding: a step of the encoder's stride, or a pixel. Shapes: C
components, R rows of a window and W columns of the embedding in cells.
"""

from __future__ import annotations

import sys
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Callable, Generator, Iterable, List, Optional, Tuple

import numpy as np

from mapsage.maps.background import WriteBehind, map_in_order, read_ahead
from mapsage.maps.inputs import Scene
from mapsage.maps.map_model import Predictor
from mapsage.maps.reading import Window, WindowReader, most_readers
from mapsage.maps.strips import Strip
from mapsage.maps.windows import Grid, consecutive_runs, window_starts

from .errors import EmbeddingError
from .vectors import NO_DATA, quantize, to_unit

_BATCHES_AHEAD = 2


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


class CellScene:
    """A scene whose windows are counted in cells and come with context around them.

    Args:
        scene: The scene.
        cell: Side of a cell in pixels.
        margin: Pixels of context on each side of a window; beyond the scene they are mirrored.
    """

    def __init__(self, scene: Scene, cell: int, margin: int) -> None:
        self._scene, self._cell, self._margin = scene, cell, margin

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


class VectorBlender:
    """Sums the weighted vectors of windows, and hands out finished rows.

    It takes about 4 * C * R * W bytes.

    Args:
        dims: Number of components.
        grid: Windows, in cells.
    """

    def __init__(self, dims: int, grid: Grid) -> None:
        rows = min(grid.window[0], grid.height)
        self._sums = np.zeros((dims, rows, grid.width), np.float32)
        self._weights = np.zeros((rows, grid.width), np.float32)
        self._valid = np.zeros((rows, grid.width), bool)

    def add(self, column: int, vectors: np.ndarray, weights: np.ndarray, valid: np.ndarray) -> None:
        """Add a window of the current row of windows.

        Args:
            column: First column of the window.
            vectors: ``(C, h, w)`` float32, multiplied with ``weights``.
            weights: ``(h, w)`` float32.
            valid: ``(h, w)`` bool, the cells that have data; smaller than the window at the end of
                the scene.
        """
        height, width = valid.shape
        box = np.s_[:height, column : column + width]
        self._sums[(slice(None), *box)] += vectors[:, :height, :width]
        self._weights[box] += weights[:height, :width]
        self._valid[box] |= valid

    def take(self, rows: int) -> Tuple[np.ndarray, np.ndarray]:
        """Return the first ``rows`` rows, which no later row of windows reaches, and go on below.

        Returns:
            ``(C, rows, W)`` int8 vectors, and ``(rows, W)`` bool, where there is data.

        Raises:
            EmbeddingError: If a component is not a number.
        """
        finished = np.empty((len(self._sums), rows, self._sums.shape[2]), np.int8)
        known = self._valid[:rows] & (self._weights[:rows] > 0)
        for row in range(rows):
            mean = self._sums[:, row] / np.where(known[row], self._weights[row], 1)
            if not np.isfinite(mean).all():
                raise EmbeddingError(
                    'the encoder gave features that are not finite numbers: look at the '
                    'checkpoint, at mean and std of its data_preprocessor, and at the values of '
                    'the scene; float16 with --amp ends at 65,504.'
                )
            finished[:, row] = np.where(known[row], quantize(to_unit(mean)), np.int8(NO_DATA))
        remaining = self._sums.shape[1] - rows
        for sums in (self._sums, self._weights, self._valid):
            sums[..., :remaining, :] = sums[..., rows:, :]
            sums[..., remaining:, :] = 0
        return finished, known


class _Batch:
    """Windows with data of one row of windows.

    Attributes:
        columns, valid: First columns of the windows, and their cells with data.
        pixels: All windows as the encoder takes them; None without windows.
        damage: Lines about damaged blocks.
        passed: Number of windows read, including those without data.
        row: Number of the row of windows.
        ends_row: Whether this is the last batch of its row.
    """

    def __init__(self, row: int) -> None:
        self.row, self.passed, self.ends_row = row, 0, False
        self.columns: List[int] = []
        self.windows: List[np.ndarray] = []
        self.valid: List[np.ndarray] = []
        self.damage: List[str] = []
        self.pixels: Any = None


def embed_strips(
    scene: Scene,
    grid: Grid,
    cell: int,
    margin: int,
    strips: Iterable[int],
    encoder: Predictor,
    batch_size: int,
    store: Callable[[Strip], None],
    advance: Callable[[int], None],
) -> None:
    """Compute some strips of an embedding.

    Args:
        scene: The scene.
        grid: Windows in cells, without their context.
        cell, margin: As in :class:`CellScene`.
        strips: Numbers of the strips.
        encoder: Computes weighted vectors of windows.
        batch_size: Largest number of windows in a batch.
        store: Function that receives each finished strip, in another thread. Its probabilities are
            the bytes of the vectors, its classes 1 where there is data.
        advance: Function that receives the number of windows that were done since the last call.
    """

    def compute(batch: _Batch) -> Optional[np.ndarray]:
        return None if batch.pixels is None else encoder(batch.pixels)

    reader = WindowReader(CellScene(scene, cell, margin), most_readers(scene))
    for first, last in consecutive_runs(strips, sys.maxsize):
        blender, damage = VectorBlender(encoder.scores, grid), []
        batches = _read_batches(reader, grid, grid.first_row(first), last, encoder, batch_size)
        with closing(batches), WriteBehind(store, 1) as behind, closing(
            read_ahead(batches, _BATCHES_AHEAD)
        ) as ready, closing(map_in_order(compute, ready, encoder.parallel)) as computed:
            for batch, vectors in computed:
                for index, column in enumerate(batch.columns):
                    assert vectors is not None
                    blender.add(column, vectors[index], encoder.weights, batch.valid[index])
                damage += batch.damage
                if batch.ends_row:
                    start, stop = grid.strip(batch.row)
                    finished, known = blender.take(stop - start)
                    if batch.row >= first:
                        planes = finished.view(np.uint8)
                        behind.put(Strip(batch.row, known.astype(np.uint8), None, damage, planes))
                    damage = []
                advance(batch.passed)


def _read_batches(
    reader: WindowReader, grid: Grid, first: int, last: int, encoder: Predictor, size: int
) -> Generator[_Batch, None, None]:
    """Yield the rows of windows ``first`` to ``last`` in batches of one row each."""
    rows = range(first, last + 1)
    corners = ((column, grid.rows[row]) for row in rows for column in grid.columns_of(row))
    with closing(reader.read(corners, grid.window)) as windows:
        for row in rows:
            batch = _Batch(row)
            for column in grid.columns_of(row):
                if len(batch.windows) == size:
                    yield _stacked(batch, encoder)
                    batch = _Batch(row)
                pixels, valid, damage = next(windows)
                batch.passed += 1
                batch.damage += damage
                if valid.any():
                    batch.windows.append(pixels)
                    batch.columns.append(column)
                    batch.valid.append(valid)
            batch.ends_row = True
            yield _stacked(batch, encoder)


def _stacked(batch: _Batch, encoder: Predictor) -> _Batch:
    if batch.windows:
        batch.pixels = encoder.stack(batch.windows)
        batch.windows = []
    return batch
