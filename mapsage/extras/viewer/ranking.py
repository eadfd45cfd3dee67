"""Ranks windows of a map: by their share of wrong pixels with labels, else by uncertainty.

A window without labels has a score from the map's confidence; both kinds of scores are in one list,
errors first (:func:`order`). `review.py` shows the worst windows to the user.
"""

from __future__ import annotations

import zlib
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from typing import Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from mapsage.geo import Raster

from .catalog import NO_DATA
from .errors import ViewError

ERROR, UNCERTAINTY, NOTHING = 'error', 'uncertainty', ''
# Side in pixels of the windows of a map whose report does not name its prediction windows.
_SIDE = 512


class RankedTile(NamedTuple):
    """A window of a map.

    Attributes:
        column: Left edge in pixels of the map.
        row: Upper edge in pixels.
        width: Width in pixels.
        height: Height in pixels.
        score: Share of the window's pixels that are wrong (``measure`` is ``'error'``), or mean of
            1 - confidence, 0 to 1. Pixels without data or label count as right and certain.
        measure: Meaning of ``score``: ``'error'``, ``'uncertainty'``, or ``''`` without either.
        checksum: CRC-32 of the window's classes, which changes with the map.
    """

    column: int
    row: int
    width: int
    height: int
    score: float
    measure: str
    checksum: int


def windows_of(
    size: Tuple[int, int],
    window: Sequence[int] = (_SIDE, _SIDE),
    seen: Optional[Sequence[int]] = None,
) -> Iterator[Tuple[int, int, int, int]]:
    """Yield the windows of a map, the same ones that ``tools/suggest_labels.py`` chooses from.

    The smallest number of windows that covers the map, evenly spaced; neighbors may overlap.

    Args:
        size: Height and width of the map in pixels.
        window: Height and width of a window in the pixels that the model sees.
        seen: Height and width of the scene in the pixels that the model sees; default: ``size``.

    Yields:
        Column, row, width and height in pixels of the map.
    """
    seen = seen or size
    down, across = size[0] / seen[0], size[1] / seen[1]
    for row in _starts(seen[0], window[0]):
        for column in _starts(seen[1], window[1]):
            left, top = round(column * across), round(row * down)
            right = min(size[1], round((column + window[1]) * across))
            bottom = min(size[0], round((row + window[0]) * down))
            yield left, top, max(1, right - left), max(1, bottom - top)


def rank(
    path: Union[str, Path],
    confidence: Union[None, str, Path],
    truth: Union[None, str, Path],
    windows: Sequence[Tuple[int, int, int, int]],
    progress: Callable[[float], None] = lambda share: None,
) -> List[RankedTile]:
    """Return the windows of a map that have data, with their scores.

    Args:
        path: Path of the class map.
        confidence: Path of the map's confidence, or None.
        truth: Path of labels on the map's grid, or None.
        windows: (column, row, width, height) of the windows in pixels.
        progress: Function that is called with the share of the work that is done, 0 to 1.

    Raises:
        ViewError: If the files differ in size.
        GeoError: If a file cannot be opened.
        RasterBlockError: If a file is damaged.
    """
    tiles: List[RankedTile] = []
    with ExitStack() as stack:
        rasters = [
            None if file is None else stack.enter_context(Raster(file))
            for file in (path, confidence, truth)
        ]
        target = rasters[0]
        assert target is not None
        for raster in rasters[1:]:
            if raster is not None and (raster.width, raster.height) != (
                target.width,
                target.height,
            ):
                raise ViewError(
                    f'{raster.path} has {raster.width} x {raster.height} pixels, the '
                    f'map {target.width} x {target.height}.'
                )
        for (top, height), boxes in groupby(sorted(windows, key=_rows), _rows):
            tiles += _rank_rows(rasters, top, height, list(boxes))
            progress(min(1.0, (top + height) / target.height))
    return tiles


def order(tiles: Sequence[Tuple[int, RankedTile]]) -> List[Tuple[int, RankedTile]]:
    """Return (number of the map, window) sorted, the worst first.

    Errors are facts and come before uncertainty; windows with neither come last, in their order.
    """
    measures = ERROR, UNCERTAINTY, NOTHING

    def key(numbered: Tuple[int, RankedTile]) -> Tuple[int, float, int, int, int]:
        number, tile = numbered
        return measures.index(tile.measure), -tile.score, number, tile.row, tile.column

    return sorted(tiles, key=key)


def _rank_rows(
    rasters: Sequence[Optional[Raster]],
    top: int,
    height: int,
    boxes: Sequence[Tuple[int, int, int, int]],
) -> List[RankedTile]:
    """Return the windows with data among ``boxes``, which have the same rows of the map."""
    target, confidence, truth = rasters
    assert target is not None

    def read(raster: Raster) -> Tuple[np.ndarray, np.ndarray]:
        values, valid = raster.read(0, top, target.width, height)
        return values[0], valid

    values, known = read(target)
    classes = np.where(known, values, NO_DATA).astype(np.uint8)
    has_data = _ColumnSums(known)
    doubts = labeled = wrong = None
    if confidence is not None:
        percent, valid = read(confidence)
        doubts = _ColumnSums(np.where(valid & known, 100 - np.minimum(percent, 100), 0))
    if truth is not None:
        labels, valid = read(truth)
        labeled = _ColumnSums(valid & known)
        wrong = _ColumnSums(valid & known & (labels != classes))
    tiles = []
    for left, _, width, _ in boxes:
        columns, area = (left, left + width), width * height
        if not has_data.between(*columns):
            continue
        score, measure = 0.0, NOTHING
        if labeled is not None and wrong is not None and labeled.between(*columns):
            score, measure = wrong.between(*columns) / area, ERROR
        elif doubts is not None:
            score, measure = doubts.between(*columns) / 100 / area, UNCERTAINTY
        tiles.append(
            RankedTile(
                left,
                top,
                width,
                height,
                round(score, 4),
                measure,
                zlib.crc32(classes[:, left : left + width].tobytes()),
            )
        )
    return tiles


class _ColumnSums:
    """Sums of values (H, W) over ranges of columns."""

    def __init__(self, values: np.ndarray) -> None:
        self._left = np.concatenate([[0], np.cumsum(values.sum(0, dtype=np.int64))])

    def between(self, first: int, end: int) -> int:
        """Return the sum over the columns ``first`` to ``end - 1``."""
        return int(self._left[end] - self._left[first])


def _starts(length: int, window: int) -> List[int]:
    """Return the evenly spaced first pixels of the windows along one side of a map."""
    last = max(0, length - window)
    gaps = max(1, -(-last // window))
    return sorted({number * last // gaps for number in range(gaps + 1)})


def _rows(box: Tuple[int, int, int, int]) -> Tuple[int, int]:
    return box[1], box[3]
