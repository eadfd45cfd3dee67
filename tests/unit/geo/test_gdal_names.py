"""Names that are no paths: what GDAL opens for them, and what is made of them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from mapsage.datasets import GeoTiffDataset
from mapsage.geo import gdal_names, match
from mapsage.maps.inputs import find_inputs


@pytest.mark.parametrize(
    'name, vsi, remote, made',
    [
        (
            'https://h/d/sc%20a.tif?key=a/b.c',
            '/vsicurl/https://h/d/sc%20a.tif?key=a/b.c',
            True,
            'sc a',
        ),
        ('ftp://h/a.tif', '/vsicurl/ftp://h/a.tif', True, 'a'),
        ('s3://b/k/a.tif', '/vsis3/b/k/a.tif', True, 'a'),
        ('gs://b/k/a.tif', '/vsigs/b/k/a.tif', True, 'a'),
        ('zip://d/z.zip!in/a.tif', '/vsizip/d/z.zip/in/a.tif', False, 'a'),
        ('zip://d/z.zip!/in/a.tif', '/vsizip/d/z.zip/in/a.tif', False, 'a'),
        ('zip+https://h/z.zip!a.tif', '/vsizip/vsicurl/https://h/z.zip/a.tif', True, 'a'),
        ('/vsizip//vsicurl/https://h/z.zip/a.tif', '', True, 'a'),
        ('/vsicurl/https://h/a.b.tif', '', True, 'a.b'),
        ('/vsigzip/d/a.tif.gz', '', False, 'a'),
        ('file:///d/a.tif', '/d/a.tif', False, 'a'),
        ('NETCDF:"d/t.nc":sea/sst', '', False, 't_sea_sst'),
        ('NETCDF:d/t.nc:sst', '', False, 't_sst'),
        ('NETCDF:"/vsicurl/https://h/t.nc":sst', '', True, 't_sst'),
        ('HDF5:"f.h5"://group/data', '', False, 'f_group_data'),
        ('HDF4_EOS:EOS_GRID:"f.hdf":grid:band 1', '', False, 'f_grid_band 1'),
        ('GTIFF_DIR:2:d/a.tif', '', False, 'a_2'),
        (
            'SENTINEL2_L2A:d/S2A_X.SAFE/MTD_MSIL2A.xml:10m:EPSG_32632',
            '',
            False,
            'S2A_X_10m_EPSG_32632',
        ),
        (
            'SENTINEL2_L2A:/vsicurl/https://h/S2B_Y.SAFE/MTD_MSIL2A.xml:TCI:EPSG_32632',
            '',
            True,
            'S2B_Y_TCI_EPSG_32632',
        ),
        ('vrt://d/a.tif?bands=2', '', False, 'a'),
    ],
)
def test_names_for_gdal(name: str, vsi: str, remote: bool, made: str) -> None:
    assert gdal_names.is_gdal_name(name)
    assert gdal_names.as_vsi(name) == (vsi or name)
    assert gdal_names.is_remote(name) == remote == bool(gdal_names.remote_file(name))
    assert gdal_names.output_name(name) == made
    assert gdal_names.locate('/data', name) == name


def test_what_a_server_is_asked_for() -> None:
    for name, asked in (
        ('zip+https://h/z.zip!in/a.tif', '/vsicurl/https://h/z.zip'),
        ('/vsizip//vsis3/b/z.zip/in/a.tif', '/vsis3/b/z.zip'),
        ('NETCDF:"https://h/t.nc":sst', '/vsicurl/https://h/t.nc'),
        ('https://u:p@h/a.tif?s=1', '/vsicurl/https://u:p@h/a.tif?s=1'),
    ):
        assert gdal_names.remote_file(name) == asked
    assert gdal_names.without_secrets('https://u:p@h/a.tif?s=1') == 'https://h/a.tif'


def test_paths_are_paths_whatever_their_name(tmp_path: Path) -> None:
    for name in ('a.tif', 'd/a b?c.tif', '/d/a.tif', 'C:/a.tif', 'd[1]/a.tif'):
        assert not gdal_names.is_gdal_name(name) and gdal_names.as_vsi(name) == name
    odd = tmp_path / 'NETCDF:a.tif'
    odd.write_bytes(b'')
    assert not gdal_names.is_gdal_name(str(odd)) and gdal_names.output_name(str(odd)) == 'NETCDF:a'
    assert gdal_names.locate(str(tmp_path), 'NETCDF:a.tif') == str(odd)
    assert gdal_names.locate('d', 'a.tif') == 'd/a.tif' and gdal_names.locate(None, 'a') == 'a'


def test_folders_of_disks_and_archives(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / 'z.zip', 'w') as archive:
        for name in ('in/b.tif', 'in/a.TIF', 'in/notes.txt', 'c.tif'):
            archive.writestr(name, b'')
    archive_path = f'/vsizip/{tmp_path}/z.zip/'
    assert gdal_names.match(archive_path, ('.tif',)) == [archive_path + 'c.tif']
    assert gdal_names.match(f'zip://{tmp_path}/z.zip!in/', ('.tif',)) == [
        archive_path + 'in/a.TIF',
        archive_path + 'in/b.tif',
    ]
    (tmp_path / 'x.tif').write_bytes(b'')
    (tmp_path / 'y[1].tif').write_bytes(b'')
    both = [str(tmp_path / name) for name in ('x.tif', 'y[1].tif')]
    assert gdal_names.match(str(tmp_path), ('.tif',)) == both
    assert gdal_names.match(f'{tmp_path}/*.tif', ()) == both
    assert gdal_names.match(both[1], ()) == both[1:]
    assert gdal_names.match('https://h/a.tif?x=*', ()) == ['https://h/a.tif?x=*']
    assert gdal_names.local_file(archive_path + 'c.tif') == str(tmp_path / 'z.zip')


def test_drivers_that_this_gdal_lacks() -> None:
    assert gdal_names.missing_driver('HDF4_EOS:EOS_GRID:"a.hdf":g:b') == 'HDF4'
    assert gdal_names.missing_driver('MOD13.hdf') == 'HDF4'
    assert gdal_names.missing_driver('/vsicurl/https://h/a.ecw') == 'ECW'
    for name in ('a.tif', 'NETCDF:"a.nc":b', 'a.jp2', 's3://b/a.tif', 'a'):
        assert gdal_names.missing_driver(name) == ''


def test_one_rule_says_what_a_folder_of_scenes_holds(tmp_path: Path) -> None:
    """The statistics, the dataset and the prediction take the same files of a folder."""
    names = ['a.tif', 'b.TIFF', 'c.vrt', 'd.img', 'e.jp2', 'f.png', 'g.jpg', 'h.jpeg', 'i.bmp']
    for name in [*names, 'a.tif.aux.xml', 'b.tfw', 'labels.gpkg', 'notes.txt', 'scene.qml']:
        (tmp_path / name).touch()
    (tmp_path / 'folder.tif').mkdir()
    paths = [str(tmp_path / name) for name in names]
    dataset = GeoTiffDataset(
        scenes=str(tmp_path), window=8, lazy_init=True, metainfo=dict(classes=('a',))
    )
    assert match(str(tmp_path)) == dataset._find_scenes() == paths
    assert sorted(find_inputs([str(tmp_path)]).values()) == paths
