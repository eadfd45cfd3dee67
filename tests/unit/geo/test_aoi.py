"""Areas of interest: which pixels of a scene they hold, from any file and in any CRS."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pyproj
import pytest
import shapely
from geo_scenes import DEGREES, PIXELS, UTM, draw_classes, write_areas, write_raster
from rasterio.crs import CRS
from rasterio.features import geometry_mask
from rasterio.transform import from_origin

from mapsage.geo import AreaOfInterest, GeoError, Raster


def blob(x: float = 500070, y: float = 4099940, size: float = 30) -> Any:
    """Return a polygon with a hole in the scene in UTM."""
    center = shapely.Point(x, y)
    return center.buffer(size).difference(center.buffer(size / 3))


@pytest.fixture
def scene(tmp_path: Path) -> Raster:
    return Raster(write_raster(tmp_path / 'a.tif', draw_classes()))


def test_pixels_whose_center_lies_in_any_feature_of_any_layer(
    tmp_path: Path, scene: Raster
) -> None:
    shapes = [
        blob(),
        shapely.MultiPolygon([blob(500010, 4099990, 8), blob(500140, 4099880, 7)]),
        shapely.Polygon([(0, 0), (9, 9), (9, 0), (0, 9)]),
    ]  # far away, crosses itself
    path = write_areas(tmp_path / 'a.gpkg', shapes[:1])
    write_areas(path, shapes[1:], layer='more')
    area = AreaOfInterest(path).of_scene(scene)
    expected = geometry_mask(shapes[:2], (260, 300), UTM['transform'], invert=True)
    found = area.mask(0, 0, 300, 260)
    np.testing.assert_array_equal(found, expected)
    for box in ((13, 20, 64, 50), (290, 250, 64, 64), (0, 0, 5, 5)):
        column, row, width, height = box
        part = area.mask(*box)
        assert part.shape == (height, width)
        inside = expected[row : row + height, column : column + width]
        np.testing.assert_array_equal(part[: inside.shape[0], : inside.shape[1]], inside)
        assert area.meets(*box) == inside.any()
    assert not area.meets(300, 0, 64, 64)
    again = pickle.loads(pickle.dumps(area))
    np.testing.assert_array_equal(again.mask(0, 0, 300, 260), expected)
    assert copy.deepcopy(area) is area and ' at 0x' not in repr(area)


@pytest.mark.parametrize('crs', ['EPSG:4326', 'EPSG:3857', 'EPSG:32649'])
def test_areas_in_another_crs(tmp_path: Path, scene: Raster, crs: str) -> None:
    """Edges that are straight in the file's CRS are curves in the scene's."""
    transformer = pyproj.Transformer.from_crs(32650, crs, always_xy=True)
    x, y = transformer.transform(500075, 4099935)  # the middle of the scene
    far = 0.8 if crs == 'EPSG:4326' else 80000
    box = shapely.box(x - far, y, x + far, y + far)
    area = AreaOfInterest(
        write_areas(tmp_path / 'a.geojson' if '4326' in crs else tmp_path / 'a.gpkg', [box], crs)
    ).of_scene(scene)
    rows, columns = np.mgrid[:260, :300] + 0.5
    there = transformer.transform(500000 + columns * 0.5, 4100000 - rows * 0.5)
    expected = shapely.contains_xy(box, *there)
    assert 0.1 < expected.mean() < 0.9
    assert (area.mask(0, 0, 300, 260) != expected).mean() < 1e-3


def test_across_the_antimeridian(tmp_path: Path) -> None:
    place = dict(crs=CRS.from_epsg(32601), transform=from_origin(166000, 1000000, 100, 100))
    scene = Raster(write_raster(tmp_path / 'a.tif', draw_classes(), place))  # 174 to 177 degrees W
    east = Raster(
        write_raster(
            tmp_path / 'b.tif',
            draw_classes(),
            dict(crs=CRS.from_epsg(4326), transform=from_origin(179, 9.05, 0.01, 0.01)),
        )
    )  # to 182
    torn = shapely.MultiPolygon([shapely.box(179.5, 8, 180, 9), shapely.box(-180, 8, -179.5, 9)])
    area = AreaOfInterest(write_areas(tmp_path / 'a.gpkg', [torn], 'EPSG:4326'))
    mask = area.of_scene(east).mask(0, 0, 300, 260)
    expected = np.zeros((260, 300), bool)
    expected[5:105, 50:150] = True
    np.testing.assert_array_equal(mask, expected)
    assert 0 < area.of_scene(scene).mask(0, 0, 300, 260).mean() < 1


def test_in_pixels_of_another_size(tmp_path: Path, scene: Raster) -> None:
    area = AreaOfInterest(write_areas(tmp_path / 'a.gpkg', [blob()])).of_scene(scene)
    fine = area.mask(0, 0, 300, 260)
    coarse = area.resized((65, 75)).mask(0, 0, 75, 65)
    needed = fine.reshape(65, 4, 75, 4).any((1, 3))
    assert not (needed & ~coarse).any() and (coarse & ~needed).mean() < 0.05
    assert area.resized((260, 300)) is area


def test_keys_follow_the_polygons(tmp_path: Path) -> None:
    keys = [
        AreaOfInterest(write_areas(tmp_path / f'{name}.gpkg', [shape], crs)).key
        for name, shape, crs in (
            ('a', blob(), 'EPSG:32650'),
            ('b', blob(), 'EPSG:32650'),
            ('c', blob(), 'EPSG:32651'),
            ('d', blob(5), 'EPSG:32650'),
        )
    ]
    assert keys[0] == keys[1] and len(set(keys)) == 3


def test_areas_that_cannot_be_used(tmp_path: Path, scene: Raster) -> None:
    point = shapely.Point(500070, 4099940)
    line = shapely.LineString([(500000, 4099900), (500100, 4099950)])
    (tmp_path / 'notes.gpkg').write_text('not a GeoPackage')
    flat = shapely.Polygon([(0, 0), (1, 1), (2, 2)])
    for path, words in (
        (tmp_path / 'no.gpkg', 'no such file'),
        (tmp_path / 'notes.gpkg', 'no vector file that GDAL reads'),
        (
            write_areas(tmp_path / 'points.gpkg', [point, line]),
            'no polygons with an area, only LineStrings, Points; expected',
        ),
        (write_areas(tmp_path / 'empty.gpkg', [], kind='Polygon'), 'holds no polygons'),
        (write_areas(tmp_path / 'flat.gpkg', [flat]), 'no polygons with an area'),
        (write_areas(tmp_path / 'bare.gpkg', [blob()], None), "'areas' has no CRS.*a_srs"),
    ):
        with pytest.raises(GeoError, match=words) as caught:
            AreaOfInterest(path)
        assert path.name in str(caught.value)
    with pytest.warns(UserWarning, match='features that are Points are left out'):
        AreaOfInterest(write_areas(tmp_path / 'mixed.gpkg', [point, blob()]))
    area = AreaOfInterest(write_areas(tmp_path / 'a.gpkg', [blob()]))
    with pytest.raises(GeoError, match='b.tif has no georeference.*a.gpkg'):
        area.of_scene(Raster(write_raster(tmp_path / 'b.tif', draw_classes(), PIXELS)))
    away = Raster(write_raster(tmp_path / 'c.tif', draw_classes(), DEGREES))
    assert not area.of_scene(away).meets(0, 0, 300, 260)
    sentence = area.describe_miss(away)
    assert 'covers no pixel of' in sentence and 'EPSG:4326' in sentence
