"""Windows of scenes, their validity, and damaged files."""
from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from geo_scenes import (
    DEGREES,
    PIXELS,
    UTM,
    count_open_files,
    damage_block,
    draw_classes,
    open_file_positions,
    paint,
    write_mosaic,
    write_raster,
)
from rasterio.enums import ColorInterp
from rasterio.transform import from_origin

from mapsage.geo import GeoError, Raster, RasterBlockError


def test_facts_of_a_scene(tmp_path: Path) -> None:
    for place in (UTM, DEGREES):
        raster = Raster(write_raster(tmp_path / 'a.tif', paint(draw_classes())[:2], place))
        assert (raster.width, raster.height, raster.bands) == (300, 260, (1, 2))
        assert raster.dtype == np.uint8 and raster.nodata is None
        assert raster.crs == place['crs'] and raster.transform == place['transform']
        assert raster.is_georeferenced and not raster.may_have_gaps
    assert not Raster(write_raster(tmp_path / 'b.tif', draw_classes(), PIXELS)).is_georeferenced


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'int16', 'float32'])
def test_windows_inside_across_and_beyond_the_border(tmp_path: Path, dtype: str) -> None:
    values = paint(draw_classes(), 4, dtype)
    with Raster(write_raster(tmp_path / 'a.tif', values, photometric='minisblack',
                             alpha='unspecified'), bands=(3, 1)) as raster:
        read, valid = raster.read(70, 30, 100, 64)
        assert read.dtype == dtype and valid.all()
        np.testing.assert_array_equal(read, values[[2, 0], 30:94, 70:170])
        padded = np.pad(values[[2, 0]], ((0, 0), (5, 40), (7, 33)))
        read, valid = raster.read(-7, -5, 340, 305)
        np.testing.assert_array_equal(read, padded)
        assert valid.sum() == 300 * 260 and valid[5:265, 7:307].all()
        read, valid = raster.read(300, 0, 8, 8)
        assert not read.any() and not valid.any()
        coarse, valid = raster.read_reduced(7)
        assert coarse.shape == (2, 38, 43) and valid.shape == (38, 43)


def test_files_of_a_mosaic_of_mosaics(tmp_path: Path) -> None:
    paths = [write_raster(tmp_path / f'{name}.tif', draw_classes()) for name in 'ab']
    inner = write_mosaic(tmp_path / 'inner.vrt', paths)
    outer = write_mosaic(tmp_path / 'outer.vrt', [inner])
    (tmp_path / 'a.tif.aux.xml').write_text('<PAMDataset/>')
    raster = Raster(outer)
    assert sorted(raster.files()) == sorted(map(str, (outer, inner, *paths)))
    raster = Raster(paths[0])
    assert raster.files() == [str(paths[0])]


def test_no_data_in_every_band_is_invalid(tmp_path: Path) -> None:
    values = paint(draw_classes()).astype('int16')
    values[:, :20] = -99
    values[1, 30:40, 30:40] = -99
    read, valid = Raster(write_raster(tmp_path / 'a.tif', values, nodata=-99)).read(0, 0, 300, 260)
    assert not valid[:20].any() and valid[20:].all()
    assert not read[:, :20].any()
    np.testing.assert_array_equal(read[:, 20:], values[:, 20:])


@pytest.mark.parametrize('nodata', [None, float('nan'), -1.0])
def test_nan_is_never_read(tmp_path: Path, nodata: Any) -> None:
    values = paint(draw_classes()).astype('float32')
    values[:, 0, :3] = np.nan
    values[1, 0, 3] = np.nan
    values[0, 0, 4] = np.inf
    raster = Raster(write_raster(tmp_path / 'a.tif', values, nodata=nodata))
    read, valid = raster.read(0, 0, 300, 260)
    assert np.isfinite(read).all() and raster.may_have_gaps
    assert not valid[0, :5].any() and valid.sum() == valid.size - 5


def test_alpha_and_mask_bands(tmp_path: Path) -> None:
    values = paint(draw_classes(), 4)
    values[3] = 255
    values[3, :, :10] = 0
    path = write_raster(tmp_path / 'a.tif', values, photometric='rgb', alpha='yes')
    with rasterio.open(path) as file:
        assert file.colorinterp[3] == ColorInterp.alpha
    raster = Raster(path)
    assert raster.bands == (1, 2, 3)
    valid = raster.read(0, 0, 20, 20)[1]
    assert not valid[:, :10].any() and valid[:, 10:].all()
    # four bands that a writer tagged as alpha, but the user wants as data
    for bands in ((1, 2, 3, 4), (4, 1, 2)):
        read, valid = Raster(path, bands=bands).read(0, 0, 20, 20)
        assert valid.all()
        np.testing.assert_array_equal(read, values[[band - 1 for band in bands], :20, :20])

    path = write_raster(tmp_path / 'b.tif', values[:3])
    with rasterio.open(path, 'r+') as file:
        file.write_mask(values[3])
    valid = Raster(path).read(0, 0, 20, 20)[1]
    assert not valid[:, :10].any() and valid[:, 10:].all()


def test_wrong_requests_are_named(tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'a.tif', paint(draw_classes()))
    with rasterio.open(path, 'r+') as file:
        file.set_band_description(2, 'near infrared')
    with pytest.raises(GeoError, match=r'no band \[5\].*1 \(red\), 2 \(near infrared\), 3 \(blue'):
        Raster(path, bands=(1, 5))
    with pytest.raises(GeoError, match='absent.tif: no such file'):
        Raster(tmp_path / 'absent.tif')
    (tmp_path / 'text.tif').write_text('no image')
    with pytest.raises(GeoError, match='text.tif: no raster that GDAL reads'):
        Raster(tmp_path / 'text.tif')
    complex_numbers = draw_classes().astype('complex64')
    with pytest.raises(GeoError, match='hold complex64, expected one type of real numbers'):
        Raster(write_raster(tmp_path / 'c.tif', complex_numbers))


def test_damaged_block_is_named_and_the_rest_is_read(tmp_path: Path) -> None:
    values = paint(draw_classes())
    path = write_raster(tmp_path / 'a.tif', values)
    damage_block(path, 1, 2, 1)
    raster = Raster(path)
    with pytest.raises(RasterBlockError) as caught:
        raster.read(100, 60, 150, 90)
    error = pickle.loads(pickle.dumps(caught.value))  # as from a worker
    assert (error.path, error.window) == (str(path), (100, 60, 150, 90))
    assert error.blocks == [(128, 64, 64, 64)] and str(error.blocks[0]) in str(error)
    assert 'IReadBlock failed' in error.reason and str(path) in str(error)
    np.testing.assert_array_equal(raster.read(192, 64, 64, 64)[0], values[:, 64:128, 192:256])


def test_truncated_file_is_named(tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'a.tif', np.random.RandomState(0).randint(
        0, 255, (3, 260, 300)).astype('uint8'))
    os.truncate(path, os.path.getsize(path) * 2 // 3)
    raster = Raster(path)
    with pytest.raises(RasterBlockError, match=r'a\.tif: the window .* damaged are \d+ block'):
        raster.read(0, 0, 300, 260)
    assert raster.read(0, 0, 64, 64)[1].all()


def _sum_in_child(raster: Raster, expected: int, queue: Any) -> None:
    inherited = count_open_files(Path(raster.path))
    total = int(raster.read(0, 0, 300, 260)[0].sum())
    queue.put((total == expected, inherited, count_open_files(Path(raster.path))))


def test_forked_processes_open_their_own_handle(tmp_path: Path) -> None:
    values = paint(draw_classes())
    raster = Raster(write_raster(tmp_path / 'a.tif', values))
    raster.read(0, 0, 10, 10)
    position = open_file_positions(Path(raster.path))
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    child = context.Process(target=_sum_in_child, args=(raster, int(values.sum()), queue))
    child.start()
    same, inherited, opened = queue.get(timeout=60)
    child.join(60)
    # the child lets go of the handle that it inherited
    assert same and inherited == 1 and opened == 1 and child.exitcode == 0
    assert open_file_positions(Path(raster.path)) == position  # which both would have moved
    assert raster.read(0, 0, 10, 10)[1].all()


@pytest.mark.parametrize('kind', ['tif', 'vrt'])
def test_forked_processes_read_where_gdal_uses_threads(tmp_path: Path, kind: str,
                                                       monkeypatch: Any) -> None:
    monkeypatch.setenv('GDAL_NUM_THREADS', '2')
    halves = np.random.RandomState(0).randint(0, 255, (2, 1024, 1024), 'uint8')
    paths = [write_raster(tmp_path / f'{place}.tif', half, dict(
        UTM, transform=from_origin(500000.0 + 512 * place, 4100000.0, 0.5, 0.5)),
        blockxsize=512, blockysize=512) for place, half in enumerate(halves)]
    path = paths[0] if kind == 'tif' else write_mosaic(tmp_path / 'a.vrt', paths)
    raster = Raster(path)
    whole = 0, 0, raster.width, raster.height  # from a million pixels on, mosaics use threads
    expected = raster.read(*whole)[0].sum()
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    child = context.Process(target=lambda: queue.put(Raster(path).read(*whole)[0].sum()),
                            daemon=True)  # which ends a child that waits for ever
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(60)


def test_threads_share_no_handle_and_close_leaves_none(tmp_path: Path) -> None:
    values = paint(draw_classes())
    raster = Raster(write_raster(tmp_path / 'a.tif', values))
    path = Path(raster.path)
    assert count_open_files(path) == 0
    barrier = threading.Barrier(4)

    def read_rows(thread: int) -> int:
        for row in range(0, 250, 10):
            np.testing.assert_array_equal(raster.read(thread, row, 100, 10)[0],
                                          values[:, row:row + 10, thread:thread + 100])
        barrier.wait(60)
        there = count_open_files(path)
        barrier.wait(60)
        return there

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(read_rows, range(4))) == [4] * 4
    raster.close()
    assert count_open_files(path) == 0


def test_threads_open_at_the_same_moment(tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'a.tif', paint(draw_classes(20, 20)))
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            with Raster(path) as raster, ThreadPoolExecutor(8) as threads:
                read = list(threads.map(lambda _: raster.read(0, 0, 5, 5)[1].all(), range(32)))
            assert all(read)
    finally:
        sys.setswitchinterval(interval)
