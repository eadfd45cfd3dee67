"""Windows at random places of scenes, drawn by area or by the classes of their labels."""
from __future__ import annotations

import hashlib
import logging
import os
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence, Tuple

import numpy as np
from mmengine.dist import get_dist_info
from mmengine.logging import print_log

from mapsage.accelerator import derived_seed
from mapsage.geo import GeoError, Raster

_KEYS = ('type', 'per_epoch', 'balance', 'redraw', 'seed')
_CELLS = 8  # cells along a window; a window holds the whole cell that it is drawn at
_LOOKS = 4  # pixels examined along a cell for whether the scene has data there
_TILE = 1024  # pixels along a square of labels that is counted at a time

Masks = Callable[[Raster, int, int, int, np.ndarray], np.ndarray]
"""Function of scene, column, row, side and valid pixels that returns a mask, uint8 (side, side)."""


class _Table(NamedTuple):
    """Cells to draw at: which rows of ``cells``, and the pixels in them and all before."""

    rows: np.ndarray
    ends: np.ndarray


class RandomWindows:
    """Windows at random places of scenes, each around a pixel that has a label.

    A window is drawn in three steps: a class, by its share of the windows, or none in particular; a
    cell of the scenes, by its number of pixels of that class; and a place of the window, such that
    it holds the cell and lies within the scene. All places that satisfy this are equally likely,
    so that a class is not always in the middle of its windows.

    Args:
        config: Mapping ``windows`` of ``GeoTiffDataset``.
        window: Side of a window in pixels.
        classes: Names of the classes that masks refer to.
        ignore: Value of mask pixels without a label.

    Attributes:
        cell: Side of a cell in pixels.
        redraw: Whether each epoch has new windows.
        per_epoch: Number of windows in an epoch; known after ``settle`` at the latest.

    Raises:
        GeoError: If a setting is unknown or out of its range.
    """

    def __init__(self, config: Mapping[str, Any], window: int, classes: Sequence[str],
                 ignore: int) -> None:
        _check(config, classes)
        self.redraw = bool(config.get('redraw', True))
        self.per_epoch: int = config.get('per_epoch') or 0
        self._balance, self._seed = config.get('balance'), int(config.get('seed', 0))
        self._window, self._classes, self._ignore = window, list(classes), ignore
        self.cell = max(1, window // _CELLS)
        self._digest = hashlib.blake2b(digest_size=8)  # of the scenes and what is in them
        self._shapes: List[Tuple[int, int]] = []
        self._found: List[np.ndarray] = []
        self._tables: List[_Table] = []

    def count(self, scene: Raster, masks: Masks) -> np.ndarray:
        """Return the cells of a scene as ``count_cells`` does."""
        return count_cells(scene, masks, self.cell, self._ignore)

    def add(self, scene: Raster, cells: np.ndarray) -> None:
        """Take the next scene with its cells, as from ``count``."""
        self._found.append(np.insert(cells, 0, len(self._shapes), 1))
        self._digest.update(f'{os.path.basename(scene.path)} {scene.bands} {_size(scene.path)} '
                            f'{hashlib.blake2b(cells.tobytes()).hexdigest()}'.encode())
        self._shapes.append((scene.height, scene.width))

    def settle(self) -> None:
        """Prepare to draw, once all scenes have been added, and say in the log what is drawn.

        Raises:
            GeoError: If no pixel has a label, or ``balance`` asks for a class without any.
        """
        found, self._found = np.concatenate(self._found), []
        if not len(found):
            raise GeoError(f'no pixel of {len(self._shapes)} scene(s) has data and a label, so '
                           'there is no place for random windows; check the labels, the no-data '
                           'values and split.')
        self._cells, self._name = found[:, :3], self._digest.hexdigest()
        del self._digest  # cannot be pickled
        pixels = np.bincount(found[:, 3], found[:, 4], max(len(self._classes), 1)).astype(np.int64)
        if not self.per_epoch:
            self.per_epoch = max(1, round(int(pixels.sum()) / self._window ** 2))
        shares = self._shares(pixels)
        self._tables = [_table(np.flatnonzero(found[:, 3] == number), found)
                        for number in np.flatnonzero(shares)]
        self._tables.append(_table(np.arange(len(found)), found))
        self._ends = np.cumsum(shares[shares > 0])
        self._report(shares, pixels)

    def draw(self, random: Any) -> Tuple[int, int, int]:
        """Return scene, column and row of a window.

        Args:
            random: ``numpy.random``, whose state a loader seeds for each sample, or a
                ``RandomState``.
        """
        chosen = np.searchsorted(self._ends, random.random_sample(), 'right')
        rows, ends = self._tables[chosen]
        pixel = random.randint(0, ends[-1], dtype=np.int64)
        scene, row, column = self._cells[rows[np.searchsorted(ends, pixel, 'right')]]
        height, width = self._shapes[scene]
        return (int(scene), self._start(int(column), width, random),
                self._start(int(row), height, random))

    def place(self, index: int) -> Tuple[int, int, int]:
        """Return scene, column and row of window ``index`` of an epoch like all others."""
        return self.draw(np.random.RandomState(derived_seed(self._seed, index)))

    def cover(self, number: int, step: int, shape: Tuple[int, ...]) -> np.ndarray:
        """Return where scene ``number`` has labels, bool ``shape``, in squares of ``step``."""
        height, width = self._shapes[number]
        labeled = np.zeros((-(-height // self.cell), -(-width // self.cell)), bool)
        _, row, column = self._cells[self._cells[:, 0] == number].T
        labeled[row, column] = True
        middles = [np.minimum(np.arange(count) * step + step // 2, side - 1) // self.cell
                   for count, side in zip(shape, (height, width))]
        return labeled[middles[0]][:, middles[1]]

    def __repr__(self) -> str:  # the same in every process: it identifies cached samples
        return (f'RandomWindows({self._window}, {self._balance}, {self.redraw}, {self._seed}, '
                f'{self._name})')

    def __deepcopy__(self, memo: Any) -> RandomWindows:
        return self  # it never changes, and a copied sample must not copy its tables

    def _start(self, cell: int, size: int, random: Any) -> int:
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
                print_log(f'no pixel is labeled {", ".join(map(repr, missing))}: random windows '
                          'are balanced among the other classes.', logger='current',
                          level=logging.WARNING)
            shares[pixels > 0] = 1 / (pixels > 0).sum()
            return shares
        for name, share in self._balance.items():
            number = self._classes.index(name)
            if not pixels[number]:
                raise GeoError(f'windows has balance={dict(self._balance)!r}, and no pixel is '
                               f'labeled {name!r}; leave the class out, or check the labels'
                               ' (and split).')
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
                'the area)' for n in np.flatnonzero(shares))
            rest = 1 - float(shares.sum())
            text += f', and {100 * rest:.3g} % by area' * (rest > 1e-9)
        print_log(text, logger='current')


def count_cells(scene: Raster, masks: Masks, cell: int, ignore: int) -> np.ndarray:
    """Return how many pixels of each class the cells of a scene have.

    Args:
        scene: Scene, which is read at a lower resolution to find places without data.
        masks: Function that returns the mask of a square of the scene.
        cell: Side of a cell in pixels.
        ignore: Value of mask pixels that are not counted.

    Returns:
        int32 (N, 4): row and column of a cell, class, number of pixels, for all that have any.
    """
    side = cell * max(1, _TILE // cell)
    factor = max(1, cell // _LOOKS)
    found = [np.zeros((0, 4), np.int32)]
    for row in range(0, scene.height, side):
        rows = min(side, scene.height - row)
        seen: Optional[np.ndarray] = None
        if scene.may_have_gaps:
            seen = scene.read_reduced(factor, row, rows)[1]
            seen = seen[np.arange(rows) * len(seen) // rows]
        for column in range(0, scene.width, side):
            columns = min(side, scene.width - column)
            valid = np.zeros((side, side), bool)
            valid[:rows, :columns] = True if seen is None else seen[
                :, np.arange(column, column + columns) * seen.shape[1] // scene.width]
            if valid.any():
                mask = masks(scene, column, row, side, valid)
                found += [np.column_stack((cells + (row // cell, column // cell), np.full(
                    len(cells), number), counts)).astype(np.int32)
                    for number, cells, counts in _counts(mask, cell, ignore)]
    return np.concatenate(found)


def _counts(mask: np.ndarray, cell: int, ignore: int) -> Any:
    """Yield each class of a mask, its cells as (row, column), and its pixels in them."""
    side = len(mask) // cell
    for number in np.flatnonzero(np.bincount(mask.ravel(), minlength=256)):
        if number != ignore:
            here = (mask == number).reshape(side, cell, side, cell)
            counts = here.sum(3, dtype=np.int32).sum(1)
            cells = np.argwhere(counts)
            yield int(number), cells, counts[tuple(cells.T)]


def _size(path: str) -> int:
    return os.path.getsize(path) if os.path.isfile(path) else -1


def _table(rows: np.ndarray, found: np.ndarray) -> _Table:
    return _Table(rows, np.cumsum(found[rows, 4], dtype=np.int64))


def _check(config: Mapping[str, Any], classes: Sequence[str]) -> None:
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
        if wrong or not all(isinstance(s, (int, float)) and 0 < s <= 1 for s in shares) \
                or not 0 < sum(shares) <= 1 + 1e-9:
            raise refuse('balance', f'the share of windows of some of the classes {list(classes)}, '
                                    'each more than 0, together at most 1; the rest is drawn by '
                                    'area')
    elif balance not in (None, 'classes'):
        raise refuse('balance', "None, 'classes' or dict(CLASS=SHARE)")
