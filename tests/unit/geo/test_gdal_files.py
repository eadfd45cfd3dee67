"""Opening files for GDAL, and stamps that change with their content."""

from __future__ import annotations

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from geo_scenes import UTM, draw_classes, write_mosaic, write_raster
from range_server import RangeServer
from rasterio.transform import from_origin

from mapsage.geo import Raster, stamp


@pytest.mark.parametrize('kind', ['tif', 'vrt'])
def test_forked_processes_read_where_gdal_uses_threads(
    tmp_path: Path, kind: str, monkeypatch: Any
) -> None:
    monkeypatch.setenv('GDAL_NUM_THREADS', '2')
    halves = np.random.RandomState(0).randint(0, 255, (2, 1024, 1024), 'uint8')
    paths = [
        write_raster(
            tmp_path / f'{place}.tif',
            half,
            dict(UTM, transform=from_origin(500000.0 + 512 * place, 4100000.0, 0.5, 0.5)),
            blockxsize=512,
            blockysize=512,
        )
        for place, half in enumerate(halves)
    ]
    path = paths[0] if kind == 'tif' else write_mosaic(tmp_path / 'a.vrt', paths)
    raster = Raster(path)
    whole = 0, 0, raster.width, raster.height  # from a million pixels on, mosaics use threads
    expected = raster.read(*whole)[0].sum()
    context = multiprocessing.get_context('fork')
    queue = context.Queue()
    child = context.Process(
        target=lambda: queue.put(Raster(path).read(*whole)[0].sum()), daemon=True
    )  # which ends a child that waits for ever
    child.start()
    assert queue.get(timeout=60) == expected
    child.join(60)


def test_stamps_tell_contents_apart(tmp_path: Path, server: RangeServer) -> None:
    path = write_raster(tmp_path / 'served/a.tif', draw_classes())
    url = f'{server.url}/ok/a.tif'
    name, size, tag = stamp(f'{server.url.replace("//", "//me:secret@")}/ok/a.tif?signature=x')
    assert name == url and size == path.stat().st_size and tag
    assert stamp(url) == [name, size, tag] == stamp(f'/vsicurl/{url}')[:0] + stamp(url)
    bare = f'{server.url}/plain/a.tif'
    assert stamp(bare)[1] == size and stamp(bare)[2] != stamp(bare + '?other')[2]
    shutil.make_archive(str(tmp_path / 'z'), 'zip', str(tmp_path / 'served'))
    packed = stamp(f'zip://{tmp_path}/z.zip!a.tif')
    assert packed[1:] == stamp(str(tmp_path / 'z.zip'))[1:] and packed[0].endswith('a.tif')
    assert stamp(str(path))[0] == str(path) and stamp('NETCDF:no.nc:a') == ['NETCDF:no.nc:a']
