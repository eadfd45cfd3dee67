"""The pool of open rasters."""

from __future__ import annotations

import os
import shutil
import threading
import zipfile
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest
import rasterio
from geo_scenes import UTM, count_open_files, draw_classes, paint, write_mosaic, write_raster
from geotiff_data import build_dataset, load_window

from mapsage.geo import GeoError, Mosaic, Raster, file_handles, open_raster, pool


def test_pool_keeps_a_bounded_number_open(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(pool, '_MOST', 5)
    paths = [write_raster(tmp_path / f'{i}.tif', draw_classes(20, 20)) for i in range(9)]
    kept = [open_raster(str(path)) for path in paths]
    for path in paths:
        assert open_raster(str(path)).read(0, 0, 20, 20)[1].all()
    assert [count_open_files(path) for path in paths] == [0] * 4 + [1] * 5
    assert all(open_raster(str(path)) is raster for path, raster in zip(paths, kept))


@pytest.mark.parametrize('allowed, kept', [(100, 64), (1024, 256), (10**6, 1024)])
def test_pool_keeps_a_share_of_the_files_that_may_be_open(
    allowed: int, kept: int, monkeypatch: Any
) -> None:
    monkeypatch.setattr(pool.resource, 'getrlimit', lambda _: (allowed, allowed))
    assert pool.most_open() == kept


def test_a_raster_is_kept_by_thread_and_choice_of_bands(tmp_path: Path) -> None:
    path = str(write_raster(tmp_path / 'a.tif', paint(draw_classes(20, 20))))
    kept = open_raster(path, [2, 1])
    assert open_raster(path, (2, 1)) is kept and kept.bands == (2, 1)
    assert open_raster(path) is not kept and open_raster(path).bands == (1, 2, 3)
    others: List[Raster] = []
    thread = threading.Thread(target=lambda: others.append(open_raster(path, [2, 1])))
    thread.start()
    thread.join(60)
    assert len(others) == 1 and others[0] is not kept


def write_value(path: Path, value: int, side: int = 20) -> Path:
    """Write one value without compression, so that every value gives a file of the same size."""
    return write_raster(path, np.full((side, side), value, np.uint8), compress=None)


def read_value(path: Any) -> int:
    values, valid = open_raster(str(path)).read(0, 0, 20, 20)
    assert valid.all() and len(np.unique(values)) == 1
    return int(values[0, 0, 0])


def rewrite(path: Path, value: int) -> None:
    write_value(path, value)


def replace(path: Path, value: int) -> None:
    """Put another file in the place of a file, with its time and size."""
    before = path.stat()
    write_value(path.parent / 'new.tif', value)
    os.utime(str(path.parent / 'new.tif'), ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(str(path.parent / 'new.tif'), str(path))
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_size == before.st_size


def patch(path: Path, value: int) -> None:
    """Change the pixels of a file in place, and give it its old time."""
    before = path.stat()
    with rasterio.open(str(path), 'r+') as file:
        file.write(np.full((1, 20, 20), value, np.uint8))
    os.utime(str(path), ns=(before.st_atime_ns, before.st_mtime_ns))


CHANGES = pytest.mark.parametrize('change', [rewrite, replace, patch])


@CHANGES
def test_a_file_that_changes_is_read_again(change: Callable, tmp_path: Path) -> None:
    """At once, so that times may be equal, and several times."""
    path = write_value(tmp_path / 'a.tif', 1)
    held = Raster(path)
    for value in (1, 2, 3, 4):
        change(path, value)
        assert read_value(path) == value and held.read(0, 0, 20, 20)[0][0, 0, 0] == value


@CHANGES
def test_a_source_of_a_mosaic_that_changes_is_read_again(change: Callable, tmp_path: Path) -> None:
    """In two mosaics, one of them of mosaics, and in a mosaic of scenes."""
    path = write_value(tmp_path / 'a.tif', 1)
    inner = write_mosaic(tmp_path / 'inner.vrt', [path])
    outer = write_mosaic(tmp_path / 'outer.vrt', [inner])
    joined = Mosaic([path])
    for value in (1, 2, 3):
        change(path, value)
        assert read_value(inner) == read_value(outer) == value
        assert joined.read(0, 0, 20, 20)[0][0, 0, 0] == value


def test_many_sources_are_looked_at_when_a_raster_is_opened(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(file_handles, '_MANY', 3)
    paths = [write_value(tmp_path / f'{number}.tif', 1) for number in range(5)]
    mosaic = write_mosaic(tmp_path / 'm.vrt', paths)
    for value in (1, 2, 3):
        rewrite(paths[4], value)
        Raster(paths[0])
        assert open_raster(str(mosaic)).read(80, 0, 20, 20)[0].max() == value


def test_companion_files_that_appear_or_change_count(tmp_path: Path) -> None:
    path = write_value(tmp_path / 'a.tif', 1)
    assert open_raster(str(path)).read(0, 0, 20, 20)[1].all()
    for columns in (7, 4):
        mask = np.full((20, 20), 255, np.uint8)
        mask[:, :columns] = 0
        other = write_value(tmp_path / 'b.tif', 1)
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK='NO'), rasterio.open(other, 'r+') as file:
            file.write_mask(mask)
        shutil.copy(f'{other}.msk', f'{path}.msk')
        os.remove(f'{other}.msk')
        assert (~open_raster(str(path)).read(0, 0, 20, 20)[1]).sum() == 20 * columns
    os.remove(f'{path}.msk')
    assert read_value(path) == 1
    (tmp_path / 'a.tif.aux.xml').write_text(
        '<PAMDataset><PAMRasterBand band="1"><NoDataValue>1</NoDataValue></PAMRasterBand>'
        '</PAMDataset>'
    )
    assert not open_raster(str(path)).read(0, 0, 20, 20)[1].any()


def test_a_file_in_an_archive_is_read_again(tmp_path: Path) -> None:
    for value in (1, 2, 3):
        write_value(tmp_path / 'a.tif', value)
        with zipfile.ZipFile(str(tmp_path / 'z.zip'), 'w') as archive:
            archive.write(str(tmp_path / 'a.tif'), 'a.tif')
        assert read_value(f'/vsizip/{tmp_path}/z.zip/a.tif') == value


def test_a_scene_that_is_held_must_keep_its_grid(tmp_path: Path) -> None:
    path = write_value(tmp_path / 'a.tif', 1)
    held = Raster(path)
    assert held.read(0, 0, 20, 20)[1].all()
    write_value(path, 2, 30)
    for _ in range(2):
        with pytest.raises(GeoError, match=r'a\.tif was written again .* another width and height'):
            held.read(0, 0, 20, 20)
    assert open_raster(str(path)).width == 30 and Raster(path).width == 30


def test_a_dataset_that_is_built_again_has_the_corrected_labels(tmp_path: Path) -> None:
    """Also where the scene and its labels have another size than before."""
    for side, label in ((128, 1), (128, 2), (192, 0)):
        classes = np.full((side, side), label, np.uint8)
        write_raster(tmp_path / 'scenes/a.tif', paint(classes), UTM)
        write_raster(tmp_path / 'labels/a.tif', classes, UTM)
        dataset = build_dataset(tmp_path)
        image, labels = load_window(dataset, len(dataset) - 1)[:2]
        inside = labels[labels != 255]
        assert len(inside) and (inside == label).all()
