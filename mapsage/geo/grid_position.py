"""Position of a raster on a common grid of pixels, and reading it there.

`Mosaic` joins rasters of one kind on such a grid, stacks of scenes read several dates and sensors
on one. A pixel's value belongs to its center. In degrees, and in cylindrical projections, a place
has several x, one turn around the globe apart: 181 and -179 degrees are one longitude.
"""

from __future__ import annotations

import functools
import math
import threading
from typing import Callable, Optional, Tuple, TypeVar

import affine
import numpy as np
import pyproj
from rasterio.crs import CRS

from .coordinates import short_crs, to_map
from .errors import Box, GeoError, RasterBlockError
from .interpolation import between, interpolate, knots
from .raster import Raster
from .read_failures import BlockGrid
from .reference_systems import full_turn, next_to, same_crs

# Pixels by which a raster may lie off the common grid and still count as on the grid.
_ALIGNED = 0.05
# Points along each side of a raster's outline, because a straight side is curved in another CRS.
_OUTLINE = 21
# Pixels between positions that are projected; the positions between them are interpolated.
_STEP = 16
# Pixels by which interpolated positions may be wrong. Where a projection jumps, as at 180 degrees
# of longitude, or turns around a pole, they are further off, and every pixel is projected.
_SMOOTH = 0.5
# Side in pixels of the blocks in which damage is reported.
BLOCK = 512
# Column and row of positions that cannot be projected: outside every raster.
_NOWHERE = -1e12
_SEVERAL_TURNS = 'several turns of longitude'
_Pixels = TypeVar('_Pixels')


class RasterOnGrid:
    """A raster that is read in the pixels of a common grid.

    Pixels on the grid, to within a twentieth of a pixel, are read without change. Others are
    interpolated bilinearly between valid pixels (`interpolation.py`).

    Args:
        raster: The raster.
        box: Extent of the raster in pixels of the grid, see :func:`box_on_grid`.
        crs: CRS of the grid, or None.
        transform: Affine map from pixels of the grid to coordinates.
        size: Width and height of the grid. The box is extended if the raster lies in the grid at
            several turns of longitude, as a raster of the whole globe may.

    Attributes:
        raster: The raster.
        box: Extent of the raster: column, row, width and height in pixels of the grid.
        difference: How the raster's grid differs from the common grid, so that the raster is
            interpolated; empty if it does not differ.
    """

    def __init__(
        self,
        raster: Raster,
        box: Box,
        crs: Optional[CRS],
        transform: affine.Affine,
        size: Optional[Tuple[int, int]] = None,
    ) -> None:
        self.raster, self.box = raster, box
        self._crs, self._transform = crs, transform
        self.difference = ''
        period = _columns_of_turn(crs, transform)
        if period and size is not None:
            self.box = _with_other_turns(box, period, size[0])
        if not same_crs(raster.crs, crs):
            self.difference = 'no CRS' if raster.crs is None else short_crs(raster.crs)
            return
        # From pixels of the raster to pixels of the grid.
        to_grid = ~transform * raster.transform
        corners = to_map(to_grid, _corners(raster))
        center = corners[:, 0].mean()
        corners[:, 0] += next_to(center, box[0] + box[2] / 2, period) - center
        if self.box != box:
            self.difference = _SEVERAL_TURNS
            return
        shifted = _corners(raster) + np.rint(corners[0])
        if np.abs(corners - shifted).max() > _ALIGNED:
            self.difference = (
                'rotated'
                if not is_north_up(raster.transform)
                else 'shifted'
                if np.allclose(to_grid[:2] + to_grid[3:5], (1, 0, 0, 1), atol=1e-6)
                else 'pixels of another size'
            )

    @property
    def is_off_grid(self) -> bool:
        """Whether the raster's pixels are not those of the grid, at one turn of longitude."""
        return self.difference not in ('', _SEVERAL_TURNS)

    def read(
        self, box: Box, raster: Optional[Raster] = None, nearest: bool = False
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Read a box of the grid, which must lie inside the raster's ``box``.

        Args:
            box: Box of the grid.
            raster: Raster with the same pixels, such as a copy, which is read instead.
            nearest: Whether to take the nearest pixel, as masks and classes need, in place of an
                interpolation.

        Returns:
            Values (bands, height, width), 0 where invalid, and the valid pixels, bool (height,
            width).
        """
        raster = self.raster if raster is None else raster
        if not self.difference:
            return raster.read(box[0] - self.box[0], box[1] - self.box[1], *box[2:])
        sample = _nearest if nearest else interpolate
        columns, rows = self._positions(box)
        values, valid = sample(raster, columns, rows)
        # The raster may have a place at other turns of longitude as well.
        circle, to_pixels = full_turn(self.raster.crs), ~self.raster.transform
        for turn in (circle, -circle) if circle else ():
            if not valid.all():
                further, is_new = sample(
                    raster, columns + turn * to_pixels.a, rows + turn * to_pixels.d
                )
                is_new &= ~valid
                np.copyto(values, further, where=is_new)
                valid |= is_new
        return values, valid

    def _positions(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        """Return where the centers of the grid's pixels lie in the raster.

        Returns:
            Columns and rows in pixels of the raster, (height, width) each.
        """
        across, down = (
            knots(first, count, _STEP) for first, count in ((box[0], box[2]), (box[1], box[3]))
        )
        positions = self._project(across, down)
        if not same_crs(self._crs, self.raster.crs) and not self._is_smooth(
            positions, across, down
        ):
            across, down = (
                np.arange(count) + first + 0.5
                for first, count in ((box[0], box[2]), (box[1], box[3]))
            )
            positions = self._project(across, down)
            positions[~np.isfinite(positions)] = _NOWHERE
            return positions[:, :, 0], positions[:, :, 1]
        positions[~np.isfinite(positions)] = _NOWHERE
        columns, rows = (
            between(
                between(positions[:, :, axis], down, box[1], box[3]).T, across, box[0], box[2]
            ).T
            for axis in (0, 1)
        )
        return columns, rows

    def _project(self, across: np.ndarray, down: np.ndarray) -> np.ndarray:
        """Return columns and rows in the raster, (len(down), len(across), 2), of a lattice."""
        x, y = (axis.ravel() for axis in np.meshgrid(across, down))
        points = to_map(self._transform, np.stack([x, y], 1))
        points = _projection(self._crs, self.raster.crs)(points)
        return to_map(~self.raster.transform, points).reshape(len(down), len(across), 2)

    def _is_smooth(self, positions: np.ndarray, across: np.ndarray, down: np.ndarray) -> bool:
        """Return whether positions between those of a lattice can be interpolated."""
        if not np.isfinite(positions).any():
            return True
        for axis in (0, 1):
            if positions.shape[axis] > 1:
                positions = (
                    positions.take(range(1, positions.shape[axis]), axis)
                    + positions.take(range(positions.shape[axis] - 1), axis)
                ) / 2
        actual = self._project(
            *(axis if len(axis) == 1 else (axis[1:] + axis[:-1]) / 2 for axis in (across, down))
        )
        with np.errstate(invalid='ignore'):
            return bool((np.abs(actual - positions) <= _SMOOTH).all())


def _nearest(
    raster: Raster, columns: np.ndarray, rows: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """Return the values (bands, height, width) of the pixels at positions, and which are valid."""
    columns, rows = (np.floor(axis).astype(np.int64) for axis in (columns, rows))
    inside = (columns >= 0) & (rows >= 0) & (columns < raster.width) & (rows < raster.height)
    values = np.zeros((len(raster.bands), *columns.shape), raster.dtype)
    if not inside.any():
        return values, inside
    left, top = int(columns[inside].min()), int(rows[inside].min())
    pixels, valid = raster.read(
        left, top, int(columns[inside].max()) + 1 - left, int(rows[inside].max()) + 1 - top
    )
    nearest = rows[inside] - top, columns[inside] - left
    values[:, inside] = pixels[(slice(None), *nearest)]
    inside[inside] = valid[nearest]
    return values, inside


def read_on_grid(window: Box, width: int, height: int, read: Callable[[Box], _Pixels]) -> _Pixels:
    """Return what ``read`` returns for a window on a grid.

    Args:
        window: Window on the grid.
        width: Width of the grid in pixels.
        height: Height of the grid in pixels.
        read: Function that reads a box, and raises RasterBlockError if it is damaged.

    Raises:
        RasterBlockError: If pixels of the window cannot be decoded. The error lists the damaged
            blocks of the grid, squares of 512 pixels.
    """
    try:
        return read(window)
    except RasterBlockError as error:
        damaged = []
        inside = intersection(window, (0, 0, width, height)) or (0, 0, 0, 0)
        for box in BlockGrid(width, height, BLOCK, BLOCK).meeting(inside):
            try:
                read(box)
            except RasterBlockError:
                damaged.append(box)
        raise RasterBlockError(str(error), error.path, window, damaged, error.reason) from error


def intersection(a: Box, b: Box) -> Optional[Box]:
    """Return the common part of two boxes, or None."""
    left, top = max(a[0], b[0]), max(a[1], b[1])
    right = min(a[0] + a[2], b[0] + b[2])
    bottom = min(a[1] + a[3], b[1] + b[3])
    return (left, top, right - left, bottom - top) if right > left and bottom > top else None


def slices_in(box: Box, outer: Box) -> Tuple[slice, slice]:
    """Return the rows and columns of an array of ``outer`` that show a box inside it."""
    left, top = box[0] - outer[0], box[1] - outer[1]
    return np.s_[top : top + box[3], left : left + box[2]]


def is_north_up(transform: affine.Affine) -> bool:
    """Return whether rows lead east and columns south."""
    return transform.b == transform.d == 0 and transform.a > 0 > transform.e


def _corners(raster: Raster) -> np.ndarray:
    return np.array(
        [(0, 0), (raster.width, 0), (0, raster.height), (raster.width, raster.height)], np.float64
    )


def box_on_grid(
    raster: Raster,
    crs: Optional[CRS],
    transform: affine.Affine,
    size: Optional[Tuple[int, int]] = None,
    middle: Optional[float] = None,
) -> Box:
    """Return the extent of a raster in the pixels of a grid.

    Args:
        raster: The raster.
        crs: CRS of the grid, or None.
        transform: Affine map from pixels of the grid to coordinates.
        size: Width and height of the grid, if they are known. They are the result for a raster
            whose outline in the CRS of the grid says nothing: one of the whole globe, or with a
            pole in it.
        middle: Column of the grid. Of the turns of longitude at which the raster may lie, the one
            next to it counts; default: the middle of ``size``.

    Raises:
        GeoError: If the size is not known, and the CRS of the grid is not defined everywhere in
            the raster.
    """
    outline, obstacle = _outline_on_grid(raster, crs)
    if obstacle:
        if size is not None:
            return 0, 0, size[0], size[1]
        raise GeoError(
            f'{raster.path} ({short_crs(raster.crs)}) {obstacle} '
            f'{short_crs(crs)}, the CRS of the common grid; name a scene with another '
            f'CRS first.'
        )
    pixels = to_map(~transform, outline)
    middle = size[0] / 2 if middle is None and size is not None else middle
    period = _columns_of_turn(crs, transform)
    if middle is not None:
        center = (pixels[:, 0].min() + pixels[:, 0].max()) / 2
        pixels[:, 0] += next_to(center, middle, period) - center
    left, top = (int(side) for side in np.floor(pixels.min(0) + _ALIGNED))
    right, bottom = (int(side) for side in np.ceil(pixels.max(0) - _ALIGNED))
    return left, top, max(1, right - left), max(1, bottom - top)


def _outline_on_grid(raster: Raster, crs: Optional[CRS]) -> Tuple[np.ndarray, str]:
    """Return the outline of a raster in the CRS of a grid, (N, 2), and what speaks against it.

    The second value is empty, or words that stand between the raster and the CRS of the grid. The
    outline is continuous, also across 180 degrees of longitude.
    """
    share = np.linspace(0, 1, _OUTLINE)
    x = np.concatenate([share, share, np.zeros(_OUTLINE), np.ones(_OUTLINE)]) * raster.width
    y = np.concatenate([np.zeros(_OUTLINE), np.ones(_OUTLINE), share, share]) * raster.height
    source = to_map(raster.transform, np.stack([x, y], 1))
    if raster.crs is None or crs is None or same_crs(raster.crs, crs):
        return source, ''
    project = _projection(raster.crs, crs)
    outline, circle = project(source), full_turn(crs)
    if not np.isfinite(outline).all():
        return outline, 'reaches beyond what can be projected to'
    source_turn = full_turn(raster.crs)
    is_around = bool(source_turn) and np.ptp(source[:, 0]) > source_turn * (1 - 1e-6)
    if not circle:
        # Far from where a projection is meant for, its coordinates are finite, and wrong.
        back = _projection(crs, raster.crs)(outline) - source
        back[:, 0] = next_to(back[:, 0], 0, source_turn)
        off = to_map(~raster.transform, back) - to_map(~raster.transform, np.zeros((1, 2)))
        if is_around or not (np.abs(off) < 1).all():
            return outline, 'reaches beyond what can be projected to'
        return outline, ''
    if not source_turn and _has_pole(raster):
        return outline, 'contains a pole, which has no longitude in'
    center = project(to_map(raster.transform, np.array([[raster.width, raster.height]]) / 2))[0, 0]
    outline[:, 0] = next_to(outline[:, 0], center, circle)
    if is_around:
        # Both ends of the raster are the same place.
        outline[:2, 0] = center - circle / 2, center + circle / 2
    return outline, ''


def _has_pole(raster: Raster) -> bool:
    poles = _projection(CRS.from_epsg(4326), raster.crs)(np.array([[0.0, 90.0], [0.0, -90.0]]))
    columns, rows = to_map(~raster.transform, poles).T
    return bool(
        ((columns >= 0) & (columns <= raster.width) & (rows >= 0) & (rows <= raster.height)).any()
    )


def _columns_of_turn(crs: Optional[CRS], transform: affine.Affine) -> float:
    """Return the columns of a turn around the globe on a grid; 0 if the grid has no such number."""
    return abs(full_turn(crs) / transform.a) if transform.b == transform.d == 0 else 0.0


def _with_other_turns(box: Box, period: float, width: int) -> Box:
    """Return a box, extended to where the raster lies in a grid at other turns of longitude."""
    left, right = box[0], box[0] + box[2]
    for shift in (period, -period):
        first, end = box[0] + shift, box[0] + box[2] + shift
        if end > 0.5 and first < width - 0.5:
            left = min(left, max(0, math.floor(first + _ALIGNED)))
            right = max(right, min(width, math.ceil(end - _ALIGNED)))
    return left, box[1], right - left, box[3]


def _projection(source: Optional[CRS], target: Optional[CRS]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that projects points, (N, 2), from one CRS to another."""
    if source is None or target is None or same_crs(source, target):
        return lambda points: points
    transformer = _transformer(source.wkt, target.wkt, threading.get_ident())
    return lambda points: np.stack(transformer.transform(points[:, 0], points[:, 1]), 1)


@functools.lru_cache(maxsize=256)
def _transformer(source: str, target: str, thread: int) -> pyproj.Transformer:
    # `thread` is part of the cache key only: PROJ's context belongs to the thread that created it.
    return pyproj.Transformer.from_crs(source, target, always_xy=True)
