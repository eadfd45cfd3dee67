"""Windows of rasters as polygons, in any CRS."""
from __future__ import annotations

from typing import Any

import numpy as np
import pyproj
import shapely

from .raster import Raster, to_map

_STEPS = 8  # pieces of each side of a window: it stays right in another CRS


def window_outline(raster: Raster, column: int, row: int, width: int, height: int) -> Any:
    """Return a window in pixels of a raster as a polygon in its CRS, with nodes on its sides."""
    along = np.linspace(0, 1, _STEPS, endpoint=False)
    zero, one = np.zeros(_STEPS), np.ones(_STEPS)
    x = np.concatenate([along, one, 1 - along, zero]) * width + column
    y = np.concatenate([zero, along, one, 1 - along]) * height + row
    return shapely.Polygon(to_map(raster.transform, np.stack([x, y], 1)))


def reprojected(polygon: Any, source: str, target: str) -> Any:
    """Return a polygon in another CRS, both given as WKT or by name (``EPSG:4326``)."""
    if source == target:
        return polygon
    move = pyproj.Transformer.from_crs(source, target, always_xy=True)
    return shapely.transform(polygon, lambda points: np.stack(
        move.transform(points[:, 0], points[:, 1]), 1))
