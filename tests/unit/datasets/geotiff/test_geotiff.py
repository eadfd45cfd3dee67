"""Windows and labels from GeoTIFF scenes."""

from __future__ import annotations

import copy
import re
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from geo_scenes import (
    CLASSES,
    PIXELS,
    damage_block,
    draw_classes,
    paint,
    write_raster,
)
from geotiff_data import PIPELINE, build_dataset, load_window, write_scene
from mmengine.config import Config
from mmengine.dataset import ConcatDataset
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
from mmseg.datasets import MultiImageMixDataset
from support import ROOT, check_finished, launch, main_leg, rest_is_long

from mapsage.commands import geotiff_statistics
from mapsage.engine.loading.data_checks import DataError, build_checked, check_labels, explain_error
from mapsage.engine.loading.keyed_loader import KeyedDataset
from mapsage.evaluation import ConfusionMatrixMetric
from mapsage.geo import GeoError, RasterBlockError, write_polygons


@pytest.mark.parametrize('stride', [128, 100])
def test_windows_cover_the_scene_and_carry_its_pixels(tmp_path: Path, stride: int) -> None:
    values, classes = write_scene(tmp_path)
    dataset = build_dataset(tmp_path, stride=stride)
    seen = np.zeros(classes.shape, int)
    for index in range(len(dataset)):
        column, row, side = dataset.get_data_info(index)['window']
        inside = np.s_[row : row + side, column : column + side]
        image, mask = load_window(dataset, index)
        np.testing.assert_array_equal(image, values[(slice(None), *inside)])
        np.testing.assert_array_equal(mask, classes[inside])
        seen[inside] += 1
    assert seen.min() == 1 and len(dataset) == 9
    names = [dataset[i]['data_samples'].img_path for i in range(9)]
    assert len(set(names)) == 9 and names[1] == str(tmp_path / f'scenes/a_{stride}_0.tif')


@pytest.mark.parametrize('window, stride', [(128, 128), (128, 50), (128, 31), (50, 60), (280, 9)])
def test_each_pixel_is_scored_once(tmp_path: Path, window: int, stride: int) -> None:
    values, classes = write_scene(tmp_path)
    values[:, 200:, :90] = 0
    write_raster(tmp_path / 'scenes/a.tif', values, nodata=0)
    dataset = build_dataset(tmp_path, window=window, stride=stride, test_mode=True)
    metric = ConfusionMatrixMetric()
    metric.dataset_meta = dataset.metainfo
    covered = np.zeros(classes.shape, int)
    for index in range(len(dataset)):
        sample = dataset[index]['data_samples']
        sample.pred_sem_seg = sample.gt_sem_seg
        metric.process(None, [sample.to_dict()])
        column, row, _ = dataset.get_data_info(index)['window']
        mask = sample.gt_sem_seg.data[0].numpy()[: 260 - row, : 300 - column]
        here = covered[row : row + window, column : column + window]
        here += mask != 255
        np.testing.assert_array_equal(
            mask[mask != 255], classes[row : row + window, column : column + window][mask != 255]
        )
    metric.evaluate(len(dataset))
    data = values[0] > 0
    assert covered.max() == 1 and not covered[~data].any()
    if stride <= window:
        assert (covered == data).all()
        np.testing.assert_array_equal(np.diag(metric.matrix), np.bincount(classes[data]))


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'int16', 'float32'])
def test_types_and_band_order(tmp_path: Path, dtype: str) -> None:
    values, _ = write_scene(tmp_path, bands=5, values=dtype, photometric='minisblack')
    image, _ = load_window(build_dataset(tmp_path, bands=[5, 2, 4, 1]), 4)
    assert image.dtype == (np.uint8 if dtype == 'uint8' else np.float32)
    np.testing.assert_array_equal(image, values[[4, 1, 3, 0], 128:256, 128:256])


def test_scene_smaller_than_the_window(tmp_path: Path) -> None:
    values, classes = write_scene(tmp_path)
    dataset = build_dataset(tmp_path, window=280)
    assert len(dataset) == 2
    image, mask = load_window(dataset, 1)
    np.testing.assert_array_equal(image[:, :260], values[:, :, 20:])
    np.testing.assert_array_equal(mask[:260], classes[:, 20:])
    assert (mask[260:] == 255).all() and not image[:, 260:].any()


def test_no_data_is_ignored_and_empty_windows_are_left_out(tmp_path: Path) -> None:
    values, classes = write_scene(tmp_path, values='int16')
    values[:, :128] = -1
    values[:, 100, 17] = 7  # one valid pixel in the first window
    values[:, 150:, 290:] = -1
    write_raster(tmp_path / 'scenes/a.tif', values, nodata=-1)
    write_raster(
        tmp_path / 'labels/a.tif', np.where(classes == 2, 9, classes).astype('uint8'), nodata=9
    )
    dataset = build_dataset(tmp_path)
    assert [dataset.get_data_info(i)['window'][:2] for i in range(len(dataset))] == [
        (0, 0),
        (0, 128),
        (128, 128),
        (172, 128),
        (0, 132),
        (128, 132),
        (172, 132),
    ]
    assert (load_window(dataset, 0)[1] != 255).sum() == 1
    expected = np.where(values[0] == -1, 255, np.where(classes == 2, 255, classes))
    np.testing.assert_array_equal(load_window(dataset, 3)[1], expected[128:256, 172:300])


def test_small_windows_do_not_read_a_scene_at_once(tmp_path: Path) -> None:
    values = np.ones((1, 2000, 400), 'float32')
    values[:, 900:1000] = np.nan
    write_raster(tmp_path / 'scenes/a.tif', values, nodata=None)
    tracemalloc.start()
    dataset = build_dataset(tmp_path, labels=None, window=40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(dataset) == 48 * 10  # two rows of windows hold no data
    assert peak < values.nbytes / 2


def test_no_data_everywhere(tmp_path: Path) -> None:
    write_raster(tmp_path / 'scenes/a.tif', np.zeros((3, 200, 200), 'uint8'), nodata=0)
    with pytest.raises(GeoError, match='1 scene.*a.tif.*no valid pixel: all is no-data'):
        build_dataset(tmp_path, labels=None)


def test_scenes_without_georeference_work_in_pixels(tmp_path: Path) -> None:
    _, classes = write_scene(tmp_path, place=PIXELS)
    np.testing.assert_array_equal(load_window(build_dataset(tmp_path), 0)[1], classes[:128, :128])


def test_missing_scenes_and_bands(tmp_path: Path) -> None:
    write_scene(tmp_path)
    with pytest.raises(GeoError, match=r"no scenes in \['absent/\*.tif'\]"):
        build_dataset(tmp_path, scenes='absent/*.tif')
    with pytest.raises(GeoError, match='cannot open .*absent: no such file'):
        build_dataset(tmp_path, scenes='absent')
    with pytest.raises(GeoError, match=r'a\.tif has no band \[4\]'):
        build_dataset(tmp_path, bands=[1, 4])
    write_raster(tmp_path / 'scenes/b.tif', paint(draw_classes(), 2))
    with pytest.raises(GeoError, match=r'differ in their number of bands: .*a\.tif.*b\.tif'):
        build_dataset(tmp_path, labels=None)
    assert len(build_dataset(tmp_path, labels=None, bands=[2, 1])) == 18


@pytest.mark.parametrize(
    'arguments',
    [
        dict(bands=3),
        dict(bands=['red']),
        dict(bands=[1.5]),
        dict(bands='12'),
        dict(window='64'),
        dict(window=64.0),
        dict(stride=32.5),
    ],
)
def test_arguments_that_are_no_whole_numbers(tmp_path: Path, arguments: Any) -> None:
    write_scene(tmp_path)
    name, value = next(iter(arguments.items()))
    with pytest.raises(GeoError, match=f'{name}.*{re.escape(repr(value))}.*expected whole numbers'):
        build_dataset(tmp_path, **arguments)


def test_label_outside_the_classes_is_named(tmp_path: Path) -> None:
    _, classes = write_scene(tmp_path)
    classes[200, 250] = 7
    label = write_raster(tmp_path / 'labels/a.tif', classes)
    dataset = build_dataset(tmp_path)
    with pytest.raises(GeoError) as caught:
        dataset[5]
    message = str(caught.value)
    assert f'labels {label} hold 7' in message and '(172, 128, 128, 128)' in message
    assert '3 classes allow 0 to 2, and 255' in message


def test_labels_that_begin_at_one(tmp_path: Path) -> None:
    _, classes = write_scene(tmp_path)
    write_raster(tmp_path / 'labels/a.tif', (classes + 1) * (classes != 2))
    _, mask = load_window(build_dataset(tmp_path, reduce_zero_label=True), 3)
    np.testing.assert_array_equal(mask, np.where(classes == 2, 255, classes)[128:256, :128])


@pytest.mark.parametrize(
    'nodata, value, left_out',
    [(0, 'file', 0), (0, None, None), (0, 0, 0), (2, None, None), (2, 1, 1), (None, 2, 2)],
)
def test_no_data_of_labels_that_is_a_class(
    tmp_path: Path, nodata: Any, value: Any, left_out: Any, caplog: Any
) -> None:
    _, classes = write_scene(tmp_path)
    write_raster(tmp_path / 'labels/a.tif', classes, nodata=nodata)
    logger = MMLogger.get_current_instance()
    logger.addHandler(caplog.handler)
    try:
        dataset = build_dataset(tmp_path, window=280, label_nodata=value)
    finally:
        logger.removeHandler(caplog.handler)
    _, mask = load_window(dataset, 1)
    expected = np.full((280, 280), 255)
    expected[:260] = np.where(classes == left_out, 255, classes)[:, 20:]
    np.testing.assert_array_equal(mask, expected)
    if (nodata, value) == (0, 'file'):
        count = f'{(classes == 0).sum():,}'
        assert f"is the index of class 'ground': {count} pixels are ignored" in caplog.text
    else:
        assert 'no-data value' not in caplog.text


def test_damaged_block_is_named_through_the_runner(tmp_path: Path) -> None:
    write_scene(tmp_path)
    damage_block(tmp_path / 'scenes/a.tif', 1, 2, 1)
    dataset = build_checked(lambda _: build_dataset(tmp_path), dict(type='GeoTiffDataset'))
    with pytest.raises(RasterBlockError):
        dataset[1]
    with pytest.raises(DataError, match=r'a\.tif: the window .* \(128, 64, 64, 64\)'):
        KeyedDataset(dataset, check_labels, explain_error)[1]


@pytest.mark.parametrize('method', rest_is_long(['fork', 'spawn'], 'fork'))
def test_workers_read_what_the_process_reads(tmp_path: Path, method: str) -> None:
    write_scene(tmp_path)
    write_polygons(tmp_path / 'labels/a.tif', tmp_path / 'map.gpkg', CLASSES, simplify=0)
    dataset = build_dataset(tmp_path, labels='map.gpkg', stride=40)
    expected = [dataset[i] for i in range(len(dataset))]  # the parent has open handles now
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=4,
        num_workers=2 if method == 'fork' else 1,
        prefetch_factor=2,
        persistent_workers=True,
        multiprocessing_context=method,
        collate_fn=list,
    )
    for _ in range(2 if method == 'fork' else 1):
        loaded = [sample for batch in loader for sample in batch]
        assert len(loaded) == len(expected)
        for one, other in zip(loaded, expected):
            assert torch.equal(one['inputs'], other['inputs'])
            assert torch.equal(
                one['data_samples'].gt_sem_seg.data, other['data_samples'].gt_sem_seg.data
            )


def test_copies_of_a_sample_share_the_polygons(tmp_path: Path) -> None:
    """MMSeg's MultiImageMixDataset copies each sample in depth."""
    write_scene(tmp_path)
    write_polygons(tmp_path / 'labels/a.tif', tmp_path / 'map.gpkg', CLASSES, simplify=0)
    dataset = build_dataset(tmp_path, labels='map.gpkg', pipeline=PIPELINE[:2])
    sample = dataset[0]
    copied = copy.deepcopy(sample)
    assert copied['labels'] is sample['labels'] and copied['img'] is not sample['img']
    with DefaultScope.overwrite_default_scope('mmseg'):
        mixed = MultiImageMixDataset(
            ConcatDataset([dataset]),
            [dict(type='RandomMosaic', prob=1.0, img_scale=(128, 128)), PIPELINE[2]],
        )
    assert mixed[0]['inputs'].shape == (3, 256, 256)
    part = copy.deepcopy(dataset)
    path = str(tmp_path / 'map.gpkg')
    assert part.vector_labels[path] is dataset.vector_labels[path]


def test_statistics_command(tmp_path: Path) -> None:
    values, _ = write_scene(tmp_path)
    for name in ('a.tif.aux.xml', 'a.tif.ovr'):  # what a GIS leaves next to a scene
        (tmp_path / 'scenes' / name).write_text('no scene')
    write_raster(tmp_path / 'scenes/B.TIF', values)
    done = launch(
        command=[
            sys.executable,
            str(ROOT / 'tools/geotiff_statistics.py'),
            str(tmp_path / 'scenes'),
            '--bands',
            '3',
            '1',
        ]
    )
    check_finished(done)
    assert '2 scene(s), 156,000 valid pixels' in done.output
    mean, std = values[[2, 0]].mean((1, 2)), values[[2, 0]].std((1, 2))
    assert f'mean=[{mean[0]:.6g}, {mean[1]:.6g}]' in done.output
    assert f'std=[{std[0]:.6g}, {std[1]:.6g}]' in done.output
    with pytest.raises(SystemExit, match='GeoError: cannot open'):  # exit status 1
        geotiff_statistics.main([str(tmp_path / 'absent')])


def _documented_example() -> str:
    text = (ROOT / 'docs/reference/datasets.md').read_text()
    section = text[text.index('## GeoTIFF scenes') :]
    return re.search(r'```python\n(.*?)```', section, re.S).group(1)  # type: ignore[union-attr]


@main_leg
def test_documented_config_trains_and_evaluates(tmp_path: Path) -> None:
    """The example of docs/reference/datasets.md in a config of configs/, on scenes of 4 bands."""
    for name in ('train/a', 'val/b'):
        values = paint(draw_classes(), 4, 'uint16')
        write_raster(tmp_path / f'data/city/{name}.tif', values, photometric='minisblack')
        write_raster(tmp_path / 'map.tif', draw_classes())
    write_polygons(
        tmp_path / 'map.tif', tmp_path / 'data/city/landcover.gpkg', CLASSES, background=0
    )
    example = re.sub(r'\b(512|256)\b', '64', _documented_example())
    assert example.count('64') == 4 and "'data/city'" in example
    example = example.replace("'data/city'", repr(str(tmp_path / 'data/city')))
    config = tmp_path / 'config.py'
    base = ROOT / 'configs/loveda/efficientnet_lite0_fpn_loveda.py'
    config.write_text(
        f"_base_ = '{base}'\n" + example + 'train_cfg = dict(max_iters=2, val_interval=2)\n'
    )
    done = launch(
        command=[
            sys.executable,
            str(ROOT / 'tools/train.py'),
            str(config),
            '--work-dir',
            str(tmp_path / 'work'),
        ]
    )
    check_finished(done)
    assert 'mIoU' in done.output and 'water' in done.output
    assert 'EfficientNetLite: ImageNet weights' in done.output
    assert 'size mismatch' not in done.output


@pytest.mark.parametrize('dtype', ['uint8', 'int16', 'uint16'])
@pytest.mark.usefixtures('mmseg_scope')
def test_codes_of_label_rasters_become_classes(dtype: str, tmp_path: Path) -> None:
    """Codes as in ESA WorldCover; two may be one class, and None means no label."""
    _, classes = write_scene(tmp_path)
    codes = np.array([10, 50, 80], dtype)[classes]
    codes[:5], codes[5:9] = 40, 95
    write_raster(tmp_path / 'labels/a.tif', codes)
    label_map = {10: 'ground', 50: 1, 80: 'water', 40: 'water', 95: None}
    dataset = build_dataset(tmp_path, label_map=label_map)
    expected = classes.copy()
    expected[:5], expected[5:9] = 2, 255
    mask = dataset.read_labels(0, 100, 0, 128)
    np.testing.assert_array_equal(mask, expected[:128, 100:228])
    _, loaded = load_window(dataset, 0)
    np.testing.assert_array_equal(loaded, expected[:128, :128])
    del label_map[40]
    with pytest.raises(GeoError, match=r"hold 40 \(.*it has \[10, 50, 80, 95\]. Add 40: 'CLASS'"):
        build_dataset(tmp_path, label_map=label_map).read_labels(0, 0, 0, 128)
    for wrong, words in (
        ({10: 'tree'}, "has 'tree' for 10: expected a class of"),
        ({}, 'expected'),
    ):
        with pytest.raises(GeoError, match=words):
            build_dataset(tmp_path, label_map=wrong)


def test_a_config_file_may_hold_codes(tmp_path: Path) -> None:
    path = tmp_path / 'a.py'
    path.write_text("dataset = dict(label_map={10: 'tree', 20: None})\n")
    cfg = Config.fromfile(path)
    cfg.merge_from_dict({'dataset.window': 3})
    cfg.dump(tmp_path / 'b.py')
    assert dict(Config.fromfile(tmp_path / 'b.py').dataset.label_map) == {10: 'tree', 20: None}
