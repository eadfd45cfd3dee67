"""Predict strips of a scene; one thread reads windows ahead, another blends scores."""
from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass, field
from typing import Callable, Iterable, Iterator, List, Optional, Protocol

import numpy as np

from .background import WriteBehind, read_ahead
from .blending import RowBlender
from .inputs import Scene
from .windows import Grid, runs

_BATCHES_AHEAD = 2


class Predictor(Protocol):
    """What gives the weighted scores of windows: a checkpoint's model, or an exported one.

    Attributes:
        scores: Number of scores of a pixel.
        threshold: Score from which on a model with one score means class 1.
        weights: ``(height, width)`` float32 factors of the scores.
    """

    scores: int
    threshold: float
    weights: np.ndarray

    def __call__(self, windows: np.ndarray) -> np.ndarray:
        """Return ``(batch, scores, height, width)`` float32 for ``(batch, bands, h, w)``."""


@dataclass
class Strip:
    """Finished rows of a map.

    Attributes:
        number: Number of the strip in the grid.
        classes: ``(rows, width)`` uint8, 255 where there is no data.
        confidence: ``(rows, width)`` uint8 in per cent, 255 where there is no data, or None.
        damage: Line for each of its windows that could not be read completely.
        probabilities: ``(classes, rows, width)`` uint8 in steps of 0.004, 255 where there is no
            data, or None.
    """

    number: int
    classes: np.ndarray
    confidence: Optional[np.ndarray] = None
    damage: List[str] = field(default_factory=list)
    probabilities: Optional[np.ndarray] = None


@dataclass
class _Batch:
    """Windows of one row of windows; the last batch of a row is marked and may be empty."""

    row: int
    windows: List[np.ndarray] = field(default_factory=list)
    columns: List[int] = field(default_factory=list)
    valid: List[np.ndarray] = field(default_factory=list)
    damage: List[str] = field(default_factory=list)
    passed: int = 0
    ends_row: bool = False


def predict_strips(scene: Scene, grid: Grid, strips: Iterable[int], predictor: Predictor,
                   batch_size: int, confidence: bool, keep: Callable[[Strip], None],
                   advance: Callable[[int], None], probabilities: bool = False) -> None:
    """Predict some strips of a scene.

    A strip's pixels do not depend on which other strips are predicted with it: a batch holds
    windows of one row, and each pixel's scores are added in the order of rows and columns. Rows of
    windows above the first strip of a run that reach into it are computed too; their own strips are
    not kept.

    Args:
        scene: The scene.
        grid: Windows of the scene.
        strips: Numbers of the strips to predict.
        predictor: The model, for windows of the grid's size.
        batch_size: Largest number of windows in a batch.
        confidence: Whether to compute the confidence, too.
        keep: Function that receives each strip, in another thread.
        advance: Function that receives how many more windows are done, those without data included.
        probabilities: Whether to keep the probabilities of all classes, too.
    """
    for first, last in runs(strips):
        blender = RowBlender(predictor.scores, min(grid.window[0], grid.height), grid.width,
                             predictor.threshold, confidence, probabilities)
        _predict_run(scene, grid, first, last, predictor, batch_size, blender, keep, advance)


def count_windows(grid: Grid, strips: Iterable[int]) -> int:
    """Return how many windows :func:`predict_strips` goes through."""
    return sum(len(grid.columns_of(row)) for first, last in runs(strips)
               for row in range(grid.first_row(first), last + 1))


def _predict_run(scene: Scene, grid: Grid, first: int, last: int, predictor: Predictor,
                 batch_size: int, blender: RowBlender, keep: Callable[[Strip], None],
                 advance: Callable[[int], None]) -> None:
    damage: List[str] = []

    def blend(batch: _Batch, scores: Optional[np.ndarray]) -> None:
        for index, column in enumerate(batch.columns):
            assert scores is not None
            blender.add(column, scores[index], predictor.weights, batch.valid[index])
        damage.extend(batch.damage)
        if batch.ends_row:
            start, stop = grid.strip(batch.row)
            rows = blender.take(stop - start)
            if batch.row >= first:
                keep(Strip(batch.row, rows.classes, rows.confidence, list(damage),
                           rows.probabilities))
            damage.clear()

    batches = _batches(scene, grid, grid.first_row(first), last, batch_size)
    with WriteBehind(blend, _BATCHES_AHEAD) as behind, \
            closing(read_ahead(batches, _BATCHES_AHEAD)) as ready:
        for batch in ready:
            scores = None
            if batch.windows:
                scores = predictor(np.stack(batch.windows))
            behind.put(batch, scores)
            advance(batch.passed)


def _batches(scene: Scene, grid: Grid, first: int, last: int, size: int) -> Iterator[_Batch]:
    for row in range(first, last + 1):
        batch = _Batch(row)
        for column in grid.columns_of(row):
            if len(batch.windows) == size:
                yield batch
                batch = _Batch(row)
            values, valid, damage = scene.read(column, grid.rows[row], grid.window)
            batch.passed += 1
            batch.damage += damage
            if valid.any():
                batch.windows.append(values)
                batch.columns.append(column)
                batch.valid.append(valid)
        batch.ends_row = True
        yield batch
