"""Rasters on a grid near 180 degrees of longitude and near the poles: every place's own value."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Tuple

import numpy as np
import pyproj
import pytest
import shapely
from geo_scenes import write_areas, write_raster
from rasterio.crs import CRS
from rasterio.transform import Affine, from_origin

from mapsage.geo import (
    AreaOfInterest,
    GeoError,
    Mosaic,
    Raster,
    RasterLabels,
    RasterOnGrid,
    box_on_grid,
)
from mapsage.geo.registration import check_same_grid

# Degrees of a pixel of the rasters that are read, and what a value may be off by interpolation.
STEP, TOLERANCE = 0.5, 6.0


def values_at(longitude: np.ndarray, latitude: np.ndarray) -> np.ndarray:
    """Return the value of a place, which is the same at 181 and at -179 degrees."""
    return (2000 + 1000 * np.sin(np.radians(longitude)) + 5 * latitude).astype(np.float32)


def write_degrees(
    path: Path, west: float, east: float, south: float = -90, north: float = 90, step: float = STEP
) -> Path:
    columns, rows = (int(round(span / step)) for span in (east - west, north - south))
    longitude, latitude = np.meshgrid(
        west + (np.arange(columns) + 0.5) * step, north - (np.arange(rows) + 0.5) * step
    )
    return write_raster(
        path,
        values_at(longitude, latitude),
        dict(crs='EPSG:4326', transform=from_origin(west, north, step, step)),
    )


def write_projected(
    path: Path, crs: str, transform: Affine, width: int = 60, height: int = 50
) -> Path:
    return write_raster(
        path, values_at(*places(crs, transform, width, height)), dict(crs=crs, transform=transform)
    )


def places(crs: Any, transform: Affine, width: int, height: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return longitudes and latitudes of the centers of pixels."""
    columns, rows = np.meshgrid(np.arange(width) + 0.5, np.arange(height) + 0.5)
    x, y = transform * (columns, rows)
    return pyproj.Transformer.from_crs(crs, 'EPSG:4326', always_xy=True).transform(x, y)


def grid_around(crs: str, longitude: float, latitude: float, pixel: float) -> Affine:
    x, y = pyproj.Transformer.from_crs('EPSG:4326', crs, always_xy=True).transform(
        longitude, latitude
    )
    return from_origin(round(x) - 30 * pixel, round(y) + 25 * pixel, pixel, pixel)


GRIDS: Any = {
    'UTM 60 south': ('EPSG:32760', grid_around('EPSG:32760', 180, -15, 20000)),
    'UTM 1 north': ('EPSG:32601', grid_around('EPSG:32601', -180, 50, 5000)),
    'Fiji': ('EPSG:3460', grid_around('EPSG:3460', 180, -17, 10000)),
    'PDC Mercator': ('EPSG:3832', grid_around('EPSG:3832', 180, 10, 30000)),
    'web Mercator up to the line': (
        'EPSG:3857',
        from_origin(20037508.342789244 - 60 * 2e4, 2e6, 2e4, 2e4),
    ),
    'web Mercator beyond the line': (
        'EPSG:3857',
        from_origin(20037508.342789244 - 30 * 2e4, 2e6, 2e4, 2e4),
    ),
    'north pole': ('EPSG:3413', from_origin(-30 * 5e4, 25 * 5e4, 5e4, 5e4)),
    'south pole': ('EPSG:3031', from_origin(-30 * 2e4, 25 * 2e4, 2e4, 2e4)),
    'degrees of 0 to 360': ('EPSG:4326', from_origin(165, 20, 0.5, 0.5)),
    'degrees, an edge on the line': ('EPSG:4326', from_origin(150, 20, 0.5, 0.5)),
    'degrees of another datum': ('EPSG:4269', from_origin(-195, 20, 0.5, 0.5)),
}


@pytest.mark.parametrize('west', [-180, 0, -30])
@pytest.mark.parametrize('crs, transform', GRIDS.values(), ids=GRIDS)
def test_a_raster_of_the_whole_globe_is_read_everywhere(
    crs: str, transform: Affine, west: int, tmp_path: Path
) -> None:
    raster = Raster(write_degrees(tmp_path / 'world.tif', west, west + 360))
    grid, size = CRS.from_user_input(crs), (60, 50)
    position = RasterOnGrid(
        raster, box_on_grid(raster, grid, transform, size), grid, transform, size
    )
    values = np.zeros((50, 60), np.float32)
    valid = np.zeros((50, 60), bool)
    left, top = (max(side, 0) for side in position.box[:2])
    box = (
        left,
        top,
        min(60, position.box[0] + position.box[2]) - left,
        min(50, position.box[1] + position.box[3]) - top,
    )
    inside = np.s_[top : top + box[3], left : left + box[2]]
    (values[inside],), valid[inside] = position.read(box)
    assert valid.all()
    np.testing.assert_allclose(values, values_at(*places(crs, transform, 60, 50)), atol=TOLERANCE)
    nearest, valid = position.read(box, raster, nearest=True)
    assert valid.all()
    np.testing.assert_allclose(nearest[0], values[inside], atol=2 * TOLERANCE)


@pytest.mark.parametrize('order', [(0, 1), (1, 0)])
@pytest.mark.parametrize('second', [-180, 180])
def test_neighbors_across_the_line_join(
    second: int, order: Tuple[int, int], tmp_path: Path
) -> None:
    paths = [
        write_degrees(tmp_path / 'a.tif', 170, 180, -10, 10),
        write_degrees(tmp_path / 'b.tif', second, second + 12, -10, 10),
    ]
    mosaic = Mosaic([paths[index] for index in order])
    assert (mosaic.width, mosaic.height, mosaic.resampled) == (44, 40, [])
    values, valid = mosaic.read(0, 0, 44, 40)
    assert valid.all()
    np.testing.assert_array_equal(
        values[0], values_at(*places(mosaic.crs, mosaic.transform, 44, 40))
    )


@pytest.mark.parametrize('first', ['EPSG:32601', 'EPSG:4326'])
def test_zones_on_both_sides_of_the_line_join(first: str, tmp_path: Path) -> None:
    """Scenes of the zones 60 and 1, onto the grid of zone 1, and of a scene in degrees."""
    scenes = [
        write_projected(
            tmp_path / '60.tif', 'EPSG:32660', grid_around('EPSG:32660', 179, 50, 2000)
        ),
        write_projected(
            tmp_path / '1.tif', 'EPSG:32601', grid_around('EPSG:32601', -179.5, 50, 2000)
        ),
    ]
    if first == 'EPSG:4326':
        scenes.append(write_degrees(tmp_path / 'd.tif', 179, 180, 49, 50, 0.02))
    mosaic = Mosaic(scenes[::-1])
    assert mosaic.width < 300 and mosaic.height < 150
    values, valid = mosaic.read(0, 0, mosaic.width, mosaic.height)
    assert valid.mean() > 0.6
    expected = values_at(*places(mosaic.crs, mosaic.transform, mosaic.width, mosaic.height))
    np.testing.assert_allclose(values[0][valid], expected[valid], atol=TOLERANCE)


@pytest.mark.parametrize('west', [-181, 179])
def test_labels_and_pairs_may_be_a_turn_away(west: int, tmp_path: Path) -> None:
    scene = Raster(write_degrees(tmp_path / 'a.tif', -181, -179, 0, 2))
    pair = write_degrees(tmp_path / 'b.tif', west, west + 2, 0, 2)
    check_same_grid(scene, Raster(pair))
    labels = write_raster(
        tmp_path / 'labels.tif',
        np.ones((4, 4), np.uint8),
        dict(crs='EPSG:4326', transform=from_origin(west, 2, STEP, STEP)),
    )
    assert RasterLabels(labels, scene).read(0, 0, 4, 4)[1].all()


def test_a_polygon_beyond_the_line_lies_in_a_scene_of_web_mercator(tmp_path: Path) -> None:
    transform = from_origin(-20037508.342789244, 1e6, 2e4, 2e4)
    scene = Raster(write_projected(tmp_path / 'a.tif', 'EPSG:3857', transform))
    path = write_areas(tmp_path / 'p.gpkg', [shapely.box(179, -1, 183, 5)], 'EPSG:4326')
    area = AreaOfInterest(path).of_scene(scene).mask(0, 0, 60, 50)
    longitude, latitude = places('EPSG:3857', transform, 60, 50)
    np.testing.assert_array_equal(area, (longitude < -177) & (latitude > -1) & (latitude < 5))


def test_a_scene_with_a_pole_says_so(tmp_path: Path) -> None:
    polar = write_projected(tmp_path / 'p.tif', *GRIDS['north pole'])
    degrees = write_degrees(tmp_path / 'd.tif', 170, 180, 70, 80)
    with pytest.raises(GeoError, match=r'p\.tif .* contains a pole'):
        Mosaic([degrees, polar])
    mosaic = Mosaic([polar, degrees])
    values, valid = mosaic.read(0, 0, mosaic.width, mosaic.height)
    expected = values_at(*places(mosaic.crs, mosaic.transform, mosaic.width, mosaic.height))
    np.testing.assert_allclose(values[0][valid], expected[valid], atol=TOLERANCE)


def test_the_globe_fills_gaps_on_both_sides_of_the_line(tmp_path: Path) -> None:
    """On the grid of a scene that goes beyond 180 degrees the globe's raster counts twice."""
    scene = write_degrees(tmp_path / 'a.tif', 170, 190, -10, 10)
    world = write_degrees(tmp_path / 'w.tif', -180, 180)
    mosaic = Mosaic([scene, world])
    values, valid = mosaic.read(0, 0, mosaic.width, mosaic.height)
    assert valid.all()
    expected = values_at(*places(mosaic.crs, mosaic.transform, mosaic.width, mosaic.height))
    np.testing.assert_allclose(values[0], expected, atol=TOLERANCE)
