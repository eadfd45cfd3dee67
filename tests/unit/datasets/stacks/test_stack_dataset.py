"""Windows of several dates and sensors hold the values of the files, at the right channels."""

from __future__ import annotations

import logging
import pickle

import numpy as np
import pytest
import torch
from affine import Affine
from geo_scenes import write_raster
from mmengine.registry import MODELS, DefaultScope
from rasterio.vrt import WarpedVRT
from stack_files import (
    DATES,
    METAINFO,
    SENSORS,
    SIZE,
    build_stacks,
    grid,
    one_sensor,
    write_list,
    write_place,
)

from mapsage.datasets import GeoTiffDataset
from mapsage.datasets.stacks.dataset import describe_stacks
from mapsage.geo import GeoError
from mapsage.geo.gdal_files import open_file
from mapsage.geo.places.file_lists import list_text
from mapsage.geo.places.sensor_files import read_sensors
from mapsage.geo.stacks import StackLayoutError, calendar


def batch_of(dataset, *indices, **settings):
    """Return the model's input and the samples of some windows."""
    settings = dict(dict(type='StackDataPreProcessor', sensors=SENSORS, size_divisor=1), **settings)
    with DefaultScope.overwrite_default_scope('mmseg'):
        preprocessor = MODELS.build(settings)
    samples = [dataset[index] for index in indices]
    batch = preprocessor(
        dict(
            inputs=[sample['inputs'] for sample in samples],
            data_samples=[sample['data_samples'] for sample in samples],
        ),
        True,
    )
    return preprocessor.layout, batch['inputs'], samples


def test_a_window_holds_all_dates_of_all_sensors(tmp_path):
    values = write_place(tmp_path)
    dataset = build_stacks(tmp_path)
    layout, inputs, samples = batch_of(dataset, 3)
    assert len(dataset) == 4 and inputs.dtype == torch.float32
    assert inputs.shape == (1, layout.input_channels, 32, 32)
    stack = layout.split(inputs)
    s2, s1 = stack.sensors['s2'], stack.sensors['s1']
    for number, date in enumerate(DATES):
        assert np.array_equal(s2.pixels[0, number], values[f's2 {date}'][:, 32:, 32:])
    assert s2.valid.all() and s1.valid.all()
    # Radar is interpolated as GDAL does it.
    with open_file(tmp_path / f's1/a_{DATES[1]}.tif') as file, WarpedVRT(
        file, width=SIZE, height=SIZE, resampling=1, **grid()
    ) as warped:
        assert np.allclose(s1.pixels[0, 1], warped.read()[:, 32:, 32:], atol=1e-4)
    assert [part.tolist() for part in calendar(s2.days)] == [
        [[2024, 2024, 2024]],
        [[1, 4, 7]],
        [[15, 20, 20]],
    ]
    assert float(stack.longitude) == pytest.approx(15.0065, abs=1e-3)
    assert float(stack.latitude) == pytest.approx(48.747, abs=1e-2)
    mask = samples[0]['data_samples'].gt_sem_seg.data[0]
    assert np.array_equal(mask, values['labels'][32:, 32:])


def test_one_sensor_and_one_date_are_the_bits_of_a_scene(tmp_path):
    write_place(tmp_path, dates=DATES[:1])
    stacks = build_stacks(tmp_path, sensors=one_sensor(max_dates=1), windows=dict(type='random'))
    pipeline = [
        dict(type=name) for name in ('LoadGeoTiffWindow', 'LoadGeoTiffLabels', 'PackSegInputs')
    ]
    with DefaultScope.overwrite_default_scope('mmseg'):
        (tmp_path / f's2/a_{DATES[0]}.tif').rename(tmp_path / 's2/a.tif')
        scenes = GeoTiffDataset(
            scenes='s2',
            data_root=str(tmp_path),
            window=32,
            labels='labels',
            windows=dict(type='random'),
            metainfo=METAINFO,
            pipeline=pipeline,
        )
        (tmp_path / 's2/a.tif').rename(tmp_path / f's2/a_{DATES[0]}.tif')
        statistics = dict(mean=[1500.0, 1700.0, 900.0], std=[300.0, 70.0, 17.0])
        plain = MODELS.build(dict(type='BandDataPreProcessor', **statistics))
    for index in range(3):
        np.random.seed(index)
        stack = stacks[index]
        np.random.seed(index)
        (tmp_path / f's2/a_{DATES[0]}.tif').rename(tmp_path / 's2/a.tif')
        scene = scenes[index]
        (tmp_path / 's2/a.tif').rename(tmp_path / f's2/a_{DATES[0]}.tif')
        assert torch.equal(stack['inputs'][:3], scene['inputs'])
        assert torch.equal(
            stack['data_samples'].gt_sem_seg.data, scene['data_samples'].gt_sem_seg.data
        )
        expected = plain(dict(inputs=[scene['inputs']], data_samples=[scene['data_samples']]))
        _, inputs, _ = batch_of(
            [stack],
            0,
            sensors=one_sensor(max_dates=1),
            **{name: dict(s2=list(value)) for name, value in statistics.items()},
        )
        assert torch.equal(inputs[:, :3], expected['inputs'])


def test_missing_dates_and_sensors_are_zero_and_invalid(tmp_path):
    write_place(tmp_path)
    write_place(tmp_path, 'b', 1, DATES[1:], ())
    layout, inputs, samples = batch_of(
        build_stacks(tmp_path),
        4,
        mean=dict(s2=[9.0, 9.0, 9.0], s1=[9.0, 9.0]),
        std=dict(s2=[2.0, 2.0, 2.0], s1=[2.0, 2.0]),
    )
    stack = layout.split(inputs)
    s2, s1 = stack.sensors['s2'], stack.sensors['s1']
    assert samples[0]['data_samples'].img_path.endswith('b_0_0.tif')
    assert s2.valid[0, :2].all() and not s2.valid[0, 2].any() and not s1.valid.any()
    assert not s2.pixels[0, 2].any() and not s1.pixels.any()
    assert s2.days[0, 2] == 0 and not s1.days.any() and (s2.days[0, :2] > 0).all()


@pytest.mark.parametrize('by_band', [False, True])
def test_clouded_pixels_are_invalid(tmp_path, by_band):
    values = write_place(tmp_path)
    classes = np.full((SIZE // 2, SIZE // 2), 4, np.uint8)
    classes[:8, :4] = 9
    if by_band:
        classes = classes.repeat(2, 0).repeat(2, 1)
        for date in DATES:
            write_raster(
                tmp_path / f's2/a_{date}.tif',
                np.concatenate([values[f's2 {date}'], classes[None].astype('uint16')]),
                grid(),
            )
        clouds = dict(band=4, clear=[4, 5])
    else:
        for date in DATES:
            write_raster(tmp_path / f's2/a_{date}_scl.tif', classes, grid(side=20.0))
        clouds = dict(mask='s2/{place}_{date}_scl.tif', clear=[4, 5])
    dataset = build_stacks(tmp_path, sensors=one_sensor(clouds=clouds))
    layout, inputs, samples = batch_of(dataset, 0, sensors=one_sensor())
    s2 = layout.split(inputs).sensors['s2']
    clear = np.ones((32, 32), bool)
    clear[:16, :8] = False
    assert np.array_equal(s2.valid[0, 1], clear)
    assert np.array_equal(s2.pixels[0, 1], values[f's2 {DATES[1]}'][:, :32, :32] * clear)
    # All dates are clouded there, so the label does not count.
    mask = samples[0]['data_samples'].gt_sem_seg.data[0].numpy()
    assert (mask[~clear] == 255).all()
    assert np.array_equal(mask[clear], values['labels'][:32, :32][clear])


def test_windows_that_are_clouded_at_all_dates_are_left_out(tmp_path):
    write_place(tmp_path)
    classes = np.zeros((SIZE, SIZE), np.uint8)
    classes[:32, :32] = 9
    for date in DATES:
        write_raster(tmp_path / f'scl/a_{date}.tif', classes, grid())
    clouds = dict(mask='scl/{place}_{date}.tif', clear=[0])
    assert len(build_stacks(tmp_path, sensors=one_sensor(clouds=clouds))) == 3
    with pytest.raises(GeoError, match='hold no valid pixel'):
        build_stacks(tmp_path, sensors=one_sensor(clouds=dict(clouds, clear=[7])))


def test_a_place_that_is_clouded_at_all_dates_names_its_masks(tmp_path):
    write_place(tmp_path)
    for date in DATES:
        write_raster(tmp_path / f'scl/a_{date}.tif', np.full((SIZE, SIZE), 9, 'uint8'), grid())
    clouds = dict(mask='scl/{place}_{date}.tif', clear=[4, 5])
    with pytest.raises(
        GeoError,
        match=r"all is clouded .* 's2' counts the classes \[4, 5\] as "
        r'clear; .* in .*scl/a_20240115.tif',
    ):
        build_stacks(tmp_path, sensors=one_sensor(clouds=clouds))


def test_of_many_dates_those_evenly_spread_are_used(tmp_path):
    dates = [f'2024{month:02}10' for month in range(1, 11)]
    write_place(tmp_path, dates=dates)
    dataset = build_stacks(tmp_path, sensors=one_sensor(max_dates=4))
    stack = dataset.scene_facts[0]['stack']
    assert [image.date.month for image in stack.place.images['s2']] == [1, 4, 7, 10]
    assert stack.place.unused == dict(s2=6)


def test_a_list_names_the_files(tmp_path):
    write_place(tmp_path)
    rows = [
        (
            'field',
            's2',
            date[:4] + '-' + date[4:6] + '-' + date[6:] + 'T10:00:00Z',
            f's2/a_{date}.tif',
            'labels/a.tif',
        )
        for date in DATES
    ]
    rows += [('field', 's1', DATES[0], f's1/a_{DATES[0]}.tif', '')]
    name = write_list(tmp_path / 'places.csv', rows, 'place,sensor,date,path,labels')
    by_list = build_stacks(tmp_path, places=name, labels=None)
    (tmp_path / f's1/a_{DATES[1]}.tif').unlink()
    by_pattern = build_stacks(tmp_path)
    assert torch.equal(by_list[1]['inputs'], by_pattern[1]['inputs'])
    assert by_list[1]['data_samples'].days == by_pattern[1]['data_samples'].days
    assert torch.equal(
        by_list[1]['data_samples'].gt_sem_seg.data, by_pattern[1]['data_samples'].gt_sem_seg.data
    )


def test_a_place_is_read_alike_in_another_process_and_from_fast_copies(tmp_path):
    write_place(tmp_path)
    dataset = build_stacks(tmp_path)
    stack = dataset.scene_facts[0]['stack']
    expected = stack.read(-5, 20, 40, 60)
    assert expected[0].shape == (18, 60, 40)
    for values, other in zip(expected, pickle.loads(pickle.dumps(stack)).read(-5, 20, 40, 60)):
        assert np.array_equal(values, other)
    copied = build_stacks(tmp_path, fast_copy=dict(folder=str(tmp_path / 'copies')))
    assert len(list((tmp_path / 'copies').glob('*/*.tif'))) == 6
    for index in range(4):
        assert torch.equal(copied[index]['inputs'], dataset[index]['inputs'])


def test_split_and_random_windows_treat_a_place_like_a_scene(tmp_path):
    for number, name in enumerate('ab'):
        write_place(tmp_path, name, number)
    split = dict(by='blocks', size=160, unit='meters', share=0.4, seed=1)
    train, val = (
        build_stacks(tmp_path, split=dict(split, part=part), test_mode=part == 'val')
        for part in ('train', 'val')
    )
    counted = {}
    for dataset in (train, val):
        for index in range(len(dataset)):
            info = dataset.get_data_info(index)
            mask = dataset[index]['data_samples'].gt_sem_seg.data[0].numpy()
            for row, column in np.argwhere(mask != 255):
                key = info['scene'], info['window'][0] + column, info['window'][1] + row
                assert key not in counted
                counted[key] = True
    assert len(counted) == 2 * SIZE * SIZE
    random = build_stacks(tmp_path, windows=dict(type='random', balance='classes', per_epoch=5))
    assert len(random) == 5
    np.random.seed(0)
    first = random[0]
    np.random.seed(0)
    assert torch.equal(first['inputs'], random[0]['inputs'])


def test_another_grid_is_that_of_the_labels(tmp_path):
    values = write_place(tmp_path)
    write_raster(tmp_path / 'labels/a.tif', values['labels'][::2, ::2], grid(side=20.0))
    with pytest.raises(GeoError, match='64 x 64; expected the same grid'):
        build_stacks(tmp_path)
    dataset = build_stacks(tmp_path, grid='labels')
    layout, inputs, _ = batch_of(dataset, 0)
    assert len(dataset) == 1
    assert np.array_equal(layout.split(inputs).sensors['s1'].pixels[0, 0], values[f's1 {DATES[0]}'])


def log_of(caplog, build):
    with caplog.at_level(logging.INFO):
        build()
    return caplog.text


def test_the_log_says_what_is_interpolated_missing_and_unused(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(
        'mapsage.datasets.stacks.dataset.print_log',
        lambda text, level=0, **_: logging.log(level, text),
    )
    write_place(tmp_path)
    # The same ground in another zone.
    write_place(tmp_path, 'b', 1, DATES[:1], ())
    source = tmp_path / f's2/b_{DATES[0]}.tif'
    with open_file(source) as file, WarpedVRT(file, crs='EPSG:32632', resampling=1) as warped:
        values, transform, crs = warped.read(), warped.transform, warped.crs
    write_raster(tmp_path / f's2/b_{DATES[1]}.tif', values, dict(crs=crs, transform=transform))
    write_raster(tmp_path / 's2/c_20231231T233000.tif', values, grid(3))
    write_raster(tmp_path / 'labels/c.tif', values[0].astype('uint8') % 2, grid(3))
    text = log_of(
        caplog,
        lambda: build_stacks(tmp_path, sensors=dict(SENSORS, s2=dict(SENSORS['s2'], max_dates=2))),
    )
    assert '3 file(s) are interpolated onto the grid of their place' in text
    assert '2 (pixels of another size)' in text and '1 (EPSG:32632)' in text
    assert '1 of 3 place(s) have fewer than max_dates=2 images of s2, the fewest 1: c' in text
    assert '1 image(s) of s2 are not used' in text
    assert 'near New Year without a time zone' in text and 'c_20231231T233000.tif' in text


@pytest.mark.parametrize(
    'change, message',
    [
        (
            lambda root: (root / f's2/a_{DATES[0]}.tif').rename(root / 's2/a_summer.tif'),
            "'summer' is no date; expected YYYYMMDD",
        ),
        (
            lambda root: (root / f's2/a_{DATES[0]}.tif').rename(root / 's2/a_20240231.tif'),
            "'20240231' is no date",
        ),
        (
            lambda root: write_raster(
                root / 's2/a_20240601.tif', np.ones((2, SIZE, SIZE), 'uint16'), grid()
            ),
            r'has no band \[3\]',
        ),
        (
            lambda root: write_raster(
                root / 's2/a_20240601.tif', np.ones((3, SIZE, SIZE), 'uint16'), grid(5)
            ),
            'does not overlap',
        ),
        (
            lambda root: write_raster(
                root / 's2/a_20240601.tif',
                np.ones((3, SIZE, SIZE), 'uint16'),
                dict(crs=None, transform=None),
            ),
            'has no georeference',
        ),
        (lambda root: (root / 'labels/a.tif').unlink(), 'needs one label file'),
        (
            lambda root: write_raster(
                root / 'labels/a.tif', np.ones((SIZE, SIZE), 'uint8'), grid(7)
            ),
            'lie up to 7000 pixels off their scene',
        ),
        (
            lambda root: (root / f's2/a_{DATES[0]}.tif').rename(root / 's2/a_18500101.tif'),
            "a_18500101.tif of sensor 's2': '18500101' is no date .*1900",
        ),
    ],
)
def test_files_that_do_not_fit_are_errors(tmp_path, change, message):
    write_place(tmp_path)
    change(tmp_path)
    with pytest.raises(GeoError, match=message):
        build_stacks(tmp_path, sensors=dict(SENSORS, s2=dict(SENSORS['s2'], max_dates=4)))


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(sensors=dict(s2=dict(SENSORS['s2'], scenes='s2/*.tif'))), 'expected a pattern with'),
        (dict(sensors=dict(s2=dict(SENSORS['s2'], cloud=1))), 'has no setting cloud'),
        (dict(sensors=dict(s2=dict(SENSORS['s2'], bands=['B02', 'B03']))), "has no band 'B02'"),
        (
            dict(sensors=dict(s2=dict(SENSORS['s2'], scenes='{place}-{date}.tif'))),
            'no file matches',
        ),
        (dict(grid='s3'), "grid='s3', expected the name of a sensor"),
        (dict(bands=[1]), 'has no bands'),
        (
            dict(sensors=one_sensor(clouds=dict(mask='{place}_{date}.tif', clear=[0]))),
            'has no mask of clouds',
        ),
        (
            dict(sensors=one_sensor(clouds=dict(mask='{place}_{date}.tif', clear=4))),
            'expected dict',
        ),
        (dict(places='none.csv'), 'none.csv cannot be read: .*Check the path'),
    ],
)
def test_settings_that_do_not_fit_are_errors(tmp_path, arguments, message):
    write_place(tmp_path)
    with pytest.raises(GeoError, match=message):
        build_stacks(tmp_path, **arguments)


@pytest.mark.parametrize(
    'rows, columns, message',
    [
        (
            [('a', 's2', DATES[0], 's2/b.tif'), ('a', 's2', DATES[1], 's2/c.tif')],
            'place,sensor,date,path',
            r'names 2 file\(s\) that do not exist: .*b.tif',
        ),
        (
            [('a', 's9', DATES[0], f's2/a_{DATES[0]}.tif')],
            'place,sensor,date,path',
            r'names the sensor\(s\) s9',
        ),
        ([('a', 's2', f's2/a_{DATES[0]}.tif')], 'place,sensor,path', 'has no column date'),
        (
            [('a', 's2', 'May', f's2/a_{DATES[0]}.tif')],
            'place,sensor,date,path',
            "'May' is no date",
        ),
        ([], 'place,sensor,date,path', 'has no rows'),
        ([('a', 's2')], 'place,sensor,date,path', 'has no path in its entry 1: .*Fill the columns'),
        (
            [('../a', 's2', DATES[0], f's2/a_{DATES[0]}.tif')],
            'place,sensor,date,path',
            "place '../a', expected a name without slashes",
        ),
        ([('a;s2',)], 'place;sensor;date;path', 'separated by commas'),
        (
            [
                ('a', 's2', DATES[0], f's2/a_{DATES[0]}.tif', 'labels/a.tif'),
                ('b', 's2', DATES[0], f's2/a_{DATES[1]}.tif', ''),
            ],
            'place,sensor,date,path,labels',
            "place 'b' has no labels in the list",
        ),
        (
            [
                ('a', 's2', f'{DATES[0]}T230000-0200', f's2/a_{DATES[0]}.tif'),
                ('a', 's2', '20240116', f's2/a_{DATES[0]}.tif'),
            ],
            'place,sensor,date,path',
            "two images of sensor 's2' at 2024-01-16: (.*) and \\1",
        ),
        (
            [('a', 's2', '', f's2/a_{date}.tif') for date in DATES[:2]],
            'place,sensor,date,path',
            "two images of sensor 's2' without a date",
        ),
    ],
)
def test_lists_that_do_not_fit_are_errors(tmp_path, rows, columns, message):
    write_place(tmp_path)
    with pytest.raises(GeoError, match=message):
        build_stacks(tmp_path, labels=None, places=write_list(tmp_path / 'list.csv', rows, columns))


def test_a_batch_without_dates_or_of_other_sensors_is_an_error(tmp_path):
    write_place(tmp_path)
    dataset = build_stacks(tmp_path)
    with pytest.raises(StackLayoutError, match='images with .18. channels, expected 12'):
        batch_of(dataset, 0, sensors=one_sensor())
    sample = dataset[0]
    del sample['data_samples'].days
    with pytest.raises(StackLayoutError, match='end the pipelines with PackStackInputs'):
        batch_of([sample], 0)


WEST, EAST = np.s_[:, :, :40], np.s_[:, :, 24:]


def write_tiles(root, folder='tiles', clouds=None):
    """Write two tiles of one day that share 16 columns; return the values of the whole place.

    Args:
        root: Folder with the labels of the place.
        folder: Folder of the tiles. The name of the western one comes first.
        clouds: Rows of the western tile without data, or None.
    """
    random = np.random.RandomState(4)
    west, east = random.randint(1, 4000, (2, 3, SIZE, 40)).astype('uint16')
    if clouds is not None:
        west[:, clouds] = 0
    for name, values, column in (('T102031', west, 0), ('T102040', east, 24)):
        place = grid()
        place['transform'] = place['transform'] * Affine.translation(column, 0)
        write_raster(root / folder / f'a_{DATES[0]}{name}.tif', values, place, nodata=0)
    whole = np.zeros((3, SIZE, SIZE), 'uint16')
    whole[EAST] = east
    whole[WEST] = np.where(west == 0, whole[WEST], west)
    return whole


TILES = dict(s2=dict(SENSORS['s2'], scenes='tiles/{place}_{date}.tif'))


@pytest.mark.parametrize('clouds', [None, np.s_[10:20]])
def test_the_first_tile_of_a_day_that_has_data_counts_at_each_pixel(tmp_path, clouds):
    write_place(tmp_path)
    whole = write_tiles(tmp_path, clouds=clouds)
    dataset = build_stacks(tmp_path, sensors=TILES, grid='labels')
    layout, inputs, _ = batch_of(dataset, 0, 1, 2, 3, sensors=TILES)
    s2 = layout.split(inputs).sensors['s2']
    for number in range(4):
        column, row, side = dataset.get_data_info(number)['window']
        window = np.s_[:, row : row + side, column : column + side]
        assert np.array_equal(s2.pixels[number, 0], whole[window])
        assert np.array_equal(s2.valid[number, 0], (whole[window] > 0).all(0))
        # One date, and the two others are missing.
        assert (s2.days[number] > 0).tolist() == [True, False, False]
        assert not s2.valid[number, 1:].any()
    # Where the western tile lacks data and the eastern one does not reach, nothing is valid.
    assert s2.valid[:, 0].all() == (clouds is None)


def test_clouds_of_a_tile_are_filled_by_the_next_one(tmp_path):
    write_place(tmp_path)
    whole = write_tiles(tmp_path)
    classes = np.full((SIZE, 40), 4, 'uint8')
    for name, column in (('T102031', 0), ('T102040', 24)):
        place = grid()
        place['transform'] = place['transform'] * Affine.translation(column, 0)
        # The western tile is clouded.
        write_raster(tmp_path / f'masks/a_{DATES[0]}{name}.tif', classes + 5 * (column == 0), place)
    sensors = dict(s2=dict(TILES['s2'], clouds=dict(mask='masks/{place}_{date}.tif', clear=[4])))
    stack = build_stacks(tmp_path, sensors=sensors, grid='labels').get_data_info(0)['stack']
    values, valid = stack.read(0, 0, SIZE, SIZE)
    with open_file(tmp_path / f'tiles/a_{DATES[0]}T102040.tif') as file:
        assert np.array_equal(values[:3][EAST], file.read())
    assert not valid[:, :24].any() and valid[:, 24:].all() and not np.array_equal(values[:3], whole)
    assert np.array_equal(stack.read_reduced(4)[1], valid[::4, ::4])


@pytest.mark.parametrize('reverse', [False, True])
def test_tiles_of_a_list_count_in_the_order_of_their_paths(tmp_path, reverse):
    write_place(tmp_path)
    whole = write_tiles(tmp_path)
    rows = [
        ('a', 's2', DATES[0], path)
        for path in sorted(
            (f'tiles/a_{DATES[0]}{name}.tif' for name in ('T102031', 'T102040')), reverse=reverse
        )
    ]
    settings = dict(sensors=one_sensor(), grid='labels', labels='labels')
    dataset = build_stacks(tmp_path, places=write_list(tmp_path / 'list.csv', rows), **settings)
    stack = dataset.get_data_info(0)['stack']
    assert np.array_equal(stack.read(0, 0, SIZE, SIZE)[0][:3], whole)
    assert len(stack.source_paths()) == 2
    # A list of the same place names both files again.
    files = read_sensors(one_sensor())
    text = list_text([(stack.place, str(tmp_path / 'labels/a.tif'))], files)
    (tmp_path / 'again.csv').write_text(text)
    again = build_stacks(tmp_path, places='again.csv', **settings).get_data_info(0)['stack']
    assert text.count('/tiles/') == 2 and np.array_equal(again.read(0, 0, SIZE, SIZE)[0][:3], whole)
    messages = [message for message, _ in describe_stacks([stack])]
    assert any('1 date(s) of s2 have several files' in message for message in messages)


def test_bands_of_several_tiles_belong_together_by_the_order_of_their_paths(tmp_path):
    write_place(tmp_path)
    whole = write_tiles(tmp_path)
    rows = []
    for band in (1, 2, 3):
        for name in ('T102040', 'T102031'):
            with open_file(tmp_path / f'tiles/a_{DATES[0]}{name}.tif') as file:
                place = dict(crs=file.crs, transform=file.transform)
                write_raster(
                    tmp_path / f'bands/{name}_{band}.tif', file.read(band), place, nodata=0
                )
            rows.append(('a', 's2', DATES[0], f'bands/{name}_{band}.tif', str(band)))
    list_name = write_list(tmp_path / 'list.csv', rows, 'place,sensor,date,path,band')
    settings = dict(sensors=one_sensor(), grid='labels', labels='labels')
    stack = build_stacks(tmp_path, places=list_name, **settings).get_data_info(0)['stack']
    assert np.array_equal(stack.read(0, 0, SIZE, SIZE)[0][:3], whole)
    write_list(tmp_path / 'list.csv', rows[:-1], 'place,sensor,date,path,band')
    with pytest.raises(GeoError, match='expected one of each of'):
        build_stacks(tmp_path, places=list_name, **settings)
