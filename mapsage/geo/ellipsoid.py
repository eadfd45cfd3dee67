"""Areas on the ellipsoid of a coordinate reference system."""
from __future__ import annotations

import math
from typing import Any, Optional

import numpy as np
import pyproj

from .outlines import Rings, polygon_areas, ring_areas
from .raster import to_map

# A straight edge of a map is curved on the ellipsoid. With a point at least every 16 pixels an edge
# is off by less than a hundredth of a pixel for pixels of 1 km.
_STEP = 16


class EllipsoidArea:
    """Areas of regions of a map in square metres, on the ellipsoid of its CRS.

    The outlines are projected with an equal-area projection of the same ellipsoid: cylindrical for
    maps in degrees, where parallels stay straight, azimuthal about the map's centre for others.

    Args:
        crs: The map's, as WKT, or None.
        transform: The map's ``affine.Affine``.
        width: Of the map, in pixels.
        height: Of the map, in pixels.
    """

    def __init__(self, crs: Optional[str], transform: Any, width: int, height: int) -> None:
        self._transform = transform
        self._project: Optional[pyproj.Proj] = None
        system = pyproj.CRS.from_wkt(crs) if crs else None
        geodetic = system.geodetic_crs if system is not None else None
        if system is None or geodetic is None or geodetic.ellipsoid is None:
            return  # a map in pixels, or in the coordinates of a building site
        self._to_angles = pyproj.Transformer.from_crs(system, geodetic, always_xy=True)
        self._degrees = math.degrees(geodetic.axis_info[0].unit_conversion_factor)
        longitude, latitude = self._angles(np.array([[width / 2, height / 2]]))[0]
        ellipsoid = geodetic.ellipsoid
        self._project = pyproj.Proj(
            proj='cea' if system.is_geographic else 'laea', lon_0=longitude,
            lat_0=0 if system.is_geographic else latitude,
            a=ellipsoid.semi_major_metre, b=ellipsoid.semi_minor_metre)

    def of(self, rings: Rings) -> np.ndarray:
        """Return the area of each polygon, float64 (P,); NaN for a map without an ellipsoid."""
        if self._project is None:
            return np.full(rings.polygon[-1] + 1, np.nan)
        keep = rings.corner | (rings.points.sum(1) % _STEP == 0)
        angles = self._angles(rings.points[keep])
        metres = np.stack(self._project(angles[:, 0], angles[:, 1]), 1)
        return polygon_areas(ring_areas(metres, rings.ring[keep]), rings.polygon)

    def _angles(self, pixels: np.ndarray) -> np.ndarray:
        """Longitude and latitude in degrees, float64 (N, 2), of (column, row)."""
        x, y = to_map(self._transform, pixels).T
        return np.stack(self._to_angles.transform(x, y), 1) * self._degrees
