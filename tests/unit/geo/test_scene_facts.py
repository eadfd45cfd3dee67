"""Scenes read in one unit and one order of bands, from metadata of all kinds, lying ones included."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, Optional, Sequence

import numpy as np
import pytest
import rasterio
from rasterio.enums import ColorInterp
from rasterio.transform import from_origin

from mapsage.geo import GeoError, Mosaic, facts_of, open_raster, open_scene
from mapsage.geo.scene_facts import Unit, describe_reading, open_scenes, read_item
from mapsage.geo.sensor_rules import Product, common_names, physical_units, read_name

GROUND = np.random.RandomState(0).randint(200, 3000, (3, 64, 96)).astype('uint16')


def write(
    path: Path,
    values: np.ndarray = GROUND,
    names: Sequence[Optional[str]] = (),
    scale: Any = None,
    offset: Any = None,
    crs: Optional[str] = 'EPSG:32633',
    origin: Sequence[float] = (5e5, 5.4e6, 10, 10),
    colors: Sequence[ColorInterp] = (),
    nodata: Optional[float] = 0,
) -> str:
    path.parent.mkdir(exist_ok=True, parents=True)
    profile: Any = dict(count=len(values), height=values.shape[1], width=values.shape[2])
    if crs is not None:
        profile.update(crs=crs, transform=from_origin(*origin))
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        dtype=values.dtype,
        nodata=nodata,
        photometric='MINISBLACK',
        **profile,
    ) as file:
        file.write(values)
        file.colorinterp = colors or [ColorInterp.undefined] * len(values)
        if names:
            file.descriptions = tuple(names)
        if scale is not None:
            file.scales, file.offsets = (np.broadcast_to(v, len(values)) for v in (scale, offset))
    return str(path)


def read(path: str, **arguments: Any) -> np.ndarray:
    raster = open_scene(path, **arguments)
    return raster.read(0, 0, raster.width, raster.height)[0]


@pytest.mark.parametrize(
    ('path', 'expected'),
    [
        (
            'S2A_MSIL2A_20230601T100031_N0509_R122_T33UUP_20230601T1.SAFE/GRANULE/T33UUP_20230601T100031_B8A_20m.jp2',
            Product('sentinel-2', 'L2', '05.09', '20230601', ('B8A',)),
        ),
        ('S2B_33UUP_20230601_0_L2A/B04.tif', Product('sentinel-2', 'L2', None, '20230601')),
        (
            'LC09_L2SP_192024_20230610_20230620_02_T1_SR_B4.TIF',
            Product('landsat-oli', 'L2', None, '20230610', ('B4',)),
        ),
        (
            'LT05_L1TP_192024_19990610_20230620_02_T1.tif',
            Product('landsat-tm', 'L1', None, '19990610'),
        ),
        (
            '20230610_101112_1f_2460_3B_AnalyticMS_SR.tif',
            Product('planetscope', 'L2', None, '20230610'),
        ),
        ('labels_T1_B2.tif', Product()),
        ('ortho_20230601.tif', Product()),
    ],
)
def test_names_of_products(path: str, expected: Product) -> None:
    assert read_name(f'/data/{path}') == expected


def test_rules_of_units() -> None:
    for baseline, offset in (('04.00', -0.1), ('4', -0.1), ('10.0', -0.1), ('3.01', 0), ('new', 0)):
        assert physical_units('sentinel-2', 'L2', baseline) == (1e-4, offset)
    assert physical_units('sentinel-2', 'L2', '05.09') == (1e-4, -0.1)
    assert physical_units('sentinel-2', 'L2', '03.01') == (1e-4, 0)
    assert physical_units('sentinel-2', 'L2', None) is None
    assert physical_units('landsat-oli', 'L2', None) == (2.75e-5, -0.2)
    assert common_names('sentinel-2', ['B02', 'B8A', 'x']) == ('blue', 'nir08', 'x')
    assert common_names('landsat-oli', ['SR_B4']) == ('red',)


def test_units_of_two_baselines(tmp_path: Path) -> None:
    """The same ground, with and without the offset, has the same values in both converted units."""
    values = GROUND.copy()
    values[:, :5, :5] = 0
    old = write(tmp_path / 'a.tif', values, scale=1e-4, offset=0)
    new = write(
        tmp_path / 'b.tif',
        np.where(values, values + 1000, 0).astype('uint16'),
        scale=1e-4,
        offset=-0.1,
    )
    np.testing.assert_array_equal(read(new), np.where(values, values + 1000, 0))
    for units, dtype in (('harmonized', 'uint16'), ('reflectance', 'float32')):
        first, second = read(old, units=units), read(new, units=units)
        assert first.dtype == second.dtype == dtype
        np.testing.assert_allclose(first, second, atol=1e-6)
        assert (second[:, :5, :5] == 0).all()
    np.testing.assert_allclose(read(new, units='reflectance'), values * np.float32(1e-4), atol=1e-6)
    np.testing.assert_array_equal(read(new, units='harmonized'), values)
    # Values below the offset do not wrap around.
    dark = write(tmp_path / 'c.tif', np.full((3, 8, 8), 990, 'uint16'), scale=1e-4, offset=-0.1)
    assert (read(dark, units='harmonized') == 0).all()


def test_a_conversion_survives_pools_copies_and_changes(tmp_path: Path) -> None:
    path = write(tmp_path / 'a.tif', GROUND + 1000, scale=1e-4, offset=-0.1)
    raster = open_scene(path, units='harmonized')
    pooled = open_raster(path, raster.bands, conversion=raster.conversion)
    np.testing.assert_array_equal(pooled.read(0, 0, 96, 64)[0], GROUND)
    np.testing.assert_array_equal(
        open_raster(path, raster.bands).read(0, 0, 96, 64)[0], GROUND + 1000
    )
    write(tmp_path / 'a.tif', GROUND + 1500, scale=1e-4, offset=-0.1)
    np.testing.assert_array_equal(raster.read(0, 0, 96, 64)[0], GROUND + 500)
    assert raster.facts()['conversion'] != open_scene(path).facts().get('conversion')
    reflectance = open_scene(path, units='reflectance')
    assert reflectance.dtype == np.float32
    np.testing.assert_allclose(
        reflectance.read_reduced(8)[0], raster.read_reduced(8)[0] * 1e-4, atol=1e-6
    )
    assert (reflectance.read(90, 60, 20, 20)[0][:, 5:] == 0).all()


def test_the_unit_comes_from_item_and_name(tmp_path: Path) -> None:
    product = 'S2A_MSIL2A_20230601T100031_N0509_R122_T33UUP_20230601T1'
    assert facts_of(open_scene(write(tmp_path / f'{product}.tif'))).units[0] == Unit(1e-4, -0.1)
    path = write(tmp_path / 'x.tif')
    bands = [dict(scale=1e-4, offset=-0.1)] * 3
    item = dict(
        type='Feature',
        properties={'s2:processing_baseline': '05.09', 'datetime': '2023-06-01T10:00:00Z'},
        assets=dict(data={'href': 'x.tif', 'raster:bands': bands}),
    )
    (tmp_path / 'x.json').write_text(json.dumps(item))
    facts = facts_of(open_scene(path))
    assert (facts.units[0], facts.baseline, facts.day) == (Unit(1e-4, -0.1), '05.09', '20230601')
    # earth-search took the offset off, and left it in the item.
    item['properties']['earthsearch:boa_offset_applied'] = True
    (tmp_path / 'x.json').write_text(json.dumps(item))
    assert facts_of(open_scene(path)).units[0] == Unit(1e-4, 0)
    given = read_item({}, [{'bands': [{'raster:scale': 2.0, 'raster:offset': 1.0}] * 3}])
    assert facts_of(open_scene(path, item=given)).units[0] == Unit(2, 1)


@pytest.mark.parametrize(
    'text',
    [
        '[' * 100_000,
        '{"assets": 3}',
        '[]',
        '{"assets": {"a": 1}, "properties": 0}',
        '\0',
        '{"assets": {"a": {"raster:bands": [{"scale": 1%s}, {}, {}]}}}' % ('0' * 400),
    ],
)
def test_a_file_of_somebody_else_beside_the_scene(tmp_path: Path, text: str) -> None:
    path = write(tmp_path / 'a.tif')
    (tmp_path / 'a.json').write_text(text)
    assert facts_of(open_scene(path)).units is None


@pytest.mark.parametrize(('scale', 'offset'), [(0.0, 0.0), (1e-4, math.nan), (math.inf, 0.0)])
def test_a_unit_that_is_none(tmp_path: Path, scale: float, offset: float) -> None:
    path = write(tmp_path / 'a.tif', scale=scale, offset=offset)
    facts = facts_of(open_scene(path))
    assert facts.units is None and 'no unit' in facts.doubts[0] and path in facts.doubts[0]
    with pytest.raises(GeoError, match='gdal_edit'):
        open_scene(path, units='reflectance')


def test_tags_that_disagree_with_the_item(tmp_path: Path) -> None:
    path = write(tmp_path / 'a.tif', scale=1e-4, offset=0)
    item = read_item({}, [{'raster:bands': [dict(scale=1e-4, offset=-0.1)] * 3}])
    facts = facts_of(open_scene(path, item=item))
    assert facts.units[0] == Unit(1e-4, 0)
    (doubt,) = facts.doubts
    assert 'offset 0' in doubt and 'offset -0.1' in doubt


def test_an_offset_for_each_band(tmp_path: Path) -> None:
    path = write(tmp_path / 'a.tif', scale=(1e-4, 1e-4, 2e-4), offset=(-0.1, 0, -0.1))
    shift = np.array([1000, 0, 0])[:, None, None]
    np.testing.assert_array_equal(read(path, units='harmonized'), np.maximum(GROUND, shift) - shift)
    scales = np.array([1e-4, 1e-4, 2e-4], np.float32)[:, None, None]
    offsets = np.array([-0.1, 0, -0.1], np.float32)[:, None, None]
    np.testing.assert_allclose(
        read(path, units='reflectance'), GROUND * scales + offsets, atol=1e-6
    )


def test_floats_are_physical_already(tmp_path: Path) -> None:
    values = (GROUND * 1e-4).astype('float64')
    path = write(tmp_path / 'a.tif', values, nodata=None)
    assert read(path, units='reflectance').dtype == np.float32
    np.testing.assert_allclose(read(path, units='reflectance'), values, rtol=1e-6)


def test_bands_are_read_by_name(tmp_path: Path) -> None:
    names = ('B02', 'B04', 'B08')
    other = write(tmp_path / 'b.tif', GROUND[::-1], names[::-1])
    raster = open_scene(other, names=names)
    assert raster.bands == (3, 2, 1) and facts_of(raster).reordered
    np.testing.assert_array_equal(read(other, names=names), GROUND)
    # More bands than asked for, written in another way, and with another unit in each.
    more = write(
        tmp_path / 'c.tif', np.concatenate([GROUND, GROUND[:1]]), ('b8', 'B03', 'B2', 'b4')
    )
    assert open_scene(more, names=names).bands == (3, 4, 1)
    colors = [ColorInterp.blue, ColorInterp.green, ColorInterp.red]
    bgr = write(tmp_path / 'd.tif', GROUND, colors=colors)
    assert open_scene(bgr, names=('red', 'green', 'blue')).bands == (3, 2, 1)


@pytest.mark.parametrize(
    'names',
    [
        ('', '', ''),
        ('Band 1', 'Band 2', 'Band 3'),
        ('rot', 'rot', 'blau'),
        ('B02', None, 'B08'),
        ('红', '绿', '近红外'),
    ],
)
def test_names_that_say_nothing_leave_the_order(
    tmp_path: Path, names: Sequence[Optional[str]]
) -> None:
    path = write(tmp_path / 'a.tif', GROUND, names)
    raster = open_scene(path, names=('B02', 'B04', 'B08'), strict=True)
    assert raster.bands == (1, 2, 3) and not facts_of(raster).reordered


def test_bands_that_only_some_files_name(tmp_path: Path) -> None:
    names = ('B02', 'B04', 'B08')
    for first, second in ((0, 1), (1, 0)):
        paths = [
            write(tmp_path / 'named.tif', GROUND, names),
            write(tmp_path / 'unnamed.tif', GROUND),
        ]
        last = write(tmp_path / 'reversed.tif', GROUND[::-1], names[::-1])
        scenes = [*open_scenes([paths[first], paths[second], last], None, (), 'stored')]
        assert [scene.bands for scene in scenes] == [(1, 2, 3), (1, 2, 3), (3, 2, 1)]
        unnamed, moved = describe_reading(scenes)
        assert unnamed == f'{paths[1]}: bands without names are read in their order'
        assert moved == f'{last}: bands are read in the order B02, B04, B08, by their names'


def test_a_band_that_is_missing(tmp_path: Path) -> None:
    path = write(tmp_path / 'a.tif', GROUND, ('B02', 'B04', 'B11'))
    with pytest.raises(GeoError, match=r'no band B08.*B02, B04, B11.*--bands'):
        open_scene(path, names=('B02', 'B04', 'B08'), strict=True)
    assert open_scene(path, names=('B02', 'B04', 'B08')).bands == (1, 2, 3)


@pytest.mark.parametrize(
    ('crs', 'origin', 'expected'),
    [
        ('EPSG:32633', (5e5, 5.4e6, 10, 10), 10.0),
        ('EPSG:3857', (1e6, 8399737.9, 10, 10), 5.0),
        ('EPSG:4326', (11.5, 60.0, 1e-4, 1e-4), 11.132 * math.sqrt(0.5)),
        ('EPSG:2263', (1e6, 2e5, 10, 10), 3.048),
        (None, (), None),
    ],
)
def test_sizes_of_pixels(
    tmp_path: Path, crs: Optional[str], origin: Any, expected: Optional[float]
) -> None:
    facts = facts_of(open_scene(write(tmp_path / 'a.tif', crs=crs, origin=origin)))
    assert facts.pixel == (expected if expected is None else pytest.approx(expected, rel=0.01))


def test_mosaics(tmp_path: Path) -> None:
    east = (5e5 + 960, 5.4e6, 10, 10)
    first = write(tmp_path / 'a.tif', GROUND, ('B02', 'B04', 'B08'), 1e-4, 0)
    second = write(
        tmp_path / 'b.tif', GROUND[::-1] + 1000, ('B08', 'B04', 'B02'), 1e-4, -0.1, origin=east
    )
    with pytest.raises(GeoError, match=r"scale 0.0001 and offset -0.1.*units='harmonized'"):
        Mosaic([first, second])
    mosaic = Mosaic([first, second], units='harmonized')
    values = mosaic.read(0, 0, 192, 64)[0]
    np.testing.assert_array_equal(values[:, :, :96], values[:, :, 96:])
    applied, order = describe_reading(mosaic.scenes)
    assert '1000 taken off in 1 of 2' in applied
    assert 'b.tif: bands are read in the order B02, B04, B08' in order


def test_a_mosaic_of_another_number_of_bands_is_an_error(tmp_path: Path) -> None:
    first = write(tmp_path / 'a.tif', GROUND, scale=1e-4, offset=0)
    second = write(tmp_path / 'b.tif', np.concatenate([GROUND, GROUND[:1]]), scale=1e-4, offset=0)
    with pytest.raises(GeoError, match='band'):
        Mosaic([first, second])


def test_unknown_units(tmp_path: Path) -> None:
    with pytest.raises(GeoError, match=r"units='toa'.*stored, reflectance, harmonized"):
        open_scene(write(tmp_path / 'a.tif'), units='toa')
