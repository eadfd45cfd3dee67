"""Windows at random positions in scenes, drawn by area or by the classes of their labels.

The labels of all scenes are counted once, in small square cells. Drawing then needs the table of
cells only. `GeoTiffDataset` draws with the random state of the sample, so the table must be the
same in all processes.

Shapes:
    cells of a scene   (N, 4) int32: row, column, class, number of pixels
    cells of all       (N, 5): number of the scene, then as above
"""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any, Callable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import cv2
import numpy as np
from mmengine.dist import get_dist_info
from mmengine.logging import print_log

from mapsage.accelerator import derived_seed
from mapsage.geo import GeoError, Raster

_KEYS = ('type', 'per_epoch', 'balance', 'redraw', 'seed')
# Cells along a window. A window contains the whole cell at which it is drawn.
_CELLS = 8
# Pixels examined along a cell to find out whether the scene has data there.
_SAMPLES = 4
# Side in pixels of the squares of labels that are counted at a time.
_TILE = 1024

Masks = Callable[[Raster, int, int, int, np.ndarray], np.ndarray]
"""Function of scene, column, row, side and valid pixels that returns a mask, uint8 (side, side)."""


class _Table(NamedTuple):
    """Cells to draw at: their rows in the table of cells, and the cumulative sum of pixels."""

    rows: np.ndarray
    ends: np.ndarray


class RandomWindows:
    """Windows at random positions in scenes, each around a pixel that has a label.

    A window is drawn in three steps:

    1. a class, by its share of the windows, or all classes together;
    2. a cell of the scenes, with a probability proportional to its pixels of that class;
    3. a position at which the window contains the cell and lies within the scene. All such
       positions are equally likely, so a class is not always in the middle of its windows.

    Args:
        config: Mapping ``windows`` of ``GeoTiffDataset``.
        window: Side of a window in pixels.
        classes: Names of the classes that masks refer to.
        ignore: Value of mask pixels without a label.

    Attributes:
        cell: Side of a cell in pixels.
        redraw: Whether each epoch has new windows.
        per_epoch: Number of windows in an epoch. Without a configured number it is 0 until
            ``finish``.

    Raises:
        GeoError: If a setting is unknown or out of its range.
    """

    def __init__(
        self, config: Mapping[str, Any], window: int, classes: Sequence[str], ignore: int
    ) -> None:
        _check(config, classes)
        self.redraw = bool(config.get('redraw', True))
        self.per_epoch: int = config.get('per_epoch') or 0
        self._balance, self._seed = config.get('balance'), int(config.get('seed', 0))
        self._window, self._classes, self._ignore = window, list(classes), ignore
        self.cell = max(1, window // _CELLS)
        # Digest of the scenes and their cells, for __repr__.
        self._digest = hashlib.blake2b(digest_size=8)
        self._shapes: List[Tuple[int, int]] = []
        self._counts: List[np.ndarray] = []
        self._tables: List[_Table] = []

    def count(self, scene: Raster, masks: Masks) -> np.ndarray:
        """Return the cells of a scene as ``count_cells`` does."""
        return count_cells(scene, masks, self.cell, self._ignore)

    def add(self, scene: Raster, cells: np.ndarray) -> None:
        """Add the next scene, with the cells that ``count`` returned for it."""
        self._counts.append(np.insert(cells, 0, len(self._shapes), 1))
        self._digest.update(
            f'{os.path.basename(scene.path)} {scene.bands} {_size(scene.path)} '
            f'{hashlib.blake2b(cells.tobytes()).hexdigest()}'.encode()
        )
        self._shapes.append((scene.height, scene.width))

    def finish(self) -> None:
        """Prepare to draw, once all scenes have been added, and log what will be drawn.

        Raises:
            GeoError: If no pixel has a label, or ``balance`` asks for a class without any.
        """
        cells, self._counts = np.concatenate(self._counts), []
        if not len(cells):
            raise GeoError(
                f'no pixel of {len(self._shapes)} scene(s) has data and a label, so '
                'there is no place for random windows; check the labels, the no-data '
                'values and split.'
            )
        self._cells, self._name = cells[:, :3], self._digest.hexdigest()
        # A digest cannot be pickled.
        del self._digest
        pixels = np.bincount(cells[:, 3], cells[:, 4], max(len(self._classes), 1)).astype(np.int64)
        if not self.per_epoch:
            self.per_epoch = max(1, round(int(pixels.sum()) / self._window**2))
        shares = self._shares(pixels)
        self._tables = [
            _build_table(np.flatnonzero(cells[:, 3] == number), cells)
            for number in np.flatnonzero(shares)
        ]
        # The last table, of all cells, is for windows drawn by area.
        self._tables.append(_build_table(np.arange(len(cells)), cells))
        self._ends = np.cumsum(shares[shares > 0])
        self._report(shares, pixels)

    def draw(self, random: Any) -> Tuple[int, int, int]:
        """Return the number of the scene, the column and the row of a window.

        Args:
            random: ``numpy.random``, whose state a loader seeds for each sample, or a
                ``RandomState``.
        """
        chosen = np.searchsorted(self._ends, random.random_sample(), 'right')
        rows, ends = self._tables[chosen]
        pixel = random.randint(0, ends[-1], dtype=np.int64)
        scene, row, column = self._cells[rows[np.searchsorted(ends, pixel, 'right')]]
        height, width = self._shapes[scene]
        return (
            int(scene),
            self._start(int(column), width, random),
            self._start(int(row), height, random),
        )

    def draw_fixed(self, index: int) -> Tuple[int, int, int]:
        """Return scene, column and row of window ``index``, the same in every epoch."""
        return self.draw(np.random.RandomState(derived_seed(self._seed, index)))

    def cover(self, number: int, step: int, shape: Tuple[int, ...]) -> np.ndarray:
        """Return which squares of ``step`` pixels in scene ``number`` have labels.

        Returns:
            bool array of ``shape``, a value for each square.
        """
        height, width = self._shapes[number]
        labeled = np.zeros((-(-height // self.cell), -(-width // self.cell)), bool)
        _, row, column = self._cells[self._cells[:, 0] == number].T
        labeled[row, column] = True
        middles = [
            np.minimum(np.arange(count) * step + step // 2, side - 1) // self.cell
            for count, side in zip(shape, (height, width))
        ]
        return labeled[middles[0]][:, middles[1]]

    def __repr__(self) -> str:
        # The text identifies cached samples, so it must be the same in every process.
        return (
            f'RandomWindows({self._window}, {self._balance}, {self.redraw}, {self._seed}, '
            f'{self._name})'
        )

    def __deepcopy__(self, memo: object) -> RandomWindows:
        # The object does not change after `finish`, and a copy of a sample must not copy its
        # tables.
        return self

    def _start(self, cell: int, size: int, random: Any) -> int:
        """Draw the first pixel of a window along a side of ``size``, so that it contains a cell."""
        begin, end = cell * self.cell, min((cell + 1) * self.cell, size)
        first = max(end - self._window, 0)
        last = max(min(begin, size - self._window), first)
        return int(random.randint(first, last + 1))

    def _shares(self, pixels: np.ndarray) -> np.ndarray:
        """Return the share of windows that are drawn at a pixel of each class."""
        shares = np.zeros(len(pixels))
        if self._balance is None:
            return shares
        if self._balance == 'classes':
            missing = [name for name, count in zip(self._classes, pixels) if not count]
            if missing and not get_dist_info()[0]:
                print_log(
                    f'no pixel is labeled {", ".join(map(repr, missing))}: random windows '
                    'are balanced among the other classes.',
                    logger='current',
                    level=logging.WARNING,
                )
            shares[pixels > 0] = 1 / (pixels > 0).sum()
            return shares
        for name, share in self._balance.items():
            number = self._classes.index(name)
            if not pixels[number]:
                raise GeoError(
                    f'windows has balance={dict(self._balance)!r}, and no pixel is '
                    f'labeled {name!r}; leave the class out, or check the labels'
                    ' (and split).'
                )
            shares[number] = share
        return shares

    def _report(self, shares: np.ndarray, pixels: np.ndarray) -> None:
        if get_dist_info()[0]:
            return
        text = f'windows: {self.per_epoch:,} an epoch, at random places'
        if shares.any():
            total = pixels.sum()
            text += ', drawn at pixels of ' + ', '.join(
                f'{self._classes[n]} {100 * shares[n]:.3g} % ({100 * pixels[n] / total:.3g} % of '
                'the area)'
                for n in np.flatnonzero(shares)
            )
            rest = 1 - float(shares.sum())
            text += f', and {100 * rest:.3g} % by area' * (rest > 1e-9)
        print_log(text, logger='current')


def count_cells(scene: Raster, masks: Masks, cell: int, ignore: int) -> np.ndarray:
    """Return how many pixels of each class the cells of a scene have.

    Args:
        scene: Scene, which is read at a lower resolution to find pixels without data.
        masks: Function that returns the mask of a square of the scene.
        cell: Side of a cell in pixels.
        ignore: Value of mask pixels that are not counted.

    Returns:
        int32 (N, 4): row and column of a cell, class, number of pixels of that class. Cells without
        a pixel of a class have no entry for it.
    """
    side = cell * max(1, _TILE // cell)
    factor = max(1, cell // _SAMPLES)
    entries = [np.zeros((0, 4), np.int32)]
    for row in range(0, scene.height, side):
        rows = min(side, scene.height - row)
        reduced: Optional[np.ndarray] = None
        if scene.may_have_gaps:
            reduced = scene.read_reduced(factor, row, rows)[1]
            reduced = reduced[np.arange(rows) * len(reduced) // rows]
        for column in range(0, scene.width, side):
            columns = min(side, scene.width - column)
            valid = np.zeros((side, side), bool)
            valid[:rows, :columns] = (
                True
                if reduced is None
                else reduced[
                    :, np.arange(column, column + columns) * reduced.shape[1] // scene.width
                ]
            )
            if valid.any():
                mask = masks(scene, column, row, side, valid)
                entries += [
                    np.column_stack(
                        (cells + (row // cell, column // cell), np.full(len(cells), number), counts)
                    ).astype(np.int32)
                    for number, cells, counts in _count_mask(mask, cell, ignore)
                ]
    return np.concatenate(entries)


def _count_mask(
    mask: np.ndarray, cell: int, ignore: int
) -> Iterator[Tuple[int, np.ndarray, np.ndarray]]:
    """Yield each class of a mask, its cells as (row, column), and its pixels in them."""
    side = len(mask) // cell
    # Along a column of a cell 255 pixels fit into uint8, whose sums NumPy adds 16 at a time.
    narrow = np.uint8 if cell < 256 else np.int32
    # Python's integers: NumPy converts a whole mask to compare it with an integer of 64 bits.
    for number in np.flatnonzero(cv2.calcHist([mask], [0], None, [256], [0, 256])).tolist():
        if number != ignore:
            is_class = (mask == number).view(np.uint8).reshape(side, cell, len(mask))
            columns = is_class.sum(1, dtype=narrow).reshape(side, side, cell)
            counts = columns.sum(2, dtype=np.int32)
            cells = np.argwhere(counts)
            yield number, cells, counts[tuple(cells.T)]


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else -1


def _build_table(rows: np.ndarray, cells: np.ndarray) -> _Table:
    return _Table(rows, np.cumsum(cells[rows, 4], dtype=np.int64))


def _check(config: Mapping[str, Any], classes: Sequence[str]) -> None:
    """Raise an error if a setting of ``windows`` is unknown or out of its range."""

    def refuse(name: str, expected: str) -> GeoError:
        return GeoError(f'windows has {name}={config.get(name)!r}, expected {expected}.')

    unknown = sorted(set(config) - set(_KEYS))
    if unknown:
        raise GeoError(f'windows has no setting {", ".join(unknown)}; it has {", ".join(_KEYS)}.')
    if config.get('type') != 'random':
        raise refuse('type', "'random'; leave windows out for a grid")
    count = config.get('per_epoch')
    if count is not None and (not isinstance(count, int) or count < 1):
        raise refuse('per_epoch', 'the number of windows in an epoch, at least 1')
    seed = config.get('seed', 0)
    if not isinstance(seed, int) or seed < 0:
        raise refuse('seed', 'an integer, at least 0')
    balance = config.get('balance')
    if isinstance(balance, Mapping):
        wrong = [name for name in balance if name not in classes]
        shares = list(balance.values())
        if (
            wrong
            or not all(isinstance(s, (int, float)) and 0 < s <= 1 for s in shares)
            or not 0 < sum(shares) <= 1 + 1e-9
        ):
            raise refuse(
                'balance',
                f'the share of windows of some of the classes {list(classes)}, '
                'each more than 0, together at most 1; the rest is drawn by '
                'area',
            )
    elif balance not in (None, 'classes'):
        raise refuse('balance', "None, 'classes' or dict(CLASS=SHARE)")
