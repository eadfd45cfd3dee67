"""Predict strips of a scene: read windows, compute scores, blend them, hand out finished strips.

This is the inner loop of a prediction. One thread or several run the model, one or several read
windows ahead of it (`reading.py`), another blends scores behind it. A strip's pixels are the same
bits whichever other strips are predicted in the same call, so ranks may share a scene and a stopped
prediction may continue: a batch never spans two rows of windows, and scores are added in a fixed
order.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Callable, Generator, Iterable, Iterator, List, Optional

import numpy as np

from .background import WriteBehind, map_in_order, read_ahead
from .blending import RowBlender
from .inputs import Scene
from .map_model import Predictor, Scores
from .reading import Window, WindowReader
from .windows import Grid

_BATCHES_AHEAD = 2


@dataclass
class Strip:
    """Finished rows of a map.

    Attributes:
        number: Number of the strip in the grid.
        classes: ``(rows, width)`` uint8, 255 where there is no data.
        confidence: ``(rows, width)`` uint8 in percent, 255 where there is no data, or None.
        damage: Line for each window of the strip that could not be read completely.
        probabilities: ``(classes, rows, width)`` uint8 in steps of 0.004, 255 where there is no
            data, or None.
    """

    number: int
    classes: np.ndarray
    confidence: Optional[np.ndarray] = None
    damage: List[str] = field(default_factory=list)
    probabilities: Optional[np.ndarray] = None


@dataclass
class Waits:
    """Seconds that the model waited for windows to be read, and for rows to be written."""

    reading: float = 0.0
    writing: float = 0.0

    def describe(self, seconds: float) -> str:
        """Return each one's share of the prediction's seconds, and what makes the slowest faster."""
        shares = dict(
            reading=self.reading,
            model=max(0.0, seconds - self.reading - self.writing),
            writing=self.writing,
        )
        hint = dict(
            reading='tiled, uncompressed or local scenes are read faster',
            model='more devices share the windows, and a smaller --overlap leaves fewer',
            writing='--confidence and --probabilities take longest',
        )
        slowest = max(shares, key=lambda name: shares[name])
        text = ', '.join(f'{name} {100 * part / seconds:.0f} %' for name, part in shares.items())
        return f'{text} of the time: {hint[slowest]}'


@dataclass
class _Batch:
    """Windows of one row of windows. The last batch of a row may be empty.

    Attributes:
        row: Number of the row of windows.
        windows, columns, valid: Pixels, first columns and data masks of the windows with data.
        stacked: All windows as the predictor takes them; None without windows.
        damage: Lines about blocks that could not be read.
        passed: Number of windows read for this batch, including windows without data.
        ends_row: Whether this is the last batch of its row.
    """

    row: int
    windows: List[np.ndarray] = field(default_factory=list)
    columns: List[int] = field(default_factory=list)
    valid: List[np.ndarray] = field(default_factory=list)
    damage: List[str] = field(default_factory=list)
    passed: int = 0
    ends_row: bool = False
    stacked: Optional[Scores] = None


def predict_strips(
    scene: Scene,
    grid: Grid,
    strips: Iterable[int],
    predictor: Predictor,
    batch_size: int,
    confidence: bool,
    store: Callable[[Strip], None],
    advance: Callable[[int], None],
    probabilities: bool = False,
    most_readers: int = 1,
) -> Waits:
    """Predict some strips of a scene.

    For each run of consecutive strips, the rows of windows that reach into its first strip from
    above are computed too, but their own strips are not stored.

    Args:
        scene: The scene.
        grid: Windows of the scene.
        strips: Numbers of the strips to predict.
        predictor: The model, for windows of the grid's size.
        batch_size: Largest number of windows in a batch.
        confidence: Whether strips have a confidence plane.
        store: Function that receives each finished strip, in another thread.
        advance: Function that receives the number of windows that were done since the last call,
            including windows without data.
        probabilities: Whether strips have the probabilities of all classes.
        most_readers: Largest number of threads that may read the scene at the same time.

    Returns:
        How long the model waited for the other threads.
    """
    waits = Waits()
    reader = WindowReader(scene, most_readers)
    window = min(grid.window[0], grid.height), min(grid.window[1], grid.width)
    for first, last in grid.runs(strips):
        begin, end = grid.reach(first)
        blender = predictor.blender(
            window,
            end - begin,
            grid.shared_rows,
            confidence=confidence,
            probabilities=probabilities,
        )
        _predict_run(
            reader, grid, first, last, predictor, batch_size, blender, store, advance, waits
        )
    return waits


def count_windows(grid: Grid, strips: Iterable[int]) -> int:
    """Return the number of windows that :func:`predict_strips` reads for these strips."""
    return sum(
        len(grid.columns_of(row))
        for first, last in grid.runs(strips)
        for row in range(grid.first_row(first), last + 1)
    )


def _predict_run(
    reader: WindowReader,
    grid: Grid,
    first: int,
    last: int,
    predictor: Predictor,
    batch_size: int,
    blender: RowBlender,
    store: Callable[[Strip], None],
    advance: Callable[[int], None],
    waits: Waits,
) -> None:
    """Predict the consecutive strips ``first`` to ``last``."""
    damage: List[str] = []
    left = grid.reach(first)[0]
    span = slice(*(column - left for column in grid.span(first)))
    blender.begin(_rows_of(grid, grid.first_row(first)))

    def blend(batch: _Batch, scores: Any) -> None:
        for index, column in enumerate(batch.columns):
            blender.add(column - left, scores[index], predictor.weights, batch.valid[index])
        damage.extend(batch.damage)
        if batch.ends_row:
            rows = blender.take()
            if batch.row >= first:
                store(
                    Strip(
                        batch.row,
                        rows.classes[:, span],
                        None if rows.confidence is None else rows.confidence[:, span],
                        list(damage),
                        None if rows.probabilities is None else rows.probabilities[..., span],
                    )
                )
            damage.clear()
            if batch.row < last:
                blender.begin(_rows_of(grid, batch.row + 1))

    def compute(batch: _Batch) -> Optional[Scores]:
        return None if batch.stacked is None else predictor(batch.stacked)

    def stack(batches: Iterable[_Batch]) -> Generator[_Batch, None, None]:
        for batch in batches:
            if batch.windows:
                batch.stacked = predictor.stack(batch.windows)
                batch.windows.clear()
            yield batch

    batches = stack(_read_batches(reader, grid, grid.first_row(first), last, batch_size))
    # Closed from the last to the first, so no thread reads the scene after this block.
    with closing(batches), WriteBehind(blend, _BATCHES_AHEAD) as behind, closing(
        read_ahead(batches, _BATCHES_AHEAD)
    ) as ready, closing(
        map_in_order(compute, _watch(ready, reader, waits), predictor.parallel)
    ) as computed:
        for batch, scores in computed:
            asked = time.monotonic()
            behind.put(batch, scores)
            waits.writing += time.monotonic() - asked
            advance(batch.passed)


def _rows_of(grid: Grid, strip: int) -> int:
    """Return the number of pixel rows of a strip."""
    start, stop = grid.strip(strip)
    return stop - start


def _watch(batches: Iterator[_Batch], reader: WindowReader, waits: Waits) -> Iterator[_Batch]:
    """Yield batches, and tell the reader how long each kept the caller waiting."""
    end = time.monotonic()
    while True:
        asked = time.monotonic()
        batch = next(batches, None)
        if batch is None:
            return
        start, end = end, time.monotonic()
        waits.reading += end - asked
        reader.note_batch(end - asked, end - start)
        yield batch


def _read_batches(
    reader: WindowReader, grid: Grid, first: int, last: int, size: int
) -> Iterator[_Batch]:
    """Yield the windows of the rows of windows ``first`` to ``last`` in batches of one row each."""
    corners = (
        (column, grid.strip(row)[0])
        for row in range(first, last + 1)
        for column in grid.columns_of(row)
    )
    with closing(reader.read(corners, grid.window)) as windows:
        yield from _batches_of(windows, grid, first, last, size)


def _batches_of(
    windows: Iterator[Window], grid: Grid, first: int, last: int, size: int
) -> Iterator[_Batch]:
    for row in range(first, last + 1):
        batch = _Batch(row)
        for column in grid.columns_of(row):
            if len(batch.windows) == size:
                yield batch
                batch = _Batch(row)
            values, valid, damage = next(windows)
            batch.passed += 1
            batch.damage += damage
            if valid.any():
                batch.windows.append(values)
                batch.columns.append(column)
                batch.valid.append(valid)
        batch.ends_row = True
        yield batch
