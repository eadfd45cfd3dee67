"""tools/predict.py, tools/geotiff_statistics.py and the dataset on names that are no files."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any, Tuple

import cv2
import numpy as np
import pytest
import rasterio
import rasterio.shutil
from color_model import COLORS, paint, write_scene
from geo_scenes import paint as paint_bands
from geo_scenes import write_raster
from geotiff_data import build_dataset, load_window
from geotiff_data import write_scene as write_training_scene
from map_runs import read, run
from range_server import RangeServer
from rasterio.transform import Affine
from support import on_host
from torch.utils.data import DataLoader

from mapsage.commands import geotiff_statistics
from mapsage.commands.predict import PARTIAL
from mapsage.geo import GeoError, Raster, vsi
from mapsage.geo.errors import RemoteReadError
from mapsage.maps.errors import PredictError
from mapsage.pictures.map_preview import thumbnail

UTM = dict(crs='EPSG:32633', transform=Affine(0.5, 0, 500000, 0, -0.5, 5000000))
TILED = dict(tiled=True, blockxsize=64, blockysize=64)

pytestmark = on_host


def write_netcdf(path: Path, classes: np.ndarray) -> Path:
    """Write the colors of a class map as the variables Band1 to Band3 of a NetCDF file."""
    scene = write_scene(path.with_suffix('.tif'), classes, **UTM)
    rasterio.shutil.copy(str(scene), str(path), driver='netCDF')
    return path


def test_one_run_takes_servers_archives_mosaics_and_disks(
    model: Tuple[Path, Path], tmp_path: Path, server: RangeServer, capsys: Any
) -> None:
    classes = paint(100, 150)
    write_scene(tmp_path / 'served/far away.tif', classes, **UTM, **TILED)
    near = write_scene(tmp_path / 'näh \u5730\u56fe.tif', classes[:80], **UTM)
    with zipfile.ZipFile(tmp_path / 'z.zip', 'w') as archive:
        archive.write(near, 'in/packed.tif')
        archive.writestr('in/photo.png', cv2.imencode('.png', COLORS[classes][:, :, ::-1])[1])
        archive.writestr('in/notes.txt', 'not an image')
    rasterio.shutil.copy(
        f'/vsizip/{tmp_path}/z.zip/in/packed.tif', str(tmp_path / 'mosaic.vrt'), driver='VRT'
    )
    gray = write_netcdf(tmp_path / 'sea.nc', classes)
    out = tmp_path / 'out'
    inputs = [
        f'{server.url}/ok/far%20away.tif?key=secret',
        near,
        f'zip://{tmp_path}/z.zip!in/',
        tmp_path / 'mosaic.vrt',
    ]
    assert run(model, *inputs, '--out', out) == 0
    assert sorted(path.stem for path in out.glob('*.tif')) == sorted(
        ['far away', near.stem, 'packed', 'photo', 'mosaic']
    )
    for name, expected in (
        ('far away', classes),
        (near.stem, classes[:80]),
        ('packed', classes[:80]),
        ('photo', classes),
        ('mosaic', classes[:80]),
    ):
        np.testing.assert_array_equal(read(out / f'{name}.tif'), expected)
    assert 'secret' not in (out / 'far away.json').read_text()
    capsys.readouterr()
    assert run(model, *inputs, '--out', out) == 0
    assert capsys.readouterr().out.count('skipped') == 5
    assert run(model, f'NETCDF:"{gray}":Band1', '--bands', 1, 1, 1, '--out', tmp_path / 'nc') == 0
    assert (tmp_path / 'nc/sea_Band1.tif').exists()


def test_a_file_on_a_server_that_changes_is_another_input(
    model: Tuple[Path, Path], tmp_path: Path, server: RangeServer
) -> None:
    scene = write_scene(tmp_path / 'served/a.tif', paint(80, 90), **UTM)
    url = f'{server.url}/ok/a.tif'
    assert run(model, url, '--out', tmp_path / 'out') == 0
    write_scene(scene, paint(80, 90)[::-1], **UTM)
    os.utime(scene, (10**9, 10**9))
    vsi.forget(f'/vsicurl/{url}')  # as a new process has
    with pytest.raises(PredictError, match='made with another input'):
        run(model, url, '--out', tmp_path / 'out')


def test_what_a_server_lacks_is_no_data_and_what_it_withholds_an_error(
    model: Tuple[Path, Path], tmp_path: Path, server: RangeServer, capsys: Any
) -> None:
    random = np.random.RandomState(0).randint(0, 4, (192, 192)).astype(np.uint8)
    write_scene(tmp_path / 'served/a.tif', random, **UTM, **TILED)
    for fault in ('stall', 'gone'):
        with pytest.raises((RemoteReadError, PredictError)) as caught:
            run(model, f'{server.url}/{fault}/a.tif', '--out', tmp_path / fault)
        assert f'{server.url}/{fault}/a.tif' in str(caught.value)
        assert list((tmp_path / fault).glob('*.tif')) == []
    assert run(model, f'{server.url}/cut/a.tif', '--out', tmp_path / 'cut') == PARTIAL
    assert 'damaged block(s)' in capsys.readouterr().out
    made = read(tmp_path / 'cut/a.tif')
    assert (made[:64] == random[:64]).all() and (made[128:] == 255).all()


def test_names_that_cannot_be_opened(model: Tuple[Path, Path], tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / 'z.zip', 'w') as archive:
        archive.writestr('notes.txt', 'not an image')
    rasterio.shutil.copy(
        str(write_scene(tmp_path / 'a.tif', paint(40, 50), **UTM)),
        str(tmp_path / 'two.nc'),
        driver='netCDF',
    )
    for name, words in (
        (f'HDF4_SDS:UNKNOWN:"{tmp_path}/a.hdf":0', 'has no driver HDF4 .*libgdal-hdf4'),
        (f'/vsizip/{tmp_path}/z.zip/a.tif', 'no raster that GDAL reads in it'),
        (f'zip://{tmp_path}/none.zip!a.tif', 'no such file'),
        (f'zip://{tmp_path}/z.zip!', 'no raster that GDAL reads in it'),
        (f'/vsizip/{tmp_path}/z.zip/', 'holds no image'),
        (tmp_path / 'two.nc', 'but 3 rasters: netcdf:.*Band1.* Name one of them'),
    ):
        with pytest.raises(PredictError, match=words):
            run(model, name, '--out', tmp_path / 'out')


def test_a_mosaic_that_lacks_a_file_makes_no_map(
    model: Tuple[Path, Path], tmp_path: Path, capsys: Any
) -> None:
    scene = write_scene(tmp_path / 'away.tif', paint(40, 50), **UTM)
    rasterio.shutil.copy(str(scene), str(tmp_path / 'm.vrt'), driver='VRT')
    scene.unlink()
    with pytest.raises(PredictError, match=r'm\.vrt is a mosaic of 1 file.*/away\.tif'):
        run(model, tmp_path / 'm.vrt', '--out', tmp_path / 'out')
    with pytest.raises(SystemExit, match=r'GeoError: .*m\.vrt is a mosaic of 1 file'):
        geotiff_statistics.main([str(tmp_path / 'm.vrt')])


def test_names_in_other_encodings(model: Tuple[Path, Path], tmp_path: Path) -> None:
    scene = write_scene(tmp_path / 'a.tif', paint(40, 50), **UTM)
    odd = os.fsencode(tmp_path) + '/\u5730\u56fe.tif'.encode('gbk')
    os.link(scene, odd)
    with pytest.raises(PredictError, match='is not in UTF-8.*convmv -f gbk'):
        run(model, os.fsdecode(odd), '--out', tmp_path / 'out')


def test_the_picture_of_a_map_is_made_from_overviews(
    model: Tuple[Path, Path], tmp_path: Path, server: RangeServer
) -> None:
    random = np.random.RandomState(0).randint(0, 4, (1600, 1600)).astype(np.uint8)
    write_scene(tmp_path / 'plain.tif', random, **UTM)
    rasterio.shutil.copy(
        str(tmp_path / 'plain.tif'),
        str(tmp_path / 'served/a.tif'),
        driver='COG',
        blocksize='256',
        compress='NONE',
    )
    with Raster(f'{server.url}/ok/a.tif') as far, Raster(tmp_path / 'served/a.tif') as near:
        before = sum_of_bytes(server)
        small = thumbnail(far, 3)
        assert sum_of_bytes(server) - before < 0.5 * 3 * 1600**2
        assert small.shape == thumbnail(near, 3).shape == (534, 534, 3)
        assert abs(small.mean() - thumbnail(near, 3).mean()) < 2


def sum_of_bytes(server: RangeServer) -> int:
    return sum(int(line.split()[-1]) for line in server.requests())


def test_statistics_of_scenes_on_a_server(tmp_path: Path, server: RangeServer, capsys: Any) -> None:
    write_raster(tmp_path / 'served/a.tif', paint_bands(paint(60, 70)))
    geotiff_statistics.main([str(tmp_path / 'served/a.tif')])
    expected = capsys.readouterr().out
    geotiff_statistics.main([f'{server.url}/ok/a.tif'])
    assert capsys.readouterr().out == expected and 'mean=[' in expected
    with pytest.raises(SystemExit, match='GeoError: cannot open .*ok/b.tif: .*404'):
        geotiff_statistics.main([f'{server.url}/ok/b.tif'])


def test_a_dataset_of_scenes_on_a_server_and_in_archives(
    tmp_path: Path, server: RangeServer
) -> None:
    values, classes = write_training_scene(tmp_path)
    os.link(tmp_path / 'scenes/a.tif', tmp_path / 'served/a.tif')
    with zipfile.ZipFile(tmp_path / 'b.zip', 'w') as archive:
        archive.write(tmp_path / 'scenes/a.tif', 'a.tif')
    dataset = build_dataset(
        tmp_path, scenes=[f'{server.url}/ok/a.tif?key=1', f'zip://{tmp_path}/b.zip!a.tif', 'scenes']
    )
    assert len(dataset) == 27
    for index in (0, 8, 9, 17, 26):
        column, row, side = dataset.get_data_info(index)['window']
        image, mask = load_window(dataset, index)
        inside = np.s_[row : row + side, column : column + side]
        np.testing.assert_array_equal(image, values[(slice(None), *inside)])
        np.testing.assert_array_equal(mask, classes[inside])
    assert Path(dataset[1]['data_samples'].img_path).name == 'a_128_0.tif'
    far = build_dataset(tmp_path, scenes=f'{server.url}/ok/a.tif')
    loader = DataLoader(far, num_workers=3, collate_fn=list, multiprocessing_context='fork')
    for index, (sample,) in enumerate(loader):
        np.testing.assert_array_equal(sample['inputs'], load_window(far, index)[0])
    with pytest.raises(GeoError, match='cannot open .*gone/a.tif: the server does not deliver it'):
        build_dataset(tmp_path, scenes=f'{server.url}/gone/a.tif')
