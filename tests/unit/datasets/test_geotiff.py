"""Windows and labels from GeoTIFF scenes."""
from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, List, Tuple

import numpy as np
import pyogrio.raw
import pyproj
import pytest
import rasterio.transform
import shapely
import torch
from geo_scenes import (
    CLASSES,
    DEGREES,
    PALETTE,
    PIXELS,
    UTM,
    damage_block,
    draw_classes,
    paint,
    rectangle,
    write_raster,
)
from mmengine.registry import DATASETS, MODELS, DefaultScope
from support import ROOT, check_finished, launch, main_leg, write_tiny_config

from mapsage.datasets import GeoTiffDataset
from mapsage.engine.data_checks import DataError, build_checked, check_labels, explain_error
from mapsage.engine.data_order import KeyedDataset
from mapsage.geo import GeoError, RasterBlockError, write_polygons

METAINFO = dict(classes=CLASSES, palette=PALETTE)
PIPELINE = [dict(type=t) for t in ('LoadGeoTiffWindow', 'LoadGeoTiffLabels', 'PackSegInputs')]


def _build(root: Path, **arguments: Any) -> GeoTiffDataset:
    arguments = dict(dict(type='GeoTiffDataset', data_root=str(root), scenes='scenes', window=128,
                          labels='labels', metainfo=METAINFO, pipeline=PIPELINE), **arguments)
    with DefaultScope.overwrite_default_scope('mmseg'):
        return DATASETS.build(arguments)


def _scene(root: Path, name: str = 'a', place: dict = UTM, **profile: Any
           ) -> Tuple[np.ndarray, np.ndarray]:
    classes = draw_classes()
    values = paint(classes, profile.pop('bands', 3), profile.pop('values', 'uint8'))
    write_raster(root / f'scenes/{name}.tif', values, place, **profile)
    write_raster(root / f'labels/{name}.tif', classes, place)
    return values, classes


def _parts(dataset: GeoTiffDataset, index: int) -> Tuple[np.ndarray, np.ndarray]:
    sample = dataset[index]
    return sample['inputs'].numpy(), sample['data_samples'].gt_sem_seg.data[0].numpy()


@pytest.mark.parametrize('stride', [128, 100])
def test_windows_cover_the_scene_and_carry_its_pixels(tmp_path: Path, stride: int) -> None:
    values, classes = _scene(tmp_path)
    dataset = _build(tmp_path, stride=stride)
    seen = np.zeros(classes.shape, int)
    for index in range(len(dataset)):
        column, row, side = dataset.get_data_info(index)['window']
        inside = np.s_[row:row + side, column:column + side]
        image, mask = _parts(dataset, index)
        np.testing.assert_array_equal(image, values[(slice(None), *inside)])
        np.testing.assert_array_equal(mask, classes[inside])
        seen[inside] += 1
    assert seen.min() == 1 and len(dataset) == 9
    names = [dataset[i]['data_samples'].img_path for i in range(9)]
    assert len(set(names)) == 9 and names[1] == str(tmp_path / f'scenes/a_{stride}_0.tif')


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'int16', 'float32'])
def test_types_and_band_order(tmp_path: Path, dtype: str) -> None:
    values, _ = _scene(tmp_path, bands=5, values=dtype, photometric='minisblack')
    image, _ = _parts(_build(tmp_path, bands=[5, 2, 4, 1]), 4)
    assert image.dtype == (np.uint8 if dtype == 'uint8' else np.float32)
    np.testing.assert_array_equal(image, values[[4, 1, 3, 0], 128:256, 128:256])


def test_scene_smaller_than_the_window(tmp_path: Path) -> None:
    values, classes = _scene(tmp_path)
    dataset = _build(tmp_path, window=280)
    assert len(dataset) == 2
    image, mask = _parts(dataset, 1)
    np.testing.assert_array_equal(image[:, :260], values[:, :, 20:])
    np.testing.assert_array_equal(mask[:260], classes[:, 20:])
    assert (mask[260:] == 255).all() and not image[:, 260:].any()


def test_no_data_is_ignored_and_empty_windows_are_left_out(tmp_path: Path) -> None:
    values, classes = _scene(tmp_path, values='int16')
    values[:, :128] = -1
    values[:, 100, 17] = 7  # one valid pixel in the first window
    values[:, 150:, 290:] = -1
    write_raster(tmp_path / 'scenes/a.tif', values, nodata=-1)
    write_raster(tmp_path / 'labels/a.tif', np.where(classes == 2, 9, classes).astype('uint8'),
                 nodata=9)
    dataset = _build(tmp_path)
    assert [dataset.get_data_info(i)['window'][:2] for i in range(len(dataset))] == [
        (0, 0), (0, 128), (128, 128), (172, 128), (0, 132), (128, 132), (172, 132)]
    assert (_parts(dataset, 0)[1] != 255).sum() == 1
    expected = np.where(values[0] == -1, 255, np.where(classes == 2, 255, classes))
    np.testing.assert_array_equal(_parts(dataset, 3)[1], expected[128:256, 172:300])


def test_no_data_everywhere(tmp_path: Path) -> None:
    write_raster(tmp_path / 'scenes/a.tif', np.zeros((3, 200, 200), 'uint8'), nodata=0)
    with pytest.raises(GeoError, match='1 scene.*a.tif.*no valid pixel: all is no-data'):
        _build(tmp_path, labels=None)


def _write_vector(path: Path, polygons: List[Any], classes: List[Any], crs: str,
                  field: str = 'class_name', kind: str = 'Polygon') -> None:
    values = np.array(classes, object if isinstance(classes[0], str) else np.int32)
    pyogrio.raw.write(str(path), shapely.to_wkb(np.array(polygons)), [values], [field],
                      geometry_type=kind, crs=crs,
                      driver='GPKG' if path.suffix == '.gpkg' else 'GeoJSON')


@pytest.mark.parametrize('place', [UTM, DEGREES], ids=['utm', 'degrees'])
def test_polygons_of_a_map_burn_back_into_it(tmp_path: Path, place: dict) -> None:
    """The map's own polygons, without simplification, are labels equal to the map."""
    _, classes = _scene(tmp_path, place=place)
    write_polygons(tmp_path / 'labels/a.tif', tmp_path / 'map.gpkg', CLASSES, simplify=0)
    dataset = _build(tmp_path, labels='map.gpkg', outside=255)
    for index in range(len(dataset)):
        column, row, side = dataset.get_data_info(index)['window']
        np.testing.assert_array_equal(_parts(dataset, index)[1],
                                      classes[row:row + side, column:column + side])


@pytest.mark.parametrize('suffix', ['.gpkg', '.geojson'])
def test_polygons_in_another_crs_are_reprojected(tmp_path: Path, suffix: str) -> None:
    _scene(tmp_path)
    to_degrees = pyproj.Transformer.from_crs(32650, 4326, always_xy=True)
    polygons = [shapely.transform(rectangle(UTM, *box), lambda points: np.stack(
        to_degrees.transform(points[:, 0], points[:, 1]), 1))
        for box in ((5, 5, 10, 10), (0, 0, 100, 100), (90, 90, 140, 120))]
    _write_vector(tmp_path / f'a{suffix}', polygons, [1, 2, 255], 'EPSG:4326', 'kind')
    dataset = _build(tmp_path, labels=f'a{suffix}', class_field='kind')
    expected = np.zeros((260, 300), int)
    expected[:100, :100] = 2  # the largest is drawn first
    expected[90:120, 90:140] = 255
    expected[5:10, 5:10] = 1
    np.testing.assert_array_equal(_parts(dataset, 0)[1], expected[:128, :128])
    np.testing.assert_array_equal(_parts(dataset, 1)[1], expected[:128, 128:256])


def test_polygons_that_meet_no_scene(tmp_path: Path) -> None:
    """Degrees in a file that says UTM; one scene of several without polygons is none of that."""
    _scene(tmp_path)
    _write_vector(tmp_path / 'a.gpkg', [shapely.box(117, 37, 117.1, 37.1)], [1], 'EPSG:32650')
    with pytest.raises(GeoError, match=r'no polygon of .*a\.gpkg \(CRS WGS 84 / UTM zone 50N\) '
                       r'meets a scene: in EPSG:32650, the CRS of .*a\.tif, the polygons lie in '
                       r'.* = \(117, 37, 117\.1, 37\.1\), the scene in '
                       r'\(500000, 4099870, 500150, 4100000\)\. Check'):
        _build(tmp_path, labels='a.gpkg')
    far = dict(UTM, transform=rasterio.transform.from_origin(600000.0, 4100000.0, 0.5, 0.5))
    write_raster(tmp_path / 'scenes/0.tif', paint(draw_classes()), far)
    _write_vector(tmp_path / 'a.gpkg', [rectangle(UTM, 0, 0, 9, 9)], [1], 'EPSG:32650')
    dataset = _build(tmp_path, labels='a.gpkg')
    assert not _parts(dataset, 0)[1].any() and (_parts(dataset, 9)[1] == 1).sum() == 81


@pytest.mark.parametrize('crs', [32650, 32651])
def test_invalid_polygons_are_the_same_in_every_window(tmp_path: Path, crs: int) -> None:
    _scene(tmp_path)
    x, y, side = 500000.0, 4100000.0, 64.0
    bow_tie = [(x, y), (x + side, y - side), (x + side, y), (x, y - side)]
    hole = [(x + 80, y - 40), (x + 100, y - 40), (x + 100, y - 60), (x + 80, y - 60)]
    polygons = [shapely.Polygon(bow_tie),
                shapely.Polygon(shapely.box(x + 70, y - 50, x + 90, y - 10).exterior, [hole]),
                shapely.Polygon([(x, y), (x + 9, y - 9), (x, y)])]  # a line
    to_crs = pyproj.Transformer.from_crs(32650, crs, always_xy=True)
    _write_vector(tmp_path / 'a.gpkg', [shapely.transform(polygon, lambda points: np.stack(
        to_crs.transform(points[:, 0], points[:, 1]), 1)) for polygon in polygons],
        [1, 2, 1], f'EPSG:{crs}')
    with pytest.warns(UserWarning, match=r'a\.gpkg: 1 feature\(s\) without area .* feature 2 of'):
        dataset = _build(tmp_path, labels='a.gpkg')
    labels = dataset._scenes[0]['labels']
    assert len(labels._source._in_crs) == 1  # before a worker is forked
    whole = labels.read(0, 0, 300, 260)
    assert whole[3, 64] == whole[125, 64] == 0 and whole[64, 20] == whole[64, 110] == 1
    assert whole[90, 150] == 2 and whole[90, 170] == 0 and whole[110, 190] == 2
    for row in range(0, 250, 10):
        for column in range(0, 300, 10):
            np.testing.assert_array_equal(labels.read(column, row, 10, 10),
                                          whole[row:row + 10, column:column + 10])


@pytest.mark.parametrize('left', [179.7, -180.3])
def test_polygons_across_the_antimeridian(tmp_path: Path, left: float) -> None:
    place = dict(DEGREES, transform=rasterio.transform.from_origin(left, 10.0, 0.01, 0.01))
    write_raster(tmp_path / 'scenes/a.tif', np.full((3, 64, 64), 9, np.uint8), place)
    to_utm = pyproj.Transformer.from_crs(4326, 32660, always_xy=True)
    polygon = shapely.Polygon(zip(*to_utm.transform([179.8, 180.2, 180.2, 179.8],
                                                    [9.9, 9.9, 9.5, 9.5])))
    _write_vector(tmp_path / 'a.gpkg', [polygon], [1], 'EPSG:32660')
    mask = _parts(_build(tmp_path, labels='a.gpkg', window=64), 0)[1]
    assert abs(int((mask == 1).sum()) - 1600) <= 80
    assert np.flatnonzero((mask == 1).any(0))[[0, -1]].tolist() == [10, 49]


def test_wrong_vector_labels(tmp_path: Path) -> None:
    _scene(tmp_path)
    house = rectangle(UTM, 5, 5, 10, 10)
    _write_vector(tmp_path / 'a.gpkg', [house, house], ['house', 'Haus'], 'EPSG:32650')
    with pytest.raises(GeoError, match=r"a\.gpkg: field 'class_name' holds Haus; expected a class"):
        _build(tmp_path, labels='a.gpkg')
    with pytest.raises(GeoError, match=r"no field 'kind', it has \['class_name'\]"):
        _build(tmp_path, labels='a.gpkg', class_field='kind')
    with pytest.raises(GeoError, match='absent.gpkg: no such file'):
        _build(tmp_path, labels='absent.gpkg')
    with pytest.raises(GeoError, match='outside=3, expected a class index 0 to 2, or 255'):
        _build(tmp_path, labels='a.gpkg', outside=3)
    values = [np.array(['2020-01-01', '2020-01-02'], 'datetime64[ms]'), np.array([1, np.inf])]
    pyogrio.raw.write(str(tmp_path / 'd.gpkg'), shapely.to_wkb(np.array([house, house])), values,
                      ['date', 'number'], geometry_type='Polygon', crs='EPSG:32650')
    for field, text in (('date', '2020-01-01'), ('number', 'inf')):
        with pytest.raises(GeoError, match=f"field '{field}' holds {text}.*Feature "
                           f'{int(field == "number")} of the layer holds {text}'):
            _build(tmp_path, labels='d.gpkg', class_field=field)
    _write_vector(tmp_path / 'b.gpkg', [house.centroid], ['house'], 'EPSG:32650', kind='Point')
    with pytest.raises(GeoError, match=r'b\.gpkg: feature 0 .* is a Point, expected polygons'):
        _build(tmp_path, labels='b.gpkg')
    write_raster(tmp_path / 'scenes/a.tif', paint(draw_classes()), PIXELS)
    _write_vector(tmp_path / 'c.gpkg', [house], ['house'], 'EPSG:32650')
    with pytest.raises(GeoError, match=r'scenes/a\.tif has no georeference, .*c\.gpkg'):
        _build(tmp_path, labels='c.gpkg')


def test_label_rasters_that_do_not_fit(tmp_path: Path) -> None:
    _, classes = _scene(tmp_path)
    label, scene = tmp_path / 'labels/a.tif', tmp_path / 'scenes/a.tif'
    both = f'labels {re.escape(str(label))}.*{re.escape(str(scene))}'
    write_raster(label, classes, dict(UTM, crs=UTM['crs'].from_epsg(32651)))
    with pytest.raises(GeoError, match=f'{both}.*EPSG:32650') as caught:
        _build(tmp_path)
    assert 'EPSG:32651' in str(caught.value) and 'rio warp --like' in str(caught.value)
    moved = rasterio.transform.from_origin(500001.5, 4100000.0, 0.5, 0.5)
    write_raster(label, classes, dict(UTM, transform=moved))
    with pytest.raises(GeoError, match='lie up to 3 pixels beside'):
        _build(tmp_path)
    write_raster(label, classes[:-1])
    with pytest.raises(GeoError, match='are 300 x 259 pixels, their scene .* is 300 x 260'):
        _build(tmp_path)
    write_raster(label, paint(classes))
    with pytest.raises(GeoError, match=r'have 3 band\(s\) of uint8, expected one band'):
        _build(tmp_path)
    label.unlink()
    with pytest.raises(GeoError, match=r'needs one label file a\.\* .*found none'):
        _build(tmp_path)
    write_raster(label, classes, PIXELS)  # without georeference, of the scene's size
    assert len(_build(tmp_path)) == 9


def test_scenes_without_georeference_work_in_pixels(tmp_path: Path) -> None:
    _, classes = _scene(tmp_path, place=PIXELS)
    np.testing.assert_array_equal(_parts(_build(tmp_path), 0)[1], classes[:128, :128])


def test_missing_scenes_and_bands(tmp_path: Path) -> None:
    _scene(tmp_path)
    with pytest.raises(GeoError, match=r"no scenes in \['absent/\*.tif'\]"):
        _build(tmp_path, scenes='absent/*.tif')
    with pytest.raises(GeoError, match='cannot open .*absent: no such file'):
        _build(tmp_path, scenes='absent')
    with pytest.raises(GeoError, match=r'a\.tif has no band \[4\]'):
        _build(tmp_path, bands=[1, 4])
    write_raster(tmp_path / 'scenes/b.tif', paint(draw_classes(), 2))
    with pytest.raises(GeoError, match=r'differ in their number of bands: .*a\.tif.*b\.tif'):
        _build(tmp_path, labels=None)
    assert len(_build(tmp_path, labels=None, bands=[2, 1])) == 18


def test_label_outside_the_classes_is_named(tmp_path: Path) -> None:
    _, classes = _scene(tmp_path)
    classes[200, 250] = 7
    label = write_raster(tmp_path / 'labels/a.tif', classes)
    dataset = _build(tmp_path)
    with pytest.raises(GeoError) as caught:
        dataset[5]
    message = str(caught.value)
    assert f'labels {label} hold 7' in message and '(172, 128, 128, 128)' in message
    assert '3 classes allow 0 to 2, and 255' in message


def test_labels_that_begin_at_one(tmp_path: Path) -> None:
    _, classes = _scene(tmp_path)
    write_raster(tmp_path / 'labels/a.tif', (classes + 1) * (classes != 2))
    _, mask = _parts(_build(tmp_path, reduce_zero_label=True), 3)
    np.testing.assert_array_equal(mask, np.where(classes == 2, 255, classes)[128:256, :128])


def test_damaged_block_is_named_through_the_runner(tmp_path: Path) -> None:
    _scene(tmp_path)
    damage_block(tmp_path / 'scenes/a.tif', 1, 2, 1)
    dataset = build_checked(lambda _: _build(tmp_path), dict(type='GeoTiffDataset'))
    with pytest.raises(RasterBlockError):
        dataset[1]
    with pytest.raises(DataError, match=r'a\.tif: the window .* \(128, 64, 64, 64\)'):
        KeyedDataset(dataset, check_labels, explain_error)[1]


@pytest.mark.parametrize('method', ['fork', 'spawn'])
def test_workers_read_what_the_process_reads(tmp_path: Path, method: str) -> None:
    _scene(tmp_path)
    write_polygons(tmp_path / 'labels/a.tif', tmp_path / 'map.gpkg', CLASSES, simplify=0)
    dataset = _build(tmp_path, labels='map.gpkg', stride=40)
    expected = [dataset[i] for i in range(len(dataset))]  # the parent has open handles now
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=4, num_workers=2 if method == 'fork' else 1, prefetch_factor=2,
        persistent_workers=True, multiprocessing_context=method, collate_fn=list)
    for _ in range(2 if method == 'fork' else 1):
        loaded = [sample for batch in loader for sample in batch]
        assert len(loaded) == len(expected)
        for one, other in zip(loaded, expected):
            assert torch.equal(one['inputs'], other['inputs'])
            assert torch.equal(one['data_samples'].gt_sem_seg.data,
                               other['data_samples'].gt_sem_seg.data)


def test_preprocessor_for_any_number_of_bands() -> None:
    with DefaultScope.overwrite_default_scope('mmseg'):
        prepare = MODELS.build(dict(type='BandDataPreProcessor', mean=[1., 2, 3, 4, 5],
                                    std=[1., 2, 4, 8, 16], size=(4, 4)))
    image = torch.arange(80.).view(5, 4, 4)
    out = prepare(dict(inputs=[image], data_samples=None))['inputs'][0]
    for band in range(5):
        assert torch.equal(out[band], (image[band] - (band + 1)) / 2 ** band)
    for wrong in (dict(mean=[1.], std=[1., 2.]), dict(mean=[1.]), dict(mean=[1.], std=[0.])):
        with pytest.raises(ValueError, match='expected'):
            MODELS.build(dict(type='mmseg.BandDataPreProcessor', **wrong))


def test_statistics_command(tmp_path: Path) -> None:
    values, _ = _scene(tmp_path)
    for name in ('a.tif.aux.xml', 'a.tif.ovr'):  # what a GIS leaves beside a scene
        (tmp_path / 'scenes' / name).write_text('no scene')
    write_raster(tmp_path / 'scenes/B.TIF', values)
    done = launch(command=[sys.executable, str(ROOT / 'tools/geotiff_statistics.py'),
                           str(tmp_path / 'scenes'), '--bands', '3', '1'])
    check_finished(done)
    assert '2 scene(s), 156,000 valid pixels' in done.output
    mean, std = values[[2, 0]].mean((1, 2)), values[[2, 0]].std((1, 2))
    assert f'mean=[{mean[0]:.6g}, {mean[1]:.6g}]' in done.output
    assert f'std=[{std[0]:.6g}, {std[1]:.6g}]' in done.output
    spec = importlib.util.spec_from_file_location('statistics_tool',
                                                  ROOT / 'tools/geotiff_statistics.py')
    assert spec is not None and spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    with pytest.raises(SystemExit, match='GeoError: cannot open'):  # exit status 1
        tool.main([str(tmp_path / 'absent')])


def _documented_example() -> str:
    text = (ROOT / 'docs/datasets.md').read_text()
    section = text[text.index('## GeoTIFF scenes'):]
    return re.search(r'```python\n(.*?)```', section, re.S).group(1)  # type: ignore[union-attr]


@main_leg
def test_documented_config_trains_and_evaluates(tmp_path: Path) -> None:
    """The example of docs/datasets.md in the tiny config, on 4-band scenes with polygons."""
    for name in ('train/a', 'val/b'):
        values = paint(draw_classes(), 4, 'uint16')
        write_raster(tmp_path / f'data/city/{name}.tif', values, photometric='minisblack')
        write_raster(tmp_path / 'map.tif', draw_classes())
    write_polygons(tmp_path / 'map.tif', tmp_path / 'data/city/buildings.gpkg', CLASSES,
                   background=0)
    example = re.sub(r'\b(512|256)\b', '64', _documented_example())
    assert example.count('64') == 4 and "'data/city'" in example
    example = example.replace("'data/city'", repr(str(tmp_path / 'data/city')))
    write_tiny_config(tmp_path / 'base.py', tmp_path)
    config = tmp_path / 'config.py'
    config.write_text("_base_ = 'base.py'\n" + example
                      + 'train_cfg = dict(max_iters=4, val_interval=4)\n')
    done = launch(command=[sys.executable, str(ROOT / 'tools/train.py'), str(config),
                           '--work-dir', str(tmp_path / 'work')])
    check_finished(done)
    assert 'mIoU' in done.output and 'water' in done.output
