"""Values of a raster at places between its pixels."""
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
    at = np.arange(count) + first + 0.5
    after = np.clip(np.searchsorted(knots, at, 'right'), 1, len(knots) - 1)
    share = (at - knots[after - 1]) / (knots[after] - knots[after - 1])
    return values[after - 1] + share[:, None] * (values[after] - values[after - 1])


def interpolate(raster: Raster, columns: np.ndarray, rows: np.ndarray
                 ) -> Tuple[np.ndarray, np.ndarray]:
    """Return values (bands, height, width) at places of a raster, and which are valid.

    Bilinear between the centers of valid pixels; a place is valid if the pixel is that it lies in.
    """
    shape = (len(raster.bands), *columns.shape)
    left, top = (max(0, math.floor(each.min() - 0.5)) for each in (columns, rows))
    right = min(raster.width, math.floor(columns.max() - 0.5) + 2)
    bottom = min(raster.height, math.floor(rows.max() - 0.5) + 2)
    if right <= left or bottom <= top:
        return np.zeros(shape, raster.dtype), np.zeros(shape[1:], bool)
    values, valid = raster.read(left, top, right - left, bottom - top)
    x, y = columns - left, rows - top
    inside = (x >= 0) & (x < right - left) & (y >= 0) & (y < bottom - top)
    at_x, at_y = (np.clip(np.floor(each).astype(np.int64), 0, most - 1) for each, most in (
        (x, right - left), (y, bottom - top)))
    found = inside & valid[at_y, at_x]
    x0, y0 = np.floor(x - 0.5), np.floor(y - 0.5)
    share_x, share_y = x - 0.5 - x0, y - 0.5 - y0
    total, weights = np.zeros(shape), np.zeros(shape[1:])
    for dx, weight_x in ((0, 1 - share_x), (1, share_x)):
        for dy, weight_y in ((0, 1 - share_y), (1, share_y)):
            at = (np.clip(y0 + dy, 0, bottom - top - 1).astype(np.int64),
                  np.clip(x0 + dx, 0, right - left - 1).astype(np.int64))
            weight = weight_x * weight_y * valid[at]
            total += weight * values[(slice(None), *at)]
            weights += weight
    total /= np.where(found, np.maximum(weights, 1e-12), 1)
    if raster.dtype.kind != 'f':
        total = np.rint(total)
    return np.where(found, total, 0).astype(raster.dtype), found
