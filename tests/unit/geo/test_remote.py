"""Scenes on a server: their pixels, and errors that come soon and name the server's file."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio.shutil
from geo_scenes import write_raster
from range_server import RangeServer

from mapsage.datasets.geotiff.fast_copies import FastCopies
from mapsage.geo import GeoError, Raster, RasterBlockError, measure_read_times
from mapsage.geo.errors import RemoteReadError
from mapsage.geo.gdal_files import stamp

NOISE = np.random.RandomState(0).randint(0, 255, (3, 256, 320)).astype('uint8')


@pytest.fixture
def scene(tmp_path: Path, server: RangeServer) -> Path:
    """A scene of noise that the server has, its size far beyond a first request."""
    return write_raster(tmp_path / 'served/a.tif', NOISE)


def test_pixels_come_without_a_look_into_the_folder(scene: Path, server: RangeServer) -> None:
    for name in (f'{server.url}/ok/a.tif', f'/vsicurl/{server.url}/ok/a.tif?with=query'):
        with Raster(name) as raster:
            assert raster.is_remote and not Raster(scene).is_remote
            values, valid = raster.read(10, 20, 300, 230)
            np.testing.assert_array_equal(values, NOISE[:, 20:250, 10:310])
            assert valid.all()
            vsi = name if name.startswith('/') else f'/vsicurl/{name}'
            assert raster.files() == [vsi]
    asked = {line.rpartition(' ')[0].partition('?')[0] for line in server.requests()}
    assert asked == {'HEAD /ok/a.tif', 'GET /ok/a.tif'}


def test_the_user_may_ask_for_companions(
    scene: Path, server: RangeServer, monkeypatch: Any
) -> None:
    monkeypatch.setenv('GDAL_DISABLE_READDIR_ON_OPEN', 'TRUE')
    Raster(f'{server.url}/ok/a.tif').close()
    assert any('a.tif.aux.xml' in line for line in server.requests())


def test_what_a_server_refuses(scene: Path, server: RangeServer) -> None:
    for fault, words in (
        ('gone', 'the server does not deliver it .*404'),
        ('private', 'the server does not deliver it .*403.*right to read'),
        ('norange', 'Range downloading not supported.* Copy the file here'),
    ):
        with pytest.raises(GeoError, match=words) as caught:
            Raster(f'{server.url}/{fault}/a.tif')
        assert f'{server.url}/{fault}/a.tif' in str(caught.value)
    nobody = f'{server.url}/ok/a.tif'
    server.close()
    with pytest.raises(GeoError, match='the server does not deliver it') as caught:
        Raster(nobody)
    assert nobody in str(caught.value)


def test_a_file_that_was_not_there_is_asked_for_again(scene: Path, server: RangeServer) -> None:
    scene.rename(scene.with_name('later'))
    for _ in range(2):
        with pytest.raises(GeoError, match='404'):
            Raster(f'{server.url}/ok/a.tif')
    scene.with_name('later').rename(scene)
    assert Raster(f'{server.url}/ok/a.tif').width == 320


@pytest.mark.parametrize('fault', ['stall', 'busy'])
def test_a_server_that_stops_answering(scene: Path, server: RangeServer, fault: str) -> None:
    with Raster(f'{server.url}/{fault}/a.tif') as raster:
        with pytest.raises(
            RemoteReadError, match='did not deliver the window .*GDAL_HTTP_TIMEOUT=1'
        ) as caught:
            raster.read(0, 0, 320, 256)
        assert raster.path in str(caught.value)
    assert len(server.requests()) < 20  # not each block again


def test_a_file_that_is_cut_off(scene: Path, server: RangeServer) -> None:
    data = scene.read_bytes()
    (scene.parent / 'half.tif').write_bytes(data[: len(data) // 2])
    with Raster(f'{server.url}/cut/a.tif') as remote, Raster(scene.parent / 'half.tif') as local:
        found = []
        for raster in (remote, local):
            with pytest.raises(RasterBlockError, match='damaged are') as caught:
                raster.read(0, 0, 320, 256)
            found.append(caught.value.blocks)
        assert found[0] == found[1] and 0 < len(found[0]) < 20
        first = Raster(scene).read(0, 0, 320, 64)[0]
        np.testing.assert_array_equal(remote.read(0, 0, 320, 64)[0], first)


def test_bytes_that_arrive_and_are_wrong(scene: Path, server: RangeServer) -> None:
    with rasterio.open(scene) as file:
        offset = int(file.get_tag_item('BLOCK_OFFSET_2_1', 'TIFF', bidx=1))
    with open(scene, 'r+b') as file:
        file.seek(offset)
        file.write(b'\xff' * 40)
    says_why = rasterio.__version__ >= '1.4'
    with Raster(f'{server.url}/ok/a.tif') as raster:
        with pytest.raises(RasterBlockError if says_why else RemoteReadError) as caught:
            raster.read(0, 0, 320, 256)
    if says_why:
        assert caught.value.blocks == [(128, 64, 64, 64)]


def test_a_mosaic_of_sources_on_a_server(tmp_path: Path, scene: Path, server: RangeServer) -> None:
    rasterio.shutil.copy(f'/vsicurl/{server.url}/ok/a.tif', str(tmp_path / 'm.vrt'), driver='VRT')
    before = len(server.requests())
    with Raster(tmp_path / 'm.vrt') as raster:
        assert raster.is_remote
        np.testing.assert_array_equal(raster.read(0, 0, 320, 256)[0], NOISE)
        assert f'/vsicurl/{server.url}/ok/a.tif' in raster.files()
    assert not any(line.startswith('GET /ok/ ') for line in server.requests()[before:])


def test_stores_like_s3(scene: Path, server: RangeServer, monkeypatch: Any) -> None:
    """The user's environment decides how requests are signed, and whether."""
    for name, value in dict(
        AWS_S3_ENDPOINT=server.address,
        AWS_HTTPS='NO',
        AWS_VIRTUAL_HOSTING='FALSE',
        AWS_REGION='eu-central-1',
        AWS_NO_SIGN_REQUEST='YES',
    ).items():
        monkeypatch.setenv(name, value)
    with Raster('s3://ok/a.tif') as raster:
        np.testing.assert_array_equal(raster.read(0, 0, 320, 256)[0], NOISE)
    with pytest.raises(GeoError, match='s3://private/a.tif: the server does not deliver it'):
        Raster('s3://private/a.tif')
    monkeypatch.delenv('AWS_NO_SIGN_REQUEST')
    monkeypatch.setenv('AWS_ACCESS_KEY_ID', 'test')
    monkeypatch.setenv('AWS_SECRET_ACCESS_KEY', 'test')
    with Raster('/vsis3/private/a.tif') as raster:
        np.testing.assert_array_equal(raster.read(0, 0, 320, 256)[0], NOISE)
    assert stamp('s3://private/a.tif')[1:] == stamp(f'{server.url}/ok/a.tif')[1:]


def _compare(name: str, seed: int, answers: Any) -> None:
    random = np.random.RandomState(seed)
    wrong = 0
    with Raster(name) as raster:
        for number in range(20):
            column, row = random.randint(0, 256), random.randint(0, 192)
            with Raster(f'{name}?{seed}.{number}') as other:
                for each in (raster, other):
                    values = each.read(column, row, 64, 64)[0]
                    wrong += int((values != NOISE[:, row : row + 64, column : column + 64]).sum())
    answers.put(wrong)


def test_workers_that_are_forked_after_a_read(
    scene: Path, server: RangeServer, monkeypatch: Any
) -> None:
    """Without care they share their parent's connections, and read each other's answers."""
    monkeypatch.setenv('GDAL_HTTP_TIMEOUT', '30')
    name = f'{server.url}/ok/a.tif'
    Raster(name).read(0, 0, 64, 64)
    context = multiprocessing.get_context('fork')
    answers = context.Queue()
    workers = [context.Process(target=_compare, args=(name, seed, answers)) for seed in range(4)]
    for worker in workers:
        worker.start()
    _compare(name, 9, answers)
    assert [answers.get(timeout=120) for _ in range(5)] == [0] * 5
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0


def test_a_scene_on_a_server_has_a_fast_copy(
    scene: Path, server: RangeServer, tmp_path: Path
) -> None:
    name = f'{server.url}/ok/a.tif'
    copies = FastCopies(str(tmp_path / 'fast'))
    report = copies.make([name])
    assert report.written == 1 and copies.make([name]).written == 0
    np.testing.assert_array_equal(Raster(report.copies[name]).read(0, 0, 320, 256)[0], NOISE)
    assert measure_read_times(name, 128).is_remote
