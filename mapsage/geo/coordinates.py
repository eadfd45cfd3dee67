"""Positions in pixels, in map coordinates and in another CRS.

A straight side of a window is curved in another CRS. So an outline has nodes between its corners,
and the nodes are reprojected.
"""
from __future__ import annotations

import affine
import numpy as np
import pyproj
import shapely
from rasterio.crs import CRS

from .raster import Raster

# Number of segments of each side of a window.
_STEPS = 8


def to_map(transform: affine.Affine, pixels: np.ndarray) -> np.ndarray:
    """Return the map coordinates, float64 (N, 2), of positions (column, row) in pixels, (N, 2)."""
    a, b, c, d, e, f = transform[:6]
    x, y = pixels[:, 0], pixels[:, 1]
    return np.stack([a * x + b * y + c, d * x + e * y + f], 1)


def short_crs(crs: CRS) -> str:
    """Return the name of a CRS, shortened for a message."""
    return str(crs.to_string())[:60]


def window_outline(raster: Raster, column: int, row: int, width: int, height: int
                   ) -> shapely.Polygon:
    """Return a window in pixels of a raster as a polygon in its CRS, with nodes on its sides."""
    along = np.linspace(0, 1, _STEPS, endpoint=False)
    zero, one = np.zeros(_STEPS), np.ones(_STEPS)
    x = np.concatenate([along, one, 1 - along, zero]) * width + column
    y = np.concatenate([zero, along, one, 1 - along]) * height + row
    return shapely.Polygon(to_map(raster.transform, np.stack([x, y], 1)))


def reprojected(polygon: shapely.Geometry, source: str, target: str) -> shapely.Geometry:
    """Return a polygon in another CRS.

    Args:
        polygon: Polygon in the CRS ``source``.
        source: CRS as WKT or by name (``EPSG:4326``).
        target: CRS of the result, as WKT or by name.
    """
    if source == target:
        return polygon
    transformer = pyproj.Transformer.from_crs(source, target, always_xy=True)
    return shapely.transform(polygon, lambda points: np.stack(
        transformer.transform(points[:, 0], points[:, 1]), 1))
