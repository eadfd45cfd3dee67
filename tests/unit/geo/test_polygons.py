"""Class maps as polygons: areas, shared borders, strips."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Tuple

import numpy as np
import pyproj
import pytest
import rasterio
import rasterio.features
import shapely
from geo_scenes import (
    CLASSES,
    DEGREES,
    PIXELS,
    UTM,
    draw_classes,
    map_polygons,
    rectangle,
    write_raster,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import mapsage.geo.polygon_layer as polygon_layer
import mapsage.geo.polygons as module
from mapsage.geo import GeoError, write_polygons


def _one_piece_at_a_time(classes: np.ndarray) -> List[Tuple[int, int]]:
    """Return (class, pixels) of every region, found by GDAL on the whole map at once."""
    shapes = rasterio.features.shapes(classes, mask=classes != 255, connectivity=4)
    return sorted(
        (int(value), int(round(shapely.geometry.shape(shape).area))) for shape, value in shapes
    )


def _regions(fields: Dict[str, np.ndarray]) -> List[Tuple[int, int]]:
    return sorted(zip(fields['class_id'].tolist(), fields['area_px'].tolist()))


@pytest.mark.parametrize('place', [UTM, DEGREES], ids=['utm', 'degrees'])
def test_shapes_areas_and_crs(tmp_path: Path, place: dict) -> None:
    meta, polygons, fields = map_polygons(tmp_path, draw_classes(), place)
    assert pyproj.CRS(meta['crs']) == pyproj.CRS(place['crs'].to_wkt())
    assert list(fields) == ['class_id', 'class_name', 'area_m2', 'area_px', 'is_cut']
    assert _regions(fields) == _one_piece_at_a_time(draw_classes())
    assert [CLASSES[i] for i in fields['class_id']] == fields['class_name'].tolist()
    assert shapely.is_valid(polygons).all() and set(shapely.get_type_id(polygons)) == {3}
    house = rectangle(place, 30, 20, 70, 50)
    number = int(np.flatnonzero(fields['area_px'] == 40 * 30)[0])
    assert polygons[number].equals(house)  # a rectangle is simple already
    # the area on the ellipsoid, right to a thousandth of a pixel
    geod, system = pyproj.Geod(ellps='WGS84'), pyproj.CRS(place['crs'].to_wkt())
    to_degrees = pyproj.Transformer.from_crs(system, 4326, always_xy=True)
    for polygon, pixels, area in zip(
        (house, rectangle(place, 200, 100, 205, 107)), (1200, 35), (fields['area_m2'][number], None)
    ):
        fine = shapely.segmentize(polygon, place['transform'].a)
        x, y = to_degrees.transform(*np.array(fine.exterior.coords).T)
        expected = abs(geod.polygon_area_perimeter(x, y)[0])
        if area is None:
            area = fields['area_m2'][fields['area_px'] == pixels][0]
        assert abs(area - expected) < expected / pixels / 1000


def test_map_in_pixels_has_no_square_meters(tmp_path: Path) -> None:
    meta, polygons, fields = map_polygons(tmp_path, draw_classes(), PIXELS)
    assert np.isnan(fields['area_m2'].astype(float)).all() and 'ndefined' in (
        meta['crs'] or 'undefined'
    )  # GDAL before 3.9 cannot leave it empty
    assert fields['area_px'].sum() == 300 * 260
    assert shapely.total_bounds(polygons).tolist() == [0, 0, 300, 260]


def test_background_no_data_and_small_regions_are_left_out(tmp_path: Path) -> None:
    classes = draw_classes()
    classes[:10] = 255
    _, _, fields = map_polygons(tmp_path, classes, background=0)
    assert fields['class_name'].tolist().count('house') == 2 and 0 not in fields['class_id']
    _, _, fields = map_polygons(tmp_path, classes, background=0, min_area=36)
    assert fields['class_name'].tolist().count('house') == 1
    _, _, fields = map_polygons(tmp_path, np.full((50, 50), 255, np.uint8))
    assert len(fields['class_id']) == 0  # a layer without polygons


def _blobs(height: int, width: int, seed: int = 0) -> np.ndarray:
    noise = np.random.RandomState(seed).rand(height // 4, width // 4)
    return np.digitize(np.kron(noise, np.ones((4, 4))), [0.4, 0.7]).astype(np.uint8)


def test_neighbors_share_their_simplified_border(tmp_path: Path) -> None:
    _, polygons, fields = map_polygons(tmp_path, draw_classes(), PIXELS)
    exact = map_polygons(tmp_path, draw_classes(), PIXELS, simplify=0)[1]
    assert (
        shapely.get_num_coordinates(polygons).sum() < 0.5 * shapely.get_num_coordinates(exact).sum()
    )
    assert shapely.area(polygons).sum() == pytest.approx(300 * 260, abs=1e-6)
    assert shapely.area(shapely.union_all(polygons)) == pytest.approx(300 * 260, abs=1e-6)
    pond, ground = (polygons[fields['class_id'] == i][0] for i in (2, 0))
    assert pond.intersection(ground).area == 0
    assert shapely.hausdorff_distance(pond, exact[fields['class_id'] == 2][0]) <= 1
    # three regions meet in points that all of them keep
    classes = draw_classes()
    classes[150:, 100:] = np.where(classes[150:, 100:] == 0, 1, classes[150:, 100:])
    classes[np.triu_indices(200, 40)] = 2
    _, polygons, _ = map_polygons(tmp_path, classes, PIXELS)
    assert shapely.area(polygons).sum() == pytest.approx(300 * 260, abs=1e-6)
    assert shapely.area(shapely.union_all(polygons)) == pytest.approx(300 * 260, abs=1e-6)


@pytest.mark.parametrize('rows', [7, 64])
def test_regions_that_cross_strips_stay_one(tmp_path: Path, rows: int, monkeypatch: Any) -> None:
    classes = _blobs(160, 120)
    classes[:, 60] = 1
    classes[30:50, :20] = 255
    whole = map_polygons(tmp_path, classes)
    monkeypatch.setattr(module, '_STRIP_PIXELS', rows * 120)
    strips = map_polygons(tmp_path, classes)
    assert _regions(strips[2]) == _one_piece_at_a_time(classes)
    key = shapely.to_wkb(shapely.normalize(whole[1]))
    np.testing.assert_array_equal(
        np.sort(shapely.to_wkb(shapely.normalize(strips[1]))), np.sort(key)
    )


@given(st.integers(0, 10**6), st.integers(1, 30), st.integers(1, 30), st.integers(1, 4))
@settings(max_examples=25)
def test_any_map_in_strips(
    tmp_path_factory: Any, seed: int, height: int, width: int, classes: int
) -> None:
    folder = tmp_path_factory.mktemp('any')
    random = np.random.RandomState(seed)
    drawn = random.randint(0, classes, (height, width)).astype(np.uint8)
    drawn[drawn == 3] = 255
    before, module._STRIP_PIXELS = module._STRIP_PIXELS, random.randint(1, 5) * width
    try:
        _, polygons, fields = map_polygons(folder, drawn, PIXELS, simplify=random.randint(0, 3))
    finally:
        module._STRIP_PIXELS = before
    assert _regions(fields) == _one_piece_at_a_time(drawn)
    assert shapely.is_valid(polygons).all()


@pytest.mark.parametrize(
    'height, width, share, rows',
    [(40, 37, 0.05, 8), (33, 40, 0.5, 3), (5, 40, 0.2, 2), (40, 8, 0.2, 5), (24, 24, 0.1, 24)],
)
def test_regions_larger_than_a_tile_are_cut(
    tmp_path: Path, height: int, width: int, share: float, rows: int, monkeypatch: Any
) -> None:
    drawn = (np.random.RandomState(0).rand(height, width) < share).astype(np.uint8)
    tile = 8
    monkeypatch.setattr(module, 'TILE', tile)
    monkeypatch.setattr(module, '_STRIP_PIXELS', rows * width)
    monkeypatch.setattr(polygon_layer, '_BATCH_POINTS', 500)
    _, exact, fields = map_polygons(tmp_path, drawn, PIXELS, simplify=0)
    assert shapely.is_valid(exact).all()
    burnt = rasterio.features.rasterize(
        zip(exact, fields['class_id'].tolist()), out_shape=drawn.shape, fill=9
    )
    np.testing.assert_array_equal(burnt, drawn)
    assert fields['area_px'].sum() == drawn.size
    whole, cut = [], np.zeros(drawn.shape, int)
    for shape, value in rasterio.features.shapes(drawn, connectivity=4):
        polygon = shapely.geometry.shape(shape)
        left, top, right, bottom = polygon.bounds
        if max(right - left, bottom - top) <= tile:
            whole.append((int(value), int(polygon.area)))
        else:
            cut += rasterio.features.rasterize([polygon], out_shape=drawn.shape)
    is_cut = fields['is_cut'].astype(bool)
    assert _regions({key: values[~is_cut] for key, values in fields.items()}) == sorted(whole)
    assert fields['area_px'][is_cut].sum() == cut.sum()
    bounds = shapely.bounds(exact[is_cut]).reshape(-1, 4)
    assert (bounds[:, :2] // tile == (bounds[:, 2:] - 1) // tile).all()
    # each part of a tile is in one piece
    tiles = np.indices(drawn.shape) // tile
    parts = rasterio.features.shapes(
        (2 * (tiles[0] * 5 + tiles[1]) + drawn).astype(np.uint8), mask=cut > 0, connectivity=4
    )
    assert is_cut.sum() == len(list(parts))


def test_neighbors_share_their_simplified_border_where_they_are_cut(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(module, 'TILE', 64)
    classes = draw_classes()
    _, polygons, fields = map_polygons(tmp_path, classes, PIXELS)
    assert fields['is_cut'].any() and not fields['is_cut'].all()
    assert shapely.area(polygons).sum() == pytest.approx(300 * 260, abs=1e-6)
    assert shapely.area(shapely.union_all(polygons)) == pytest.approx(300 * 260, abs=1e-6)


def test_a_thin_region_that_is_cut_is_kept_whole(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(module, 'TILE', 64)
    classes = np.zeros((200, 200), np.uint8)
    classes[30, :] = 1  # a road
    classes[100, 100:160] = 1
    _, _, fields = map_polygons(tmp_path, classes, min_area=100, background=(0, 2))
    assert fields['area_px'].tolist() == [64, 64, 64, 8] and fields['is_cut'].all()


def test_class_without_a_name(tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'map.tif', draw_classes())
    with pytest.raises(GeoError, match='holds class 2 .* 2 class names were given'):
        write_polygons(path, tmp_path / 'map.gpkg', CLASSES[:2])
    with pytest.raises(GeoError, match='cannot write into .*absent'):
        write_polygons(path, tmp_path / 'absent' / 'map.gpkg', CLASSES)
    assert [p.name for p in tmp_path.iterdir()] == ['map.tif']
