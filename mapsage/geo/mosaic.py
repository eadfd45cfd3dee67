"""Several scenes of one area as one raster, on a common grid of pixels."""
from __future__ import annotations

import functools
import math
import threading
from collections import OrderedDict
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import affine
import numpy as np
import pyproj

from .interpolation import between, interpolate, knots
from .pool import most_open
from .raster import Box, GeoError, Raster, RasterBlockError, short_crs, to_map

_ALIGNED = 0.05  # pixels that a scene may lie off the common grid and is still read as it is
_OUTLINE = 21  # points along each side of a scene, since a straight side is curved in another CRS
_STEP = 16  # pixels between places that are projected; those between them are interpolated
_SPARSEST = 0.005  # share of a mosaic that its scenes cover, or they do not belong together
_NOWHERE = -1e6  # column and row of what cannot be projected: outside every scene
_BLOCK = 512  # side in pixels of the blocks in which damage is told


class Mosaic(Raster):
    """Scenes that lie beside or over each other, read as one raster.

    The grid of pixels is that of the first scene that is not rotated, extended to all scenes. Where
    none is north up, it is a grid north up in the CRS of the first, with its size of pixels. Scenes
    on this grid, within a twentieth of a pixel, are read as they are. The others (rotated, in
    another CRS, of another size of pixels or shifted by part of one) are interpolated bilinearly
    between their valid pixels. A pixel has data if its center lies in a valid pixel of any scene;
    where scenes overlap, the first one with data there counts.

    It is used like a ``Raster``; memory does not grow with the number of scenes.

    Args:
        paths: Paths of files that GDAL reads, the most important first.
        bands: Band numbers of each scene, as in ``Raster``.

    Attributes:
        resampled: For each scene that is interpolated its path and why.

    Raises:
        GeoError: If a scene cannot be opened or has no georeference, if some have a CRS and others
            have none, if their bands or data types differ, or they lie so far apart that nearly all
            of the mosaic would be empty.
    """

    def __init__(self, paths: Sequence[Any], bands: Optional[Sequence[int]] = None) -> None:
        rasters = [Raster(path, bands) for path in paths]
        first = rasters[0]
        for each in rasters:
            _check_alike(each, first)
        self.path = f'the mosaic of {len(rasters)} scene(s)'
        self.bands, self.dtype, self.descriptions = first.bands, first.dtype, first.descriptions
        self.nodata, self.may_have_gaps = None, True
        self.is_remote = any(each.is_remote for each in rasters)
        self.is_georeferenced, self.blocks = first.crs is not None, (_BLOCK, _BLOCK)
        base = next((each for each in rasters if _is_north_up(each.transform)), None)
        self._of = first.path if base is None else base.path
        self.crs = (base or first).crs
        transform = _north_up(first.transform) if base is None else base.transform
        boxes = [_box_on(each, self.crs, transform) for each in rasters]
        left, top = (min(box[side] for box in boxes) for side in (0, 1))
        self.width = max(box[0] + box[2] for box in boxes) - left
        self.height = max(box[1] + box[3] for box in boxes) - top
        self.transform = transform * affine.Affine.translation(left, top)
        covered = sum(each.width * each.height for each in rasters)
        if covered < _SPARSEST * self.width * self.height:
            raise GeoError(f'a mosaic of these {len(rasters)} scenes has {self.width:,} x '
                           f'{self.height:,} pixels, nearly all of them empty: the scenes lie far '
                           f'apart. Make one mosaic of each group of neighbors.')
        self._members = [_Member(each, (x - left, y - top, width, height), self.crs, self.transform)
                         for each, (x, y, width, height) in zip(rasters, boxes)]
        self.resampled = [(each.raster.path, each.why) for each in self._members if each.why]
        self._recent: OrderedDict = OrderedDict()  # numbers of the scenes with open files

    def describe(self) -> str:
        """Return one line on size, grid, and which scenes are interpolated."""
        grid = 'pixels' if self.crs is None else short_crs(self.crs)
        named = ', '.join(f'{path} ({why})' for path, why in self.resampled[:4])
        more = f' and {len(self.resampled) - 4} more' * (len(self.resampled) > 4)
        return (f'{self.path}: {self.width}x{self.height} pixels on the grid of {self._of} ({grid})'
                + f'; interpolated onto it: {named}{more}' * bool(named))

    def read(self, column: int, row: int, width: int, height: int
             ) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window, as ``Raster.read`` does.

        Raises:
            RasterBlockError: If part of the window cannot be decoded in the scene that counts
                there. Its blocks are those of the mosaic, squares of 512 pixels.
        """
        box = column, row, width, height
        try:
            return self._compose(box)
        except RasterBlockError as error:
            raise RasterBlockError(str(error), error.path, box, self._damaged_blocks(box),
                                   error.reason) from error

    def read_reduced(self, factor: int, row: int = 0, height: Optional[int] = None
                     ) -> Tuple[np.ndarray, np.ndarray]:
        """Read every ``factor``-th pixel, of the rows from ``row`` on, as ``Raster`` does."""
        height = self.height - row if height is None else height
        strips = [self.read(0, first, self.width, 1) for first in range(row, row + height, factor)]
        return (np.concatenate([values[:, :, ::factor] for values, _ in strips], 1),
                np.concatenate([valid[:, ::factor] for _, valid in strips]))

    def facts(self) -> Dict[str, Any]:
        """Return where the scenes lie and what makes pixels invalid, as values of JSON."""
        members = [member.raster.facts() for member in self._members]
        return {name: [facts[name] for facts in members] for name in members[0]}

    def files(self) -> List[str]:
        """Return the paths of all files that the pixels come from."""
        return [path for member in self._members for path in member.raster.files()]

    def close(self) -> None:
        """Close the files of all scenes in this process; a later read opens them again."""
        for member in self._members:
            member.raster.close()

    def __getstate__(self) -> Any:
        return dict(self.__dict__, _recent=OrderedDict())

    def _compose(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        values = np.zeros((len(self.bands), box[3], box[2]), self.dtype)
        valid = np.zeros((box[3], box[2]), bool)
        for number, member in enumerate(self._members):
            shared = _intersection(box, member.box)
            if shared is None:
                continue
            left, top = shared[0] - box[0], shared[1] - box[1]
            part = np.s_[top:top + shared[3], left:left + shared[2]]
            if valid[part].all():
                continue
            more, is_more = member.read(shared)
            self._keep_few_open(number)
            np.logical_and(is_more, ~valid[part], out=is_more)
            np.copyto(values[(slice(None), *part)], more, where=is_more)
            valid[part] |= is_more
        return values, valid

    def _keep_few_open(self, number: int) -> None:
        self._recent[number] = None
        self._recent.move_to_end(number)
        while len(self._recent) > most_open():
            self._members[self._recent.popitem(last=False)[0]].raster.close()

    def _damaged_blocks(self, window: Box) -> List[Box]:
        column, row, width, height = window
        damaged = []
        for top in range(max(row, 0) // _BLOCK * _BLOCK, min(row + height, self.height), _BLOCK):
            for left in range(max(column, 0) // _BLOCK * _BLOCK,
                              min(column + width, self.width), _BLOCK):
                box = left, top, min(_BLOCK, self.width - left), min(_BLOCK, self.height - top)
                try:
                    self._compose(box)
                except RasterBlockError:
                    damaged.append(box)
        return damaged


class _Member:
    """A scene of a mosaic, with its place there.

    Attributes:
        raster: The scene.
        box: Its part of the mosaic: column, row, width and height in the mosaic's pixels.
        why: Why it is interpolated; empty if it is read as it is.
    """

    def __init__(self, raster: Raster, box: Box, crs: Any, transform: affine.Affine) -> None:
        self.raster, self.box = raster, box
        self._crs, self._transform = crs, transform
        self.why = ''
        if raster.crs != crs:
            self.why = short_crs(raster.crs)
            return
        onto = ~transform * raster.transform  # from its pixels to those of the mosaic
        corners = to_map(onto, _corners(raster))
        moved = _corners(raster) + np.rint(corners[0])
        if np.abs(corners - moved).max() > _ALIGNED:
            self.why = ('rotated' if not _is_north_up(raster.transform) else 'shifted'
                        if np.allclose(onto[:2] + onto[3:5], (1, 0, 0, 1), atol=1e-6)
                        else 'pixels of another size')

    def read(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        """Read a box of the mosaic that lies in that of the scene."""
        if not self.why:
            return self.raster.read(box[0] - self.box[0], box[1] - self.box[1], *box[2:])
        return interpolate(self.raster, *self._places(box))

    def _places(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        """Return the columns and rows of the scene, each (height, width), at pixels' centers."""
        across, down = (knots(first, count, _STEP) for first, count in (
            (box[0], box[2]), (box[1], box[3])))
        x, y = (each.ravel() for each in np.meshgrid(across, down))
        points = to_map(self._transform, np.stack([x, y], 1))
        points = _projection(self._crs, self.raster.crs)(points)
        places = to_map(~self.raster.transform, points).reshape(len(down), len(across), 2)
        places[~np.isfinite(places)] = _NOWHERE
        columns, rows = (
            between(between(places[:, :, axis], down, box[1], box[3]).T, across, box[0],
                    box[2]).T for axis in (0, 1))
        return columns, rows


def _check_alike(raster: Raster, first: Raster) -> None:
    if raster.transform == affine.identity:
        raise GeoError(f'{raster.path} {raster.georeference_gap}, so that nobody knows where '
                       f'in the mosaic it lies; georeference it, or leave it out.')
    if (raster.crs is None) != (first.crs is None):
        without, other = (raster, first) if raster.crs is None else (first, raster)
        raise GeoError(f'{without.path} has no CRS and {other.path} has '
                       f'{short_crs(other.crs)}; set it with gdal_edit.py -a_srs.')
    if (len(raster.bands), raster.dtype) != (len(first.bands), first.dtype):
        raise GeoError(f'{raster.path} has {len(raster.bands)} band(s) of {raster.dtype}, and '
                       f'{first.path} {len(first.bands)} of {first.dtype}; the scenes of a mosaic '
                       f'need the same. Choose bands, or convert with gdal_translate -ot.')


def _is_north_up(transform: affine.Affine) -> bool:
    """Return whether rows lead east and columns south."""
    return transform.b == transform.d == 0 and transform.a > 0 > transform.e


def _north_up(transform: affine.Affine) -> affine.Affine:
    side = math.sqrt(abs(transform.determinant))
    return affine.Affine(side, 0, transform.c, 0, -side, transform.f)


def _corners(raster: Raster) -> np.ndarray:
    return np.array([(0, 0), (raster.width, 0), (0, raster.height),
                     (raster.width, raster.height)], np.float64)


def _box_on(raster: Raster, crs: Any, transform: affine.Affine) -> Box:
    """Return the box of a raster in the pixels of a grid."""
    share = np.linspace(0, 1, _OUTLINE)
    x = np.concatenate([share, share, np.zeros(_OUTLINE), np.ones(_OUTLINE)]) * raster.width
    y = np.concatenate([np.zeros(_OUTLINE), np.ones(_OUTLINE), share, share]) * raster.height
    outline = _projection(raster.crs, crs)(to_map(raster.transform, np.stack([x, y], 1)))
    if not np.isfinite(outline).all():
        raise GeoError(f'{raster.path} ({short_crs(raster.crs)}) reaches beyond where '
                       f'{short_crs(crs)}, the CRS of the mosaic, is defined; name a scene with '
                       f'another CRS first.')
    pixels = to_map(~transform, outline)
    left, top = (int(side) for side in np.floor(pixels.min(0) + _ALIGNED))
    right, bottom = (int(side) for side in np.ceil(pixels.max(0) - _ALIGNED))
    return left, top, max(1, right - left), max(1, bottom - top)


def _intersection(one: Box, other: Box) -> Optional[Box]:
    left, top = max(one[0], other[0]), max(one[1], other[1])
    right = min(one[0] + one[2], other[0] + other[2])
    bottom = min(one[1] + one[3], other[1] + other[3])
    return (left, top, right - left, bottom - top) if right > left and bottom > top else None


def _projection(source: Any, target: Any) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that projects points, (N, 2), from one CRS to another."""
    if source == target:
        return lambda points: points
    transformer = _transformer(source.to_wkt(), target.to_wkt(), threading.get_ident())
    return lambda points: np.stack(transformer.transform(points[:, 0], points[:, 1]), 1)


@functools.lru_cache(maxsize=256)
def _transformer(source: str, target: str, thread: int) -> pyproj.Transformer:
    # Threads do not share one: PROJ's context belongs to the thread that made it.
    return pyproj.Transformer.from_crs(source, target, always_xy=True)
