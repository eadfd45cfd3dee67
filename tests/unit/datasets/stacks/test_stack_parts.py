"""Dates, lists of STAC items, dropped dates, and statistics of sensors."""

from __future__ import annotations

import datetime
import json
import sys

import numpy as np
import pytest
import rasterio
import torch
from geo_scenes import write_raster
from packages_here import package_folder
from stack_files import (
    DATES,
    PIPELINE,
    SENSORS,
    SIZE,
    build_stacks,
    grid,
    one_sensor,
    write_list,
    write_place,
)
from support import main_leg

from mapsage.datasets import DropDates
from mapsage.datasets.stacks.statistics import (
    format_config,
    sensor_statistics,
    sensor_wavelengths,
)
from mapsage.extras.streaming.cache.keys import sample_hashes
from mapsage.geo import GeoError
from mapsage.geo.places.dates import parse_date, spread_evenly
from mapsage.geo.stacks import day_number


@pytest.mark.parametrize(
    'text, date, unclear',
    [
        ('20240229', (2024, 2, 29), False),
        ('2024-01-31T10:20:30Z', (2024, 1, 31), False),
        ('20231231T233000', (2023, 12, 31), True),
        ('20231231T233000Z', (2023, 12, 31), False),
        ('2023-12-31T23:30:00-05:00', (2024, 1, 1), False),
        ('2024-01-01T00:30:00+0200', (2023, 12, 31), False),
        ('2024-01-01T12:00:00.123456', (2024, 1, 1), True),
        ('2024-06-30T23:59:59', (2024, 6, 30), False),
        ('19000101', (1900, 1, 1), False),
    ],
)
def test_a_date_is_in_utc(text, date, unclear):
    assert parse_date(text) == (datetime.date(*date), unclear)


@pytest.mark.parametrize(
    'text',
    [
        '',
        'May',
        '2024',
        '202402',
        '20240230',
        '2024-0131',
        '20241301',
        '18500101',
        '1900-01-01T00:30+02:00',
        '99991231T230000',
        '00010101T000000+1000',
    ],
)
def test_other_texts_are_no_dates(text):
    with pytest.raises(ValueError, match='is no date'):
        parse_date(text)


def test_dates_are_spread_evenly():
    assert [spread_evenly(range(10), count) for count in (1, 2, 4, 10, 12)] == [
        [5],
        [0, 9],
        [0, 3, 6, 9],
        list(range(10)),
        list(range(10)),
    ]
    for total in range(1, 30):
        for count in range(1, total):
            chosen = spread_evenly(range(total), count)
            assert len(set(chosen)) == count and chosen == sorted(chosen)


def items(band_files):
    """Return STAC items of the optical images, with an asset a band or one for all."""
    features = []
    for date in DATES:
        assets = (
            {str(band): dict(href=f'bands/a_{date}_{band}.tif') for band in (1, 2, 3)}
            if band_files
            else dict(image=dict(href=f's2/a_{date}.tif', roles=['data']))
        )
        features.append(
            dict(
                type='Feature',
                id=date,
                collection='s2',
                assets=dict(assets, thumbnail=dict(href='a.png', roles=['thumbnail'])),
                properties=dict(datetime=f'{date[:4]}-{date[4:6]}-{date[6:]}T10:00:00Z', place='a'),
            )
        )
    return dict(type='FeatureCollection', features=features)


@pytest.mark.parametrize('band_files', [False, True])
def test_stac_items_name_the_files(tmp_path, band_files):
    values = write_place(tmp_path)
    for date in DATES:
        for band in range(3):
            write_raster(
                tmp_path / f'bands/a_{date}_{band + 1}.tif', values[f's2 {date}'][band], grid()
            )
    (tmp_path / 'items.json').write_text(json.dumps(items(band_files)))
    expected = build_stacks(tmp_path, sensors=one_sensor())
    dataset = build_stacks(tmp_path, sensors=one_sensor(), places='items.json')
    assert torch.equal(dataset[2]['inputs'], expected[2]['inputs'])
    assert dataset[2]['data_samples'].days == expected[2]['data_samples'].days


@pytest.mark.parametrize(
    'properties, expected',
    [
        (
            dict(start_datetime='2024-01-01T00:00:00Z', end_datetime='2024-01-31T23:59:59Z'),
            '2024-01-16',
        ),
        (
            dict(
                datetime=None,
                start_datetime='2023-12-16T00:00:00Z',
                end_datetime='2024-01-15T00:00:00Z',
            ),
            '2023-12-31',
        ),
        (
            dict(
                datetime='2024-01-05T10:00:00Z',
                start_datetime='2024-01-01T00:00:00Z',
                end_datetime='2024-01-31T00:00:00Z',
            ),
            '2024-01-05',
        ),
        (dict(start_datetime='2024-01-01T00:00:00Z'), '2024-01-01'),
        (dict(start_datetime='2024-01-03T00:00:00Z', end_datetime='2024-01-01T00:00:00Z'), None),
    ],
)
def test_the_middle_of_a_range_of_days_is_the_date_of_an_item(tmp_path, properties, expected):
    write_place(tmp_path)
    content = items(False)
    content['features'] = content['features'][:1]
    content['features'][0]['properties'] = dict(properties, place='a')
    (tmp_path / 'items.json').write_text(json.dumps(content))
    if expected is None:
        with pytest.raises(GeoError, match="'20240115' has start_datetime 2024-01-03.*not bef"):
            build_stacks(tmp_path, sensors=one_sensor(), places='items.json')
        return
    sample = build_stacks(tmp_path, sensors=one_sensor(), places='items.json')[0]
    assert sample['data_samples'].days[0] == day_number(datetime.date.fromisoformat(expected))


@main_leg
@pytest.mark.parametrize('kind', ['table', 'bands', 'image'])
def test_a_parquet_file_names_the_files(tmp_path, kind, monkeypatch):
    """A table with the columns of a CSV, or STAC items as stac-geoparquet writes them."""
    monkeypatch.syspath_prepend(package_folder('pyarrow'))
    import pyarrow
    from pyarrow import parquet

    values = write_place(tmp_path)
    for date in DATES:
        for band in range(3):
            write_raster(
                tmp_path / f'bands/a_{date}_{band + 1}.tif', values[f's2 {date}'][band], grid()
            )
    if kind == 'table':
        rows = [
            dict(
                place='a',
                sensor='s2',
                path=f's2/a_{date}.tif',
                geometry=b'',
                date=datetime.datetime.strptime(date, '%Y%m%d').date(),
            )
            for date in DATES
        ]
    else:
        rows = [
            dict(
                {name: value for name, value in item.items() if name != 'properties'},
                place='a',
                geometry=b'',
                datetime=datetime.datetime.strptime(str(item['id']), '%Y%m%d').replace(
                    tzinfo=datetime.timezone.utc
                ),
            )
            for item in items(kind == 'bands')['features']
        ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), str(tmp_path / 'list.parquet'))
    expected = build_stacks(tmp_path, sensors=one_sensor())
    dataset = build_stacks(tmp_path, sensors=one_sensor(), places='list.parquet')
    assert torch.equal(dataset[2]['inputs'], expected[2]['inputs'])
    assert dataset[2]['data_samples'].days == expected[2]['data_samples'].days
    (tmp_path / 'list.parquet').write_bytes(b'no table')
    with pytest.raises(GeoError, match='list.parquet cannot be read'):
        build_stacks(tmp_path, sensors=one_sensor(), places='list.parquet')


def test_a_parquet_file_without_pyarrow_is_an_error_that_names_it(tmp_path, monkeypatch):
    write_place(tmp_path)
    (tmp_path / 'list.parquet').write_bytes(b'')
    monkeypatch.setitem(sys.modules, 'pyarrow', None)
    with pytest.raises(GeoError, match='needs pyarrow: pip install pyarrow; or convert the list'):
        build_stacks(tmp_path, sensors=one_sensor(), places='list.parquet')


def test_files_of_bands_are_found_by_pattern(tmp_path):
    values = write_place(tmp_path)
    for date in DATES:
        for name, band in zip(('B02', 'B03', 'B04', 'B99'), (0, 1, 2, 0)):
            write_raster(
                tmp_path / f'bands/a_{date}_{name}.tif', values[f's2 {date}'][band], grid()
            )
    sensors = dict(
        s2=dict(scenes='bands/{place}_{date}_{band}.tif', bands=['B02', 'B03', 'B04'], max_dates=3)
    )
    expected = build_stacks(tmp_path, sensors=one_sensor())[1]['inputs']
    assert torch.equal(build_stacks(tmp_path, sensors=sensors)[1]['inputs'], expected)
    (tmp_path / f'bands/a_{DATES[1]}_B03.tif').unlink()
    with pytest.raises(GeoError, match=r'no file of band\(s\) B03'):
        build_stacks(tmp_path, sensors=sensors)


@pytest.mark.parametrize(
    'content, message',
    [
        (b'{"features": [', 'items.json is not JSON .*expected STAC items'),
        (b'[1, 2]', 'entry 1, is no STAC item: 1; expected'),
        (b'[{"id": "x", "properties": [], "assets": {}}]', 'entry 1, is no STAC item'),
        (
            json.dumps(
                [
                    dict(
                        id='x',
                        collection='s2',
                        properties=dict(place='a'),
                        assets=dict(image='s2/a.tif'),
                    )
                ]
            ).encode(),
            "no asset 'image' with a href",
        ),
        ('[{"id": "\u9ea6"}]'.encode('gbk'), 'is not in UTF-8 .*iconv -f GBK'),
    ],
)
def test_files_that_are_no_items_are_errors(tmp_path, content, message):
    write_place(tmp_path)
    (tmp_path / 'items.json').write_bytes(content)
    with pytest.raises(GeoError, match=message):
        build_stacks(tmp_path, sensors=one_sensor(), places='items.json')


def test_items_of_no_sensor_and_without_a_place_are_errors(tmp_path):
    write_place(tmp_path)
    content = items(False)
    content['features'][1]['collection'] = 'landsat'
    (tmp_path / 'items.json').write_text(json.dumps(content))
    with pytest.raises(GeoError, match='belongs to no sensor of the config'):
        build_stacks(tmp_path, sensors=one_sensor(), places='items.json')
    content = items(False)
    del content['features'][0]['properties']['place']
    (tmp_path / 'items.json').write_text(json.dumps(content))
    with pytest.raises(GeoError, match='names no place'):
        build_stacks(tmp_path, sensors=one_sensor(), places='items.json')


def test_dropped_dates_leave_the_others_in_order(tmp_path):
    values = write_place(tmp_path)
    pipeline = [*PIPELINE[:2], dict(type='DropDates', prob=0.6), PIPELINE[2]]
    dataset = build_stacks(tmp_path, pipeline=pipeline)
    # Sensors are in the order of their names: two dates of radar with two bands each come first.
    days = build_stacks(tmp_path)[0]['data_samples'].days[2:]
    counts = set()
    for seed in range(12):
        np.random.seed(seed)
        sample = dataset[0]
        remaining = sample['data_samples'].days[2:]
        count = sum(day > 0 for day in remaining)
        counts.add(count)
        chosen = [days.index(day) for day in remaining[:count]]
        assert count >= 1 and chosen == sorted(chosen) and not any(remaining[count:])
        for position, old in enumerate(chosen):
            assert np.array_equal(
                sample['inputs'][4 + 3 * position : 7 + 3 * position],
                values[f's2 {DATES[old]}'][:, :32, :32],
            )
        assert not sample['inputs'][4 + 3 * count : 13].any()
        assert sample['inputs'][15:18, 0, 0].tolist() == [1.0] * count + [0.0] * (3 - count)
        np.random.seed(seed)
        assert torch.equal(dataset[0]['inputs'], sample['inputs'])
    assert counts == {1, 2, 3}
    with pytest.raises(ValueError, match='expected a probability'):
        DropDates(1.5)


def test_pixels_without_a_remaining_date_are_ignored(tmp_path):
    values = write_place(tmp_path, dates=DATES[:2], radar_dates=())
    image = values[f's2 {DATES[0]}'].copy()
    image[:, :5] = 0
    write_raster(tmp_path / f's2/a_{DATES[0]}.tif', image, grid(), nodata=0)
    dataset = build_stacks(
        tmp_path,
        sensors=one_sensor(),
        pipeline=[*PIPELINE[:2], dict(type='DropDates', prob=1.0), PIPELINE[2]],
    )
    ignored = set()
    for seed in range(8):
        np.random.seed(seed)
        mask = dataset[0]['data_samples'].gt_sem_seg.data[0].numpy()
        ignored.add(int((mask == 255).sum()))
    assert ignored == {0, 5 * 32}


def test_statistics_are_of_the_clear_pixels_of_all_dates(tmp_path):
    values = write_place(tmp_path)
    classes = np.full((SIZE, SIZE), 4, np.uint8)
    classes[:, :20] = 9
    for date in DATES:
        write_raster(tmp_path / f'scl/a_{date}.tif', classes, grid())
    sensors = dict(
        SENSORS, s2=dict(SENSORS['s2'], clouds=dict(mask='scl/{place}_{date}.tif', clear=[4]))
    )
    statistics = sensor_statistics(build_stacks(tmp_path, sensors=sensors))
    clear = np.concatenate([values[f's2 {date}'][:, :, 20:].reshape(3, -1) for date in DATES], 1)
    assert np.allclose(statistics['s2'].mean, clear.mean(1))
    assert np.allclose(statistics['s2'].std, clear.std(1))
    assert statistics['s1'].pixels == 2 * SIZE * SIZE
    assert format_config(statistics, {}).startswith('mean=dict(s1=[')
    assert format_config(statistics, dict(s2=[0.49, 0.665])).endswith(
        ',\nwavelengths=dict(s2=[0.49, 0.665])'
    )


def test_cached_features_depend_on_every_file_of_a_place(tmp_path):
    write_place(tmp_path)
    before = sample_hashes(build_stacks(tmp_path))
    assert len(set(before)) == 4 and sample_hashes(build_stacks(tmp_path)) == before
    write_raster(
        tmp_path / f's1/a_{DATES[1]}.tif',
        np.ones((2, SIZE // 2, SIZE // 2), 'float32'),
        grid(side=20.0),
    )
    assert not set(before) & set(sample_hashes(build_stacks(tmp_path)))


@pytest.mark.parametrize('by_list', [False, True])
def test_the_date_is_in_a_tag_if_the_name_and_the_list_have_none(tmp_path, by_list):
    values = write_place(tmp_path, dates=DATES[:1], radar_dates=())
    source, path = tmp_path / f's2/a_{DATES[0]}.tif', tmp_path / 's2/a.tif'
    source.rename(path)
    with rasterio.open(path, 'r+') as file:
        file.update_tags(ns='IMAGERY', ACQUISITIONDATETIME='2023-12-31 23:59:58')
    places = write_list(tmp_path / 'list.csv', [('a', 's2', '', 's2/a.tif')]) if by_list else None
    dataset = build_stacks(tmp_path, sensors=one_sensor(scenes='s2/{place}.tif'), places=places)
    expected = day_number(datetime.date(2023, 12, 31))
    assert dataset[0]['data_samples'].days == (expected, 0, 0) and values


def test_wavelengths_are_in_the_tags_of_a_sensor(tmp_path):
    write_place(tmp_path)
    assert sensor_wavelengths(build_stacks(tmp_path)) == {}
    with rasterio.open(tmp_path / f's2/a_{DATES[0]}.tif', 'r+') as file:
        for band in (1, 2, 3):
            file.update_tags(band, ns='IMAGERY', CENTRAL_WAVELENGTH_UM=str(0.4 + band / 10))
    assert sensor_wavelengths(build_stacks(tmp_path)) == dict(s2=pytest.approx([0.5, 0.6, 0.7]))
