"""The loading transforms give the pixels that plain NumPy gives, for every kind of file."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any, Dict, List, Optional

import numpy as np
import pytest
import rasterio
import shapely
from geo_scenes import UTM, draw_classes, paint, rectangle, write_raster
from geotiff_data import build_dataset, write_vector
from rasterio.dtypes import check_dtype

from mapsage.datasets.band_layout import bands_last
from mapsage.datasets.geotiff.transforms import LoadGeoTiffLabels, LoadGeoTiffWindow
from mapsage.geo import GeoError

# Column, row, side: inside of the scene, beyond two of its edges, and before them.
WINDOWS = ((10, 20, 96), (250, 200, 96), (-20, -7, 96))
LABELS = ('uint8', 'int16', 'uint16', 'int32')


def expect_mask(labels: np.ndarray, labeled: np.ndarray, info: Dict[str, Any]) -> np.ndarray:
    """Return the mask of a window by its definition, pixel by pixel, without tables."""
    shift, ignore = int(info['reduce_zero_label']), info['ignore_index']
    mask = np.full(labels.shape, ignore, np.int64)
    for position in zip(*np.nonzero(labeled & (labels != ignore))):
        value = int(labels[position]) - shift
        if value >= 0:
            mask[position] = (info['label_map'] or {}).get(value, value)
    return mask.astype(np.uint8)


def load(dataset: Any, corner: Any, **changes: Any) -> Dict[str, Any]:
    info = dict(dataset._facts(dict(scene=0), 0, 0), window=corner, **changes)
    return LoadGeoTiffLabels().transform(LoadGeoTiffWindow().transform(info))


def crop(values: np.ndarray, corner: Any) -> np.ndarray:
    """Return a window of (..., height, width), with 0 beyond the edges."""
    column, row, side = corner
    padded = np.pad(values, [(0, 0)] * (values.ndim - 2) + [(side, side)] * 2)
    return padded[..., row + side : row + 2 * side, column + side : column + 2 * side]


@pytest.mark.parametrize(
    'dtype, bands, profile',
    [
        ('uint8', 3, {}),
        ('uint8', 1, {}),
        ('uint8', 3, dict(nodata=11)),
        ('uint16', 4, {}),
        ('int16', 2, dict(nodata=-9)),
        ('float32', 5, {}),
        ('uint8', 4, dict(photometric='RGB', alpha='yes')),
    ],
)
def test_images(tmp_path: Path, dtype: str, bands: int, profile: Dict[str, Any]) -> None:
    values = paint(draw_classes(), min(bands, 5), dtype)
    values = np.tile(values, (bands // len(values), 1, 1))
    nodata: Optional[int] = profile.get('nodata')
    hidden = np.zeros(values.shape[1:], bool)
    hidden[30:60, 40:90] = True
    if nodata is not None:
        values[:, hidden] = nodata
    elif 'alpha' in profile:
        values[3] = np.where(hidden, 0, 255)
    else:
        hidden[:] = False
    write_raster(tmp_path / 'scenes/a.tif', values, **profile)
    write_raster(tmp_path / 'labels/a.tif', draw_classes())
    dataset = build_dataset(tmp_path)
    for corner in WINDOWS:
        results = load(dataset, corner)
        image = values[:3] if 'alpha' in profile else values
        valid = crop(~hidden, corner)
        if nodata is not None:
            valid &= ~crop((values == nodata).all(0), corner)
        expected = np.where(valid, crop(image, corner), 0).transpose(1, 2, 0)
        assert results['img'].dtype == (np.uint8 if dtype == 'uint8' else np.float32)
        assert results['img'].flags.c_contiguous
        np.testing.assert_array_equal(results['img'], expected)
        np.testing.assert_array_equal(results['valid'], valid)
        np.testing.assert_array_equal(
            results['gt_seg_map'],
            expect_mask(crop(draw_classes(), corner), valid, dataset._facts(dict(scene=0), 0, 0)),
        )


@pytest.mark.parametrize('bands', [1, 2, 128, 129, 513])
def test_any_number_of_bands(bands: int) -> None:
    values = np.random.RandomState(0).rand(bands, 5, 4).astype(np.float32)
    np.testing.assert_array_equal(bands_last(values), values.transpose(1, 2, 0))


@pytest.mark.parametrize('dtype', LABELS)
@pytest.mark.parametrize(
    'changes',
    [
        {},
        dict(label_map={0: 2, 2: 0}),
        dict(label_map={1: 255}),
        dict(label_map={1: -1}),
        dict(reduce_zero_label=True),
        dict(reduce_zero_label=True, label_map={0: 1}),
        dict(ignore_index=2),
        dict(ignore_index=-100),
        dict(ignore_index=300),
    ],
)
def test_masks(tmp_path: Path, dtype: str, changes: Dict[str, Any]) -> None:
    classes = draw_classes().astype(dtype)
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes()))
    if dtype != 'uint8' and changes.get('ignore_index') == -100:
        classes[5:9] = -100 if np.iinfo(dtype).min < 0 else 0
    if dtype in ('uint16', 'int32') and changes.get('ignore_index') == 300:
        classes[5:9] = 300
    write_raster(tmp_path / 'labels/a.tif', classes, nodata=1)
    dataset = build_dataset(tmp_path)
    for corner in WINDOWS:
        results = load(dataset, corner, counted=(3, 90, 0, 80), **changes)
        labels, labeled = crop(classes, corner), crop(classes != 1, corner)
        labeled &= crop(np.ones(classes.shape, bool), corner)
        labeled[:3] = labeled[90:] = labeled[:, 80:] = False
        assert results['gt_seg_map'].dtype == np.uint8
        np.testing.assert_array_equal(results['gt_seg_map'], expect_mask(labels, labeled, results))


@pytest.mark.parametrize('dtype', LABELS)
@pytest.mark.parametrize('shift', [0, 1])
def test_a_label_that_is_no_class(tmp_path: Path, dtype: str, shift: int) -> None:
    classes = draw_classes().astype(dtype)
    value = 7 if np.iinfo(dtype).min == 0 else -3
    classes[40:42, 50:53] = value
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes()))
    write_raster(tmp_path / 'labels/a.tif', classes)
    dataset = build_dataset(tmp_path)
    with pytest.raises(GeoError) as error:
        load(dataset, (0, 0, 96), reduce_zero_label=bool(shift))
    assert str(error.value) == (
        f'labels {tmp_path}/labels/a.tif hold {value} in the window (column, row, width, height) = '
        f'(0, 0, 96, 96) (6 pixels); 3 classes allow {shift} to {2 + shift}'
        f'{", 0 for no data" * shift}, and 255 for ignored pixels. Correct the labels, or the '
        f'classes in metainfo.'
    )
    # Pixels that do not count may have any label.
    load(dataset, (0, 0, 96), counted=(0, 40, 0, 96))


@pytest.mark.parametrize('dtype', ['int8', 'uint16', 'int16', 'uint32', 'int32', 'int64', 'uint64'])
def test_labels_are_compared_in_the_type_of_their_file(tmp_path: Path, dtype: str) -> None:
    if not check_dtype(dtype):
        pytest.skip(f'rasterio {rasterio.__version__} cannot write {dtype}')
    limits, classes = np.iinfo(dtype), draw_classes(64, 64)
    expected = np.where(np.arange(64)[:, None] < 8, 255, classes)
    values = [
        limits.min or 3,
        limits.max,
        *(
            value
            for value in (3, 256, 2**16 + 1, 2**32 - 1, 2**32, 2**32 + 1, 2**33 + 255)
            if value <= limits.max
        ),
    ]
    for value in values:
        plain, named = tmp_path / f'{value}', tmp_path / f'{value} as no data'
        labels = classes.astype(dtype)
        labels[:8] = value
        for folder in (plain, named):
            write_raster(folder / 'scenes/a.tif', paint(classes))
        write_raster(plain / 'labels/a.tif', labels)
        with pytest.raises(GeoError, match=rf'labels/a\.tif hold {value} in .* \(512 pixels\)'):
            load(build_dataset(plain), (0, 0, 64))
        datasets = [build_dataset(plain, label_nodata=value)]
        # rasterio takes a no-data value as a float.
        if float(value) <= limits.max:
            write_raster(named / 'labels/a.tif', labels, nodata=value)
            datasets.append(build_dataset(named))
        for dataset in datasets:
            np.testing.assert_array_equal(load(dataset, (0, 0, 64))['gt_seg_map'], expected)


@pytest.mark.parametrize('dtype', ['float32', 'float64'])
def test_labels_that_are_no_integers_are_refused(tmp_path: Path, dtype: str) -> None:
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes(64, 64)))
    write_raster(tmp_path / 'labels/a.tif', draw_classes(64, 64).astype(dtype))
    with pytest.raises(GeoError, match=f'of {dtype}, expected one band of class indices'):
        build_dataset(tmp_path)


@pytest.mark.parametrize('ignore_index, count', [(256, 3), (255, 257), (-254, 3)])
def test_classes_that_a_mask_cannot_hold(tmp_path: Path, ignore_index: int, count: int) -> None:
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes(64, 64)))
    write_raster(tmp_path / 'labels/a.tif', draw_classes(64, 64).astype(np.int16))
    dataset = build_dataset(tmp_path)
    with pytest.raises(GeoError, match=f'{count} classes and ignore_index={ignore_index}: a mask'):
        load(dataset, (0, 0, 64), ignore_index=ignore_index, num_classes=count)


def test_polygons_with_holes_and_parts(tmp_path: Path) -> None:
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes()))
    field = rectangle(UTM, 10, 10, 120, 90).difference(rectangle(UTM, 40, 20, 60, 50))
    # A window cuts it into two parts.
    comb = rectangle(UTM, 150, 30, 260, 200).difference(rectangle(UTM, 170, 20, 240, 190))
    write_vector(tmp_path / 'a.gpkg', [field, comb], ['house', 'water'], 'EPSG:32650')
    expected = np.zeros((260, 300), np.uint8)
    expected[10:90, 10:120], expected[20:50, 40:60] = 1, 0
    expected[30:200, 150:260], expected[20:190, 170:240] = 2, 0
    dataset = build_dataset(tmp_path, labels='a.gpkg')
    for corner in (*WINDOWS, (140, 20, 130), (145, 40, 110), (100, 220, 30)):
        results = load(dataset, corner)
        np.testing.assert_array_equal(
            results['gt_seg_map'], np.where(results['valid'], crop(expected, corner), 255)
        )


def test_many_polygons_start_few_garbage_collections(tmp_path: Path) -> None:
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes()))
    centers = np.random.RandomState(0).uniform((500000, 4099960), (500040, 4100000), (400, 2))
    ponds = list(shapely.buffer(shapely.points(centers), 1.0))
    write_vector(tmp_path / 'a.gpkg', ponds, ['water'] * len(ponds), 'EPSG:32650')
    labels = build_dataset(tmp_path, labels='a.gpkg').scene_facts[0]['labels']
    collections: List[str] = []

    def count(phase: str, facts: Any) -> None:
        collections.append(phase)

    gc.collect()
    gc.callbacks.append(count)
    try:
        values, _ = labels.read(0, 0, 80, 80)
    finally:
        gc.callbacks.remove(count)
    # Clipping the polygons makes a few objects; the points of their outlines make thousands.
    assert (values == 2).any() and collections.count('start') <= 2 and gc.isenabled()
