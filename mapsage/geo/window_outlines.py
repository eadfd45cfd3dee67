"""Windows of rasters as polygons, in any CRS.

The sides of an outline have nodes between the corners, because a straight side is curved in another
CRS. For suggestions of windows to label, and for the viewer.
"""
from __future__ import annotations

import numpy as np
import pyproj
import shapely

from .raster import Raster, to_map

# Number of segments of each side of a window.
_STEPS = 8


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
