"""Datasets of scenes and stacks in one unit and order of bands; scenes of one training compared."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, List

import numpy as np
import pytest
import rasterio
from geo_scenes import UTM, write_raster
from geotiff_data import build_dataset, load_window, write_scene
from rasterio.transform import Affine
from stack_files import DATES, build_stacks, write_place

from mapsage.datasets.geotiff import dataset as dataset_module
from mapsage.datasets.geotiff.summary import summarize
from mapsage.datasets.stacks.dataset import describe_stacks
from mapsage.engine.loading.passports import compare_with_passport, passport_of
from mapsage.geo import GeoError, facts_of
from mapsage.geo.places.file_lists import read_list
from mapsage.geo.places.place_raster import PlaceRaster
from mapsage.geo.places.sensor_files import read_sensors
from mapsage.geo.scene_facts import check_one_unit

EAST = dict(UTM, transform=UTM['transform'] * Affine.translation(300, 0))


def describe(path: Path, offset: float = 0.0, names: Any = None, scale: float = 1e-4) -> None:
    with rasterio.open(path, 'r+') as file:
        file.scales, file.offsets = (scale,) * file.count, (offset,) * file.count
        if names:
            file.descriptions = names


def two_baselines(root: Path) -> np.ndarray:
    """Write one ground before and after the offset; return the values before."""
    values, _ = write_scene(root, values='uint16')
    write_scene(root, 'b', EAST, values='uint16')
    write_raster(root / 'scenes/b.tif', values + np.uint16(1000), EAST)
    describe(root / 'scenes/a.tif')
    describe(root / 'scenes/b.tif', -0.1)
    return values


def warnings_of(dataset: Any) -> str:
    return ' | '.join(text for level, text in summarize(dataset) if level >= logging.WARNING)


def test_baselines_in_one_dataset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = two_baselines(tmp_path)
    with pytest.raises(
        GeoError, match=r"scale 0.0001 and offset -0.1.*'reflectance'.*'harmonized'"
    ):
        build_dataset(tmp_path)
    said: List[str] = []
    monkeypatch.setattr(dataset_module, 'print_log', lambda text, **_: said.append(text))
    for units, scale, dtype in (('harmonized', 1, 'float32'), ('reflectance', 1e-4, 'float32')):
        dataset = build_dataset(tmp_path, units=units)
        half = len(dataset) // 2
        for index in range(half):
            first, second = (load_window(dataset, number)[0] for number in (index, index + half))
            np.testing.assert_allclose(first, second, atol=1e-6)
        image = load_window(dataset, 0)[0]
        assert image.dtype == dtype
        np.testing.assert_allclose(image, values[:, :128, :128] * np.float32(scale), rtol=1e-5)
        assert not warnings_of(dataset)
    assert "units='harmonized': 1000 taken off in 1 of 2 file(s)" in said
    with pytest.raises(GeoError, match='units='):
        build_dataset(tmp_path, units='toa')


def test_fast_copies_are_converted_too(tmp_path: Path) -> None:
    values = two_baselines(tmp_path)
    dataset = build_dataset(
        tmp_path, units='harmonized', fast_copy=dict(folder=str(tmp_path / 'fast'))
    )
    assert str(tmp_path / 'fast') in dataset.scene_facts[1]['pixels']
    image = load_window(dataset, len(dataset) // 2)[0]
    np.testing.assert_array_equal(image, values[:, :128, :128])


def test_bands_in_another_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values, _ = write_scene(tmp_path)
    write_scene(tmp_path, 'b', EAST)
    write_raster(tmp_path / 'scenes/b.tif', values[::-1], EAST)
    describe(tmp_path / 'scenes/a.tif', names=('B02', 'B03', 'B04'), scale=1)
    describe(tmp_path / 'scenes/b.tif', names=('B04', 'B03', 'B02'), scale=1)
    said: List[str] = []
    monkeypatch.setattr(dataset_module, 'print_log', lambda text, **_: said.append(text))
    for bands, order in ((None, slice(None)), ([3, 1], [2, 0])):
        said.clear()
        dataset = build_dataset(tmp_path, bands=bands)
        for index in (0, len(dataset) // 2):
            np.testing.assert_array_equal(
                load_window(dataset, index)[0], values[order][:, :128, :128]
            )
        (text,) = [text for text in said if 'read in the order' in text]
        assert str(tmp_path / 'scenes/b.tif') in text


def test_scenes_that_do_not_belong_together(tmp_path: Path) -> None:
    values, _ = write_scene(tmp_path, values='uint16')
    finer = dict(UTM, transform=UTM['transform'] * Affine.scale(0.1))
    write_scene(tmp_path, 'b', finer, values='uint16')
    assert 'so objects have different sizes' in warnings_of(build_dataset(tmp_path))
    write_scene(tmp_path, 'b', EAST, values='uint16')
    assert not warnings_of(build_dataset(tmp_path))
    write_raster(tmp_path / 'scenes/b.tif', (values * 1e-4).astype('float32'), EAST)
    assert 'another unit' in warnings_of(build_dataset(tmp_path))


def test_stacks_of_two_baselines(tmp_path: Path) -> None:
    values = write_place(tmp_path)
    name = tmp_path / f's2/a_{DATES[2]}.tif'
    describe(tmp_path / f's2/a_{DATES[0]}.tif')
    write_raster(name, values[f's2 {DATES[0]}'] + np.uint16(1000), dict(transform=None))
    with rasterio.open(tmp_path / f's2/a_{DATES[0]}.tif') as first, rasterio.open(
        name, 'r+'
    ) as file:
        file.crs, file.transform = first.crs, first.transform
    describe(name, -0.1)
    with pytest.raises(GeoError, match="units='harmonized'"):
        build_stacks(tmp_path)
    dataset = build_stacks(tmp_path, units='harmonized')
    pixels = dataset.scene_facts[0]['stack'].read(0, 0, 64, 64)[0]
    first, last = dataset.layout.sensors[1], slice(4 + 6, 4 + 9)
    assert first.name == 's2'
    np.testing.assert_array_equal(pixels[4:7], pixels[last])
    passport = passport_of(dataset)
    assert set(passport['parts']) == {'s1', 's2'}
    assert passport['parts']['s2']['days'] == [15, 111, 202]
    assert "'harmonized'" in repr(dataset.scene_facts[0]['stack'])


def test_two_baselines_of_a_stac_list(tmp_path: Path) -> None:
    """The items alone say it: the files have no tags."""
    ground = np.random.RandomState(0).randint(200, 4000, (3, 64, 64)).astype('uint16')
    items = []
    for name, baseline, offset in (('2021', '03.01', 0), ('2023', '05.09', -1000)):
        path = tmp_path / f'{name}.tif'
        write_raster(path, ground - np.int32(offset), UTM)
        band = dict(scale=1e-4, offset=offset * 1e-4)
        asset = {'href': path.name, 'roles': ['data'], 'raster:bands': [band] * 3}
        properties = {
            'place': 'p', 'datetime': f'{name}-06-01T10:00:00Z', 's2:processing_baseline': baseline
        }  # fmt: skip
        items.append(
            dict(
                type='Feature',
                id=name,
                collection='s2',
                properties=properties,
                assets=dict(data=asset),
            )
        )
    path = tmp_path / 'items.json'
    path.write_text(json.dumps(dict(type='FeatureCollection', features=items)))

    def open_place(**units: str) -> PlaceRaster:
        sensors = read_sensors(dict(s2=dict(dict(bands=[1, 2, 3], max_dates=2), **units)))
        return PlaceRaster(read_list(str(path), sensors)[0], sensors)

    place = open_place()
    (text,) = [text for text, _ in describe_stacks([place]) if 'scale or offset' in text]
    assert 'offset 0 (baseline 03.01) (2021.tif)' in text
    assert 'offset -0.1 (baseline 05.09) (2023.tif)' in text
    units = 'offset 0 (baseline 03.01), and .*2023.tif .*offset -0.1 (baseline 05.09)'
    with pytest.raises(GeoError, match=units.replace('(', r'\(').replace(')', r'\)')):
        check_one_unit(facts_of(image) for _, image in place.images())
    harmonized = open_place(units='harmonized').read(0, 0, 64, 64)[0]
    np.testing.assert_array_equal(harmonized[:3], ground)
    np.testing.assert_array_equal(harmonized[3:6], ground)


def test_the_passport_of_a_dataset(tmp_path: Path) -> None:
    write_scene(tmp_path)
    dataset = build_dataset(tmp_path)
    summarize(dataset)
    passport = passport_of(dataset)
    part = passport['parts']['']
    assert part['scenes'] == 1 and part['dtypes'] == ['uint8']
    assert sum(passport['classes'].values()) == pytest.approx(1, abs=1e-3)
    assert str(tmp_path) not in str(passport)
    assert not compare_with_passport(dataset, passport)
    coarse = tmp_path / 'coarse'
    write_scene(coarse, place=dict(UTM, transform=UTM['transform'] * Affine.scale(3)))
    (finding,) = compare_with_passport(build_dataset(coarse), passport)
    assert finding.kind == 'pixel'
