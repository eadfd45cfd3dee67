"""Areas on the ellipsoid, measured through the polygons of whole maps."""

from __future__ import annotations

from pathlib import Path
from typing import Tuple

import numpy as np
import pyproj
import pytest
import rasterio.transform
import shapely
from geo_scenes import UTM, map_polygons

from mapsage.geo.ellipsoid import EllipsoidArea
from mapsage.geo.outlines import walk


def test_area_of_large_pixels_in_degrees(tmp_path: Path) -> None:
    """A zone between parallels has a closed form: 2 pi a b ... of the authalic latitude."""
    place = dict(
        crs=UTM['crs'].from_epsg(4326),
        transform=rasterio.transform.from_origin(-20.0, 70.0, 0.5, 0.5),
    )
    classes = np.full((80, 60), 255, np.uint8)
    classes[20:60, 10:50] = 1  # 60 to 40 degrees north, 20 degrees wide
    _, _, fields = map_polygons(tmp_path, classes, place)
    a, f = 6378137.0, 1 / 298.257223563
    e = np.sqrt(f * (2 - f))

    def zone(latitude: float) -> float:  # from the equator, for one radian of longitude
        s = np.sin(np.radians(latitude))
        return a * a * (1 - e * e) / 2 * (s / (1 - (e * s) ** 2) + np.arctanh(e * s) / e)

    assert fields['area_m2'][0] == pytest.approx((zone(60) - zone(40)) * np.radians(20), rel=1e-9)


def test_area_of_large_pixels_in_meters(tmp_path: Path) -> None:
    place = dict(
        crs=UTM['crs'].from_epsg(3035),  # pixels of 1 km on an equal-area projection
        transform=rasterio.transform.from_origin(5.5e6, 2.5e6, 1000.0, 1000.0),
    )
    classes = np.full((700, 900), 255, np.uint8)
    classes[10:690, 20:880] = 1
    _, _, fields = map_polygons(tmp_path, classes, place)
    assert fields['area_m2'][0] / 1e6 == pytest.approx(680 * 860, abs=0.5)


@pytest.mark.parametrize(
    'epsg, size, origin, pixel, share',
    [
        (4326, (1440, 721), (-0.125, 90.125), 0.25, 1.0),  # pixel centers on the poles
        (4326, (1440, 720), (-180.00000001, 90.0), 0.25, 1.0),
        (3857, (512, 512), (-20037508.3428, 20037508.3428), 40075016.6856 / 512, 0.9962387),
    ],
)
def test_area_of_the_globe(
    tmp_path: Path,
    epsg: int,
    size: Tuple[int, int],
    origin: Tuple[float, float],
    pixel: float,
    share: float,
) -> None:
    place = dict(
        crs=UTM['crs'].from_epsg(epsg),
        transform=rasterio.transform.from_origin(*origin, pixel, pixel),
    )
    _, _, fields = map_polygons(tmp_path, np.ones(size[::-1], np.uint8), place)
    assert fields['area_m2'].sum() == pytest.approx(5.100656217e14 * share, rel=1e-5)


def test_a_map_without_an_ellipsoid_has_no_square_meters() -> None:
    rings = walk(np.array([shapely.box(0, 0, 3, 2), shapely.box(5, 0, 6, 1)]))
    site = 'LOCAL_CS["building site",UNIT["metre",1]]'
    for crs in (None, pyproj.CRS.from_wkt(site).to_wkt()):
        area = EllipsoidArea(crs, rasterio.transform.from_origin(0, 0, 1, 1), 10, 10).of(rings)
        assert area.shape == (2,) and np.isnan(area).all()
