"""Windows of scenes, their validity, and damaged files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rasterio
from geo_scenes import (
    DEGREES,
    PIXELS,
    UTM,
    draw_classes,
    paint,
    write_mosaic,
    write_raster,
)
from rasterio.enums import ColorInterp

from mapsage.geo import GeoError, Raster


def test_facts_of_a_scene(tmp_path: Path) -> None:
    for place in (UTM, DEGREES):
        raster = Raster(write_raster(tmp_path / 'a.tif', paint(draw_classes())[:2], place))
        assert (raster.width, raster.height, raster.bands) == (300, 260, (1, 2))
        assert raster.dtype == np.uint8 and raster.nodata is None
        assert raster.crs == place['crs'] and raster.transform == place['transform']
        assert raster.is_georeferenced and not raster.may_have_gaps
    assert not Raster(write_raster(tmp_path / 'b.tif', draw_classes(), PIXELS)).is_georeferenced


def test_rasters_with_one_crs_share_it(tmp_path: Path) -> None:
    scenes = [
        Raster(write_raster(tmp_path / f'{number}.tif', paint(draw_classes())[:1], place))
        for number, place in enumerate((UTM, DEGREES, UTM, DEGREES))
    ]
    assert scenes[0].crs is scenes[2].crs and scenes[1].crs is scenes[3].crs
    assert [scene.crs for scene in scenes[:2]] == [UTM['crs'], DEGREES['crs']]


@pytest.mark.parametrize('dtype', ['uint8', 'uint16', 'int16', 'float32'])
def test_windows_inside_across_and_beyond_the_border(tmp_path: Path, dtype: str) -> None:
    values = paint(draw_classes(), 4, dtype)
    with Raster(
        write_raster(tmp_path / 'a.tif', values, photometric='minisblack', alpha='unspecified'),
        bands=(3, 1),
    ) as raster:
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
