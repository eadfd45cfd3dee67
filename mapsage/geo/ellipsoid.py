"""Areas on the ellipsoid of a coordinate reference system.

An area measured in the map's own projection would be wrong in Mercator, for example. Areas here are
measured in an equal-area projection, whatever the map's projection is. Outlines come from
`outlines.py`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import List, Optional, Tuple

import affine
import numpy as np
import pyproj

from .coordinates import to_map
from .outlines import Rings, polygon_areas, ring_areas
from .raster import Raster

# A straight edge on the map is curved on the ellipsoid. With a point at least every 16 pixels, the
# error of an edge is below a hundredth of a pixel for pixels of 1 km.
_STEP = 16

# Deviation of a row from its parallel that still counts as straight: degrees of latitude, about a
# tenth of a millimeter.
_STRAIGHT = 1e-9

# Share by which the sides of a pixel may differ and still be called equal.
_SQUARE = 0.01


def pixel_side(raster: Raster) -> float:
    """Return the side in meters of a square as large as the pixel in the middle of a raster.

    The pixel is measured on the ellipsoid, whatever the projection is. NaN if the raster has no
    georeference.
    """
    geod, angles = _in_middle_pixel(raster, [[0, 0], [1, 0], [1, 1], [0, 1]])
    return math.nan if geod is None else math.sqrt(abs(geod.polygon_area_perimeter(*angles)[0]))


def pixel_sides(raster: Raster) -> Tuple[float, float]:
    """Return width and height in meters of the pixel in the middle of a raster, on the ellipsoid.

    They are the distances between the middles of opposite edges, along geodesics. If they differ by
    less than one percent, both are :func:`pixel_side`. NaN if the raster has no georeference.
    """
    side = pixel_side(raster)
    geod, angles = _in_middle_pixel(raster, [[0, 0.5], [0.5, 0], [1, 0.5], [0.5, 1]])
    if geod is None:
        return side, side
    width, height = geod.inv(*angles[:, :2], *angles[:, 2:])[2]
    return (side, side) if abs(width - height) < _SQUARE * side else (width, height)


def _in_middle_pixel(
    raster: Raster, positions: List[List[float]]
) -> Tuple[Optional[pyproj.Geod], np.ndarray]:
    """Return the ellipsoid, None without one, and longitudes and latitudes in degrees, (2, N)."""
    system = None
    if raster.crs is not None and raster.is_georeferenced:
        system = _read_system(raster.crs.to_wkt())
    if system is None:
        return None, np.empty((2, 0))
    to_angles, degrees, geod = system
    pixels = np.array(positions) + [raster.width // 2, raster.height // 2]
    return geod, np.array(to_angles.transform(*to_map(raster.transform, pixels).T)) * degrees


@lru_cache(maxsize=256)
def _read_system(crs: str) -> Optional[Tuple[pyproj.Transformer, float, pyproj.Geod]]:
    """Return how coordinates become angles, the degrees of their unit, and the ellipsoid."""
    system = pyproj.CRS.from_wkt(crs)
    geodetic = system.geodetic_crs
    # A map in pixels, or in local coordinates, has no ellipsoid.
    if geodetic is None or geodetic.ellipsoid is None:
        return None
    return (
        pyproj.Transformer.from_crs(system, geodetic, always_xy=True),
        math.degrees(geodetic.axis_info[0].unit_conversion_factor),
        pyproj.Geod(a=geodetic.ellipsoid.semi_major_metre, b=geodetic.ellipsoid.semi_minor_metre),
    )


class EllipsoidArea:
    """Areas of the regions of a map in square meters, on the ellipsoid of its CRS.

    The outlines are projected with an equal-area projection of the same ellipsoid. It is
    cylindrical if the map's rows are parallels (maps in degrees, Mercator); such a map may cover
    the whole globe. Otherwise it is azimuthal around the map's center, and the map must lie within
    a hemisphere.

    Args:
        crs: Coordinate reference system of the map as WKT, or None.
        transform: Affine map (``affine.Affine``) from (column, row) to coordinates.
        width: Width of the map in pixels.
        height: Height of the map in pixels.
    """

    def __init__(
        self, crs: Optional[str], transform: affine.Affine, width: int, height: int
    ) -> None:
        self._transform = transform
        self._project: Optional[pyproj.Proj] = None
        # If rows are parallels: longitude at column 0 and width of a pixel, both in degrees.
        self._along: Optional[Tuple[float, float]] = None
        system = _read_system(crs) if crs else None
        if system is None:
            return
        self._to_angles, self._degrees, self._geod = system
        middle = self._angles(
            np.array(
                [
                    [width / 2 - 0.5, height / 2],
                    [width / 2, height / 2],
                    [width / 2 + 0.5, height / 2],
                ]
            )
        )
        step = (middle[2, 0] - middle[0, 0] + 180) % 360 - 180
        rows = self._angles(
            np.array([[x, y] for y in (0, height / 2, height) for x in (0, width / 2, width)])
        )[:, 1].reshape(3, 3)
        if np.isfinite(rows).all() and np.ptp(rows, axis=1).max() < _STRAIGHT:
            self._along = middle[1, 0] - step * width / 2, step
        self._project = pyproj.Proj(
            proj='laea' if self._along is None else 'cea',
            over=self._along is not None,
            lon_0=middle[1, 0],
            lat_0=middle[1, 1] if self._along is None else 0,
            a=self._geod.a,
            b=self._geod.b,
        )

    @property
    def rows_are_parallels(self) -> bool:
        """Whether all pixels of a row have one latitude, and so one area."""
        return self._along is not None

    def of(self, rings: Rings) -> np.ndarray:
        """Return the area of each polygon in m2, float64 (P,); NaN if the CRS has no ellipsoid."""
        if self._project is None:
            return np.full(rings.polygon[-1] + 1, np.nan)
        keep = rings.corner | (rings.points.sum(1) % _STEP == 0)
        angles = self._angles(rings.points[keep])
        meters = np.stack(self._project(angles[:, 0], angles[:, 1]), 1)
        return polygon_areas(ring_areas(meters, rings.ring[keep]), rings.polygon)

    def _angles(self, pixels: np.ndarray) -> np.ndarray:
        """Return longitude and latitude in degrees, float64 (N, 2), of (column, row)."""
        x, y = to_map(self._transform, pixels).T
        angles = np.stack(self._to_angles.transform(x, y), 1) * self._degrees
        if self._along is not None:
            # There is no area past a pole, and longitudes must not jump at 180 degrees.
            angles[:, 1] = np.clip(angles[:, 1], -90, 90)
            expected = self._along[0] + self._along[1] * pixels[:, 0]
            angles[:, 0] += 360 * np.round((expected - angles[:, 0]) / 360)
        return angles
