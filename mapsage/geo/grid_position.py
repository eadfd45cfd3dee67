"""Position of a raster on a common grid of pixels, and reading it there.

`Mosaic` joins rasters of one kind on such a grid, stacks of scenes read several dates and sensors
on one. A pixel's value belongs to its center.
"""
from __future__ import annotations

import functools
import threading
from typing import Callable, List, Optional, Tuple, TypeVar

import affine
import numpy as np
import pyproj
from rasterio.crs import CRS

from .coordinates import short_crs, to_map
from .errors import Box, GeoError, RasterBlockError
from .interpolation import between, interpolate, knots
from .raster import Raster

# Pixels by which a raster may lie off the common grid and still count as on the grid.
_ALIGNED = 0.05
# Points along each side of a raster's outline, because a straight side is curved in another CRS.
_OUTLINE = 21
# Pixels between positions that are projected; the positions between them are interpolated.
_STEP = 16
# Side in pixels of the blocks in which damage is reported.
BLOCK = 512
# Column and row of positions that cannot be projected: outside every raster.
_NOWHERE = -1e6
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

    Attributes:
        raster: The raster.
        box: Extent of the raster: column, row, width and height in pixels of the grid.
        difference: How the raster's grid differs from the common grid, so that the raster is
            interpolated; empty if it does not differ.
    """

    def __init__(self, raster: Raster, box: Box, crs: Optional[CRS],
                 transform: affine.Affine) -> None:
        self.raster, self.box = raster, box
        self._crs, self._transform = crs, transform
        self.difference = ''
        if raster.crs != crs:
            self.difference = 'no CRS' if raster.crs is None else short_crs(raster.crs)
            return
        # From pixels of the raster to pixels of the grid.
        to_grid = ~transform * raster.transform
        corners = to_map(to_grid, _corners(raster))
        shifted = _corners(raster) + np.rint(corners[0])
        if np.abs(corners - shifted).max() > _ALIGNED:
            self.difference = (
                'rotated' if not is_north_up(raster.transform) else 'shifted'
                if np.allclose(to_grid[:2] + to_grid[3:5], (1, 0, 0, 1), atol=1e-6)
                else 'pixels of another size')

    def read(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        """Read a box of the grid, which must lie inside the raster's ``box``.

        Returns:
            Values (bands, height, width), 0 where invalid, and the valid pixels, bool (height,
            width).
        """
        return self.read_with(self.raster, box)

    def read_with(self, raster: Raster, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        """Read as :meth:`read` does from a raster with the same pixels, such as a copy."""
        if not self.difference:
            return raster.read(box[0] - self.box[0], box[1] - self.box[1], *box[2:])
        return interpolate(raster, *self._positions(box))

    def read_nearest(self, raster: Raster, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        """Read as :meth:`read_with` does, but take the nearest pixel, as masks and classes need."""
        if not self.difference:
            return self.read_with(raster, box)
        columns, rows = (np.floor(axis).astype(np.int64) for axis in self._positions(box))
        inside = (columns >= 0) & (rows >= 0) & (columns < raster.width) & (rows < raster.height)
        values = np.zeros((len(raster.bands), box[3], box[2]), raster.dtype)
        if not inside.any():
            return values, inside
        left, top = int(columns[inside].min()), int(rows[inside].min())
        pixels, valid = raster.read(left, top, int(columns[inside].max()) + 1 - left,
                                    int(rows[inside].max()) + 1 - top)
        nearest = rows[inside] - top, columns[inside] - left
        values[:, inside] = pixels[(slice(None), *nearest)]
        inside[inside] = valid[nearest]
        return values, inside

    def _positions(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        """Return where the centers of the grid's pixels lie in the raster.

        Returns:
            Columns and rows in pixels of the raster, (height, width) each.
        """
        across, down = (knots(first, count, _STEP) for first, count in (
            (box[0], box[2]), (box[1], box[3])))
        x, y = (axis.ravel() for axis in np.meshgrid(across, down))
        points = to_map(self._transform, np.stack([x, y], 1))
        points = _projection(self._crs, self.raster.crs)(points)
        positions = to_map(~self.raster.transform, points).reshape(len(down), len(across), 2)
        positions[~np.isfinite(positions)] = _NOWHERE
        columns, rows = (
            between(between(positions[:, :, axis], down, box[1], box[3]).T, across, box[0],
                    box[2]).T for axis in (0, 1))
        return columns, rows


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
        raise RasterBlockError(str(error), error.path, window,
                               _damaged_blocks(window, width, height, read),
                               error.reason) from error


def _damaged_blocks(window: Box, width: int, height: int, read: Callable[[Box], object]
                    ) -> List[Box]:
    column, row, columns, rows = window
    damaged = []
    for top in range(max(row, 0) // BLOCK * BLOCK, min(row + rows, height), BLOCK):
        for left in range(max(column, 0) // BLOCK * BLOCK, min(column + columns, width), BLOCK):
            box = left, top, min(BLOCK, width - left), min(BLOCK, height - top)
            try:
                read(box)
            except RasterBlockError:
                damaged.append(box)
    return damaged


def is_north_up(transform: affine.Affine) -> bool:
    """Return whether rows lead east and columns south."""
    return transform.b == transform.d == 0 and transform.a > 0 > transform.e


def _corners(raster: Raster) -> np.ndarray:
    return np.array([(0, 0), (raster.width, 0), (0, raster.height),
                     (raster.width, raster.height)], np.float64)


def box_on_grid(raster: Raster, crs: Optional[CRS], transform: affine.Affine) -> Box:
    """Return the extent of a raster in the pixels of a grid.

    Raises:
        GeoError: If the CRS of the grid is not defined everywhere in the raster.
    """
    share = np.linspace(0, 1, _OUTLINE)
    x = np.concatenate([share, share, np.zeros(_OUTLINE), np.ones(_OUTLINE)]) * raster.width
    y = np.concatenate([np.zeros(_OUTLINE), np.ones(_OUTLINE), share, share]) * raster.height
    outline = _projection(raster.crs, crs)(to_map(raster.transform, np.stack([x, y], 1)))
    if not np.isfinite(outline).all():
        raise GeoError(f'{raster.path} ({short_crs(raster.crs)}) reaches beyond where '
                       f'{short_crs(crs)}, the CRS of the common grid, is defined; name a '
                       f'scene with another CRS first.')
    pixels = to_map(~transform, outline)
    left, top = (int(side) for side in np.floor(pixels.min(0) + _ALIGNED))
    right, bottom = (int(side) for side in np.ceil(pixels.max(0) - _ALIGNED))
    return left, top, max(1, right - left), max(1, bottom - top)


def _projection(source: Optional[CRS], target: Optional[CRS]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the function that projects points, (N, 2), from one CRS to another."""
    if source is None or target is None or source == target:
        return lambda points: points
    transformer = _transformer(source.to_wkt(), target.to_wkt(), threading.get_ident())
    return lambda points: np.stack(transformer.transform(points[:, 0], points[:, 1]), 1)


@functools.lru_cache(maxsize=256)
def _transformer(source: str, target: str, thread: int) -> pyproj.Transformer:
    # `thread` is part of the cache key only: PROJ's context belongs to the thread that created it.
    return pyproj.Transformer.from_crs(source, target, always_xy=True)
