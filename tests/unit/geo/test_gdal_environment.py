"""Contexts of GDAL's options: one within another, and files that are opened in them."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, List

import numpy as np
import rasterio
from geo_scenes import write_raster
from rasterio.env import getenv

from mapsage.geo import RasterLabels, file_handles, gdal_environment, open_raster
from mapsage.geo.gdal_files import open_file
from mapsage.geo.raster import Raster

LISTING = 'GDAL_DISABLE_READDIR_ON_OPEN'


def test_a_context_in_a_context_enters_nothing(monkeypatch: Any) -> None:
    entered: List[object] = []
    enter = rasterio.Env.__enter__
    monkeypatch.setattr(rasterio.Env, '__enter__', lambda self: entered.append(self) or enter(self))
    with gdal_environment('a.tif', remote=False):
        with gdal_environment('b.tif', remote=False):
            assert len(entered) == 1
        with gdal_environment('https://x/b.tif', remote=True):
            assert len(entered) == 2
            assert getenv()[LISTING] == 'EMPTY_DIR'
            with gdal_environment('a.tif', remote=False):
                assert len(entered) == 3
                assert str(getenv()[LISTING]).upper() in ('TRUE', '1', 'YES')
        assert str(getenv()[LISTING]).upper() in ('TRUE', '1', 'YES')
        assert getenv()['GDAL_NUM_THREADS'] == 1
    with gdal_environment('a.tif', remote=False):
        assert len(entered) == 4


def test_a_thread_enters_a_context_of_its_own(tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'a.tif', np.zeros((1, 4, 4), np.uint8))
    options: List[object] = []

    def read() -> None:
        with gdal_environment('a.tif', remote=False):
            options.append(getenv()['GDAL_NUM_THREADS'])
            open_file(path).close()

    with gdal_environment('a.tif', remote=False):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert options == [1]


def test_labels_read_their_header_once_and_threads_do_not_share_files(
    tmp_path: Path, monkeypatch: Any
) -> None:
    values = np.arange(16, dtype=np.uint8).reshape(1, 4, 4)
    scene = Raster(write_raster(tmp_path / 'a.tif', np.zeros((1, 4, 4), np.uint8)))
    labels = RasterLabels(write_raster(tmp_path / 'b.tif', values), scene)
    headers: List[object] = []
    # A file that was written within a tick of the clock is opened again.
    monkeypatch.setattr(file_handles, '_TICK', 0)
    monkeypatch.setattr(file_handles, '_COARSE_TICK', 0)
    labels = RasterLabels(labels.path, scene)
    init = Raster.__init__
    monkeypatch.setattr(
        Raster,
        '__init__',
        lambda self, *args, **kwargs: headers.append(args) or init(self, *args, **kwargs),
    )
    assert (labels.read(0, 0, 4, 4)[0] == values[0]).all()
    assert not headers

    def read_and_close() -> None:
        assert (labels.read(1, 0, 2, 2)[0] == values[0, :2, 1:3]).all()
        labels.close()

    thread = threading.Thread(target=read_and_close)
    thread.start()
    thread.join()
    # The other thread has closed its file only.
    assert open_raster(labels.path)._handles.is_open()
    assert (labels.read(0, 2, 4, 2)[0] == values[0, 2:]).all()
