"""Longitudes and latitudes of the pixels of a scene."""
from __future__ import annotations

import math
from typing import Tuple

import numpy as np
import pyproj
from pyproj.exceptions import CRSError, ProjError

from .raster import GeoError, Raster, short_crs, to_map

EARTH_RADIUS = 6371008.8  # mean radius in meters (IUGG)


class Globe:
    """Longitudes and latitudes of a scene's coordinates; in degrees, and without jumps.

    A raster in degrees may be numbered beyond 180; then so are its longitudes.

    Args:
        scene: Scene with a georeference.

    Attributes:
        is_flat: Whether the scene's coordinates are not angles themselves.

    Raises:
        GeoError: If the scene has no georeference, or a CRS that is not one of the Earth.
    """

    def __init__(self, scene: Raster) -> None:
        if not scene.is_georeferenced:
            raise GeoError(f'{scene.path} {scene.georeference_gap}.')
        assert scene.crs is not None  # it is georeferenced
        earth = pyproj.CRS.from_epsg(4326)
        try:
            crs = pyproj.CRS.from_wkt(scene.crs.to_wkt())
            self._to, self._from = (pyproj.Transformer.from_crs(*pair, always_xy=True)
                                    for pair in ((crs, earth), (earth, crs)))
        except (CRSError, ProjError) as error:
            raise GeoError(f'{scene.path} has a CRS without a place on the globe, '
                           f'{short_crs(scene.crs)} ({error}).') from error
        self.is_flat = not crs.is_geographic
        self._unit = 1.0 if self.is_flat else math.degrees(crs.axis_info[0].unit_conversion_factor)
        self._transform = scene.transform

    def degrees(self, pixels: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return longitude and latitude of (column, row), float64 (N, 2); infinite for none."""
        points = to_map(self._transform, pixels)
        longitudes, latitudes = self._to.transform(*points.T)
        if self.is_flat:
            return longitudes, latitudes
        return longitudes + turns(points[:, 0] * self._unit - longitudes), latitudes

    def pixels(self, longitudes: np.ndarray, latitudes: np.ndarray) -> np.ndarray:
        """Return (column, row), float64 (N, 2); infinite for none."""
        x, y = self._from.transform(longitudes, latitudes)
        if not self.is_flat:
            x = x + turns(longitudes - x * self._unit) / self._unit
        return to_map(~self._transform, np.stack([x, y], 1))


def turns(degrees: np.ndarray) -> np.ndarray:
    """Return the multiple of 360 next to each angle."""
    return 360 * np.round(np.where(np.isfinite(degrees), degrees, 0) / 360)
