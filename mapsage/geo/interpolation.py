"""Values of a raster at positions between its pixels.

For scenes of a mosaic that do not lie on its grid (`mosaic.py`). A pixel's value belongs to its
center, so column 0.5 is the center of the first pixel.

Shapes:
    columns, rows    (height, width) positions in the raster, fractions allowed
    result           (bands, height, width) values, (height, width) bool
"""

from __future__ import annotations

import math
from typing import Tuple

import numpy as np

from .raster import Raster


def knots(first: int, count: int, step: int) -> np.ndarray:
    """Return the centers of every ``step``-th of ``count`` pixels along a side, and of the last."""
    return np.unique(np.append(np.arange(0, count, step), count - 1)) + first + 0.5


def between(values: np.ndarray, knots: np.ndarray, first: int, count: int) -> np.ndarray:
    """Interpolate along the first axis, from knots to all ``count`` centers of pixels."""
    if len(knots) == 1:
        return values
    centers = np.arange(count) + first + 0.5
    upper = np.clip(np.searchsorted(knots, centers, 'right'), 1, len(knots) - 1)
    share = (centers - knots[upper - 1]) / (knots[upper] - knots[upper - 1])
    return values[upper - 1] + share[:, None] * (values[upper] - values[upper - 1])


def interpolate(
    raster: Raster, columns: np.ndarray, rows: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """Return the values at positions in a raster, and which of them are valid.

    The values are interpolated bilinearly between the centers of valid pixels. A position is valid
    if the pixel that contains it is valid.

    Args:
        raster: Raster to read.
        columns: Columns of the positions, (height, width).
        rows: Rows of the positions, (height, width).

    Returns:
        Values (bands, height, width), 0 at invalid positions, and the valid positions, bool
        (height, width).
    """
    shape = (len(raster.bands), *columns.shape)
    inside = (columns >= 0) & (columns < raster.width) & (rows >= 0) & (rows < raster.height)
    if not inside.any():
        return np.zeros(shape, raster.dtype), inside
    x, y = (columns, rows) if inside.all() else (columns[inside], rows[inside])
    left, top = (max(0, math.floor(axis.min() - 0.5)) for axis in (x, y))
    right = min(raster.width, math.floor(x.max() - 0.5) + 2)
    bottom = min(raster.height, math.floor(y.max() - 0.5) + 2)
    values, valid = raster.read(left, top, right - left, bottom - top)
    x, y = columns - left, rows - top
    pixel_x, pixel_y = (
        np.clip(np.floor(axis).astype(np.int64), 0, size - 1)
        for axis, size in ((x, right - left), (y, bottom - top))
    )
    is_valid = inside & valid[pixel_y, pixel_x]
    x0, y0 = np.floor(x - 0.5), np.floor(y - 0.5)
    share_x, share_y = x - 0.5 - x0, y - 0.5 - y0
    total, weights = np.zeros(shape), np.zeros(shape[1:])
    for dx, weight_x in ((0, 1 - share_x), (1, share_x)):
        for dy, weight_y in ((0, 1 - share_y), (1, share_y)):
            corner = (
                np.clip(y0 + dy, 0, bottom - top - 1).astype(np.int64),
                np.clip(x0 + dx, 0, right - left - 1).astype(np.int64),
            )
            weight = weight_x * weight_y * valid[corner]
            total += weight * values[(slice(None), *corner)]
            weights += weight
    total /= np.where(is_valid, np.maximum(weights, 1e-12), 1)
    if raster.dtype.kind != 'f':
        total = np.rint(total)
    return np.where(is_valid, total, 0).astype(raster.dtype), is_valid
