"""Windows of a map by how wrong they are: errors where there are labels, else uncertainty."""
from __future__ import annotations

import zlib
from contextlib import ExitStack
from itertools import groupby
from typing import Any, Callable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mapsage.geo import Raster

from .catalog import NO_DATA
from .errors import ViewError

ERROR, UNCERTAINTY, NOTHING = 'error', 'uncertainty', ''
_SIDE = 512  # pixels, of a map that says nothing of the windows it was made with


class RankedTile(NamedTuple):
    """A window of a map.

    Attributes:
        column: Left edge in pixels of the map.
        row: Upper edge in pixels.
        width: Width in pixels.
        height: Height in pixels.
        score: Share of the window that is wrong (``measure`` is ``'error'``), or its mean lack of
            confidence, 0 to 1; pixels without data or label count as right and sure.
        measure: What ``score`` is: ``'error'``, ``'uncertainty'`` or, with neither, ``''``.
        checksum: CRC-32 of its classes, which changes with the map.
    """

    column: int
    row: int
    width: int
    height: int
    score: float
    measure: str
    checksum: int


def windows_of(size: Tuple[int, int], window: Sequence[int] = (_SIDE, _SIDE),
               seen: Optional[Sequence[int]] = None) -> Iterator[Tuple[int, int, int, int]]:
    """Yield the windows of a map, those that ``tools/suggest_labels.py`` chooses from.

    They are as few as cover the map, spread evenly; neighbors may overlap.

    Args:
        size: Height and width of the map in pixels.
        window: Height and width of a window in the pixels that the model sees.
        seen: Height and width of the scene in these pixels; default: those of the map.

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


def rank(path: Any, confidence: Optional[Any], truth: Optional[Any],
         windows: Sequence[Tuple[int, int, int, int]],
         progress: Callable[[float], None] = lambda share: None) -> List[RankedTile]:
    """Return the windows of a map that hold data, with what they are ranked by.

    Args:
        path: Path of the class map.
        confidence: Path of its confidence, or None.
        truth: Path of labels on its grid, or None.
        windows: Column, row, width and height in pixels of each.
        progress: Function that is told which part is done.

    Raises:
        ViewError: If the files are not of one size.
        GeoError: If one cannot be opened.
        RasterBlockError: If one is damaged.
    """
    found: List[RankedTile] = []
    with ExitStack() as stack:
        rasters = [None if each is None else stack.enter_context(Raster(each))
                   for each in (path, confidence, truth)]
        target = rasters[0]
        assert target is not None
        for other in rasters[1:]:
            if other is not None and (other.width, other.height) != (target.width, target.height):
                raise ViewError(f'{other.path} has {other.width} x {other.height} pixels, the map '
                                f'{target.width} x {target.height}.')
        for (top, height), boxes in groupby(sorted(windows, key=_rows), _rows):
            found += _rank_rows(rasters, top, height, list(boxes))
            progress(min(1.0, (top + height) / target.height))
    return found


def order(tiles: Sequence[Tuple[int, RankedTile]]) -> List[Tuple[int, RankedTile]]:
    """Return windows with the numbers of their maps, the worst first.

    Errors are facts and come before uncertainty; windows with neither come last, in their order.
    """
    kinds = ERROR, UNCERTAINTY, NOTHING
    return sorted(tiles, key=lambda each: (
        kinds.index(each[1].measure), -each[1].score, each[0], each[1].row, each[1].column))


def _rank_rows(rasters: Sequence[Optional[Raster]], top: int, height: int,
               boxes: Sequence[Tuple[int, int, int, int]]) -> List[RankedTile]:
    """Return the windows of equal rows that hold data."""
    target, confidence, truth = rasters
    assert target is not None

    def read(raster: Raster) -> Tuple[np.ndarray, np.ndarray]:
        values, valid = raster.read(0, top, target.width, height)
        return values[0], valid

    values, known = read(target)
    classes = np.where(known, values, NO_DATA).astype(np.uint8)
    has_data = _TileSums(known)
    doubts = labeled = wrong = None
    if confidence is not None:
        percent, valid = read(confidence)
        doubts = _TileSums(np.where(valid & known, 100 - np.minimum(percent, 100), 0))
    if truth is not None:
        labels, valid = read(truth)
        labeled = _TileSums(valid & known)
        wrong = _TileSums(valid & known & (labels != classes))
    found = []
    for left, _, width, _ in boxes:
        columns, area = (left, left + width), width * height
        if not has_data.of(*columns):
            continue
        score, measure = 0.0, NOTHING
        if labeled is not None and wrong is not None and labeled.of(*columns):
            score, measure = wrong.of(*columns) / area, ERROR
        elif doubts is not None:
            score, measure = doubts.of(*columns) / 100 / area, UNCERTAINTY
        found.append(RankedTile(
            left, top, width, height, round(score, 4), measure,
            zlib.crc32(classes[:, left:left + width].tobytes())))
    return found


class _TileSums:
    """Sums of values (H, W) between columns."""

    def __init__(self, values: np.ndarray) -> None:
        self._left = np.concatenate([[0], np.cumsum(values.sum(0, dtype=np.int64))])

    def of(self, first: int, end: int) -> int:
        return int(self._left[end] - self._left[first])


def _starts(length: int, window: int) -> List[int]:
    last = max(0, length - window)
    gaps = max(1, -(-last // window))
    return sorted({number * last // gaps for number in range(gaps + 1)})


def _rows(box: Tuple[int, int, int, int]) -> Tuple[int, int]:
    return box[1], box[3]
