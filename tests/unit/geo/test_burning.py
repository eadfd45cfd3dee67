"""Burnt polygons, pixel by pixel as rasterio burns shapely's polygons."""

from __future__ import annotations

import gc

import numpy as np
import pytest
import rasterio.features
import shapely
from rasterio.transform import from_origin

from mapsage.geo.burning import burn_polygons


@pytest.mark.parametrize('dtype, top', [('uint8', 255), ('int32', 70_000)])
@pytest.mark.parametrize('all_touched', [False, True])
def test_same_pixels_as_by_way_of_shapely(dtype: str, top: int, all_touched: bool) -> None:
    """Overlapping polygons with holes, some of them cut, and one with heights."""
    random = np.random.RandomState(0)
    outer = shapely.buffer(
        shapely.points(random.uniform(0, 60, (150, 2))), random.uniform(1, 9, 150), quad_segs=4
    )
    holes = shapely.buffer(shapely.centroid(outer), 0.6)
    polygons = shapely.get_parts(
        shapely.clip_by_rect(shapely.difference(outer, holes), -1, -1, 55, 61)
    )
    polygons[7] = shapely.Polygon([(1, 1, 5), (20, 2, 6), (9, 30, 7)])
    values = random.randint(1, top, len(polygons))
    transform = from_origin(0, 60, 0.5, 0.5)
    expected = rasterio.features.rasterize(
        zip(polygons, values.tolist()),
        (120, 130),
        fill=3,
        dtype=dtype,
        transform=transform,
        all_touched=all_touched,
    )
    burnt = burn_polygons(polygons, values, (120, 130), 3, dtype, transform, all_touched)
    assert burnt.dtype == expected.dtype and len(np.unique(burnt)) > 50
    np.testing.assert_array_equal(burnt, expected)
    assert gc.isenabled()


def test_no_polygons() -> None:
    burnt = burn_polygons(
        np.zeros(0, object), np.zeros(0, int), (2, 3), 9, 'uint8', from_origin(0, 2, 1, 1)
    )
    assert burnt.dtype == np.uint8 and burnt.tolist() == [[9] * 3] * 2
