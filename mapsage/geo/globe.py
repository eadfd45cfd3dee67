"""Longitudes and latitudes of the pixels of a scene.

The Earth is treated as WGS 84 here. What a reader would get wrong is the antimeridian: longitudes
of a scene in degrees continue beyond 180 and do not jump to -180.
"""

from __future__ import annotations

import math
from typing import Tuple

import numpy as np
import pyproj
from pyproj.exceptions import CRSError, ProjError

from .coordinates import short_crs, to_map
from .errors import GeoError
from .raster import Raster
from .reference_systems import next_to

EARTH_RADIUS = 6371008.8
"""Mean radius of the Earth in meters (IUGG)."""


class Globe:
    """Conversion between a scene's pixels and longitudes and latitudes in degrees.

    The coordinates of a raster in degrees may exceed 180; then its longitudes do, too.

    Args:
        scene: Scene with a georeference.

    Attributes:
        is_flat: Whether the scene's CRS is projected, so that its coordinates are not angles.

    Raises:
        GeoError: If the scene has no georeference, or its CRS cannot be converted to WGS 84.
    """

    def __init__(self, scene: Raster) -> None:
        if not scene.is_georeferenced:
            raise GeoError(f'{scene.path} {scene.georeference_gap}.')
        assert scene.crs is not None, 'a georeferenced scene has a CRS'
        earth = pyproj.CRS.from_epsg(4326)
        try:
            crs = pyproj.CRS.from_wkt(scene.crs.to_wkt())
            self._to, self._from = (
                pyproj.Transformer.from_crs(*pair, always_xy=True)
                for pair in ((crs, earth), (earth, crs))
            )
        except (CRSError, ProjError) as error:
            raise GeoError(
                f'{scene.path} has a CRS without a place on the globe, '
                f'{short_crs(scene.crs)} ({error}).'
            ) from error
        self.is_flat = not crs.is_geographic
        self._unit = 1.0 if self.is_flat else math.degrees(crs.axis_info[0].unit_conversion_factor)
        self._transform = scene.transform

    def degrees(self, pixels: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        """Return longitudes and latitudes of pixels.

        Args:
            pixels: Columns and rows, float64 (N, 2).

        Returns:
            Longitudes and latitudes in degrees, float64 (N,) each; infinite for a pixel that is
            not on the globe.
        """
        points = to_map(self._transform, pixels)
        longitudes, latitudes = self._to.transform(*points.T)
        if self.is_flat:
            return longitudes, latitudes
        return next_to(longitudes, points[:, 0] * self._unit, 360), latitudes

    def pixels(self, longitudes: np.ndarray, latitudes: np.ndarray) -> np.ndarray:
        """Return (column, row) of positions in degrees, float64 (N, 2).

        A position that the scene's CRS cannot represent is infinite.
        """
        x, y = self._from.transform(longitudes, latitudes)
        if not self.is_flat:
            x = next_to(x, longitudes / self._unit, 360 / self._unit)
        return to_map(~self._transform, np.stack([x, y], 1))
