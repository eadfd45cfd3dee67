"""One rule for invalid pixels, compared with rasterio's where both say the same."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
import rasterio
import rasterio.shutil
from geo_scenes import draw_classes, paint, write_raster
from rasterio.enums import ColorInterp

from mapsage.geo import Raster, RasterLabels

SIDE = 96


def scene(dtype: str = 'uint8') -> np.ndarray:
    """Return three bands of values from 1 to 250, (3, SIDE, SIDE)."""
    return np.random.RandomState(0).randint(1, 250, (3, SIDE, SIDE)).astype(dtype)


def read(path: Path, bands: Any = None) -> Any:
    return Raster(path, bands).read(0, 0, SIDE, SIDE)


def with_alpha(path: Path, values: np.ndarray, alpha: np.ndarray, nodata: Any = None) -> Path:
    return write_raster(
        path, np.concatenate([values, alpha[None]]), photometric='rgb', alpha='yes', nodata=nodata
    )


def alpha_of_columns(count: int) -> np.ndarray:
    """Return an alpha band whose first columns are 0, the next 128 and the others 255."""
    alpha = np.full((SIDE, SIDE), 255, np.uint8)
    alpha[:, count : 2 * count], alpha[:, :count] = 128, 0
    return alpha


@pytest.mark.parametrize('nodata', [0, 255])
def test_alpha_and_no_data_both_hide(nodata: int, tmp_path: Path) -> None:
    values = scene()
    values[:, :5] = nodata
    path = with_alpha(tmp_path / 'a.tif', values, alpha_of_columns(7), nodata)
    with rasterio.open(path) as file:
        assert file.colorinterp[3] == ColorInterp.alpha and file.nodata == nodata
    got, valid = read(path)
    expected = np.ones((SIDE, SIDE), bool)
    expected[:5] = expected[:, :7] = False
    np.testing.assert_array_equal(valid, expected)
    np.testing.assert_array_equal(got, np.where(expected, values, 0))


@pytest.mark.parametrize('nodata', [None, 0, 255])
def test_a_mask_and_no_data_both_hide(nodata: Optional[int], tmp_path: Path) -> None:
    """A file next to the scene, ``.msk``, and a mask inside of it."""
    values = scene()
    expected = np.ones((SIDE, SIDE), bool)
    expected[:, :7] = False
    if nodata is not None:
        values[:, :5] = nodata
        expected[:5] = False
    for inside in ('YES', 'NO'):
        path = write_raster(tmp_path / f'{inside}.tif', values, nodata=nodata)
        mask = np.full((SIDE, SIDE), 255, np.uint8)
        mask[:, :7] = 0
        with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=inside), rasterio.open(path, 'r+') as file:
            file.write_mask(mask)
        assert path.with_name(f'{path.name}.msk').exists() == (inside == 'NO')
        got, valid = read(path)
        np.testing.assert_array_equal(valid, expected)
        np.testing.assert_array_equal(got, np.where(expected, values, 0))


@pytest.mark.parametrize(
    'dtype, nodata',
    [('uint8', 255), ('uint8', 0), ('int16', -99), ('float32', -3.4028234663852886e38)],
)
def test_one_band_that_equals_no_data_keeps_its_value(
    dtype: str, nodata: float, tmp_path: Path
) -> None:
    values = scene(dtype)
    values[:, :5] = nodata
    values[1, 10:20] = nodata
    values[:2, 30:40] = nodata
    path = write_raster(tmp_path / 'a.tif', values, nodata=nodata)
    got, valid = read(path)
    assert not valid[:5].any() and valid[5:].all()
    np.testing.assert_array_equal(got[:, 5:], values[:, 5:])
    assert not got[:, :5].any()
    with rasterio.open(path) as file:  # the same pixels as rasterio's
        np.testing.assert_array_equal(valid, file.dataset_mask() != 0)
    # of two bands the pixels are invalid where these two are
    assert (~read(path, (1, 2))[1]).sum() == 15 * SIDE
    assert read(path, (3,))[1][5:].all()


@pytest.mark.parametrize(
    'dtype, tag, value',
    [
        ('float32', '-3.40282e+38', np.finfo('float32').min),
        ('float32', '3.40282e+38', np.finfo('float32').max),
        ('float32', '9.96921e+36', np.float32(9.969209968386869e36)),
        ('float64', '-1.79769e+308', np.finfo('float64').min),
    ],
)
def test_a_no_data_tag_of_six_digits(dtype: str, tag: str, value: float, tmp_path: Path) -> None:
    """Other programs print the tag like that; the pixels hold all digits, or the printed ones."""
    values = scene(dtype)
    values[:, :5] = value
    values[:, 5:9] = float(tag)
    path = write_raster(tmp_path / 'a.tif', values, nodata=float(tag))
    got, valid = read(path)
    assert not valid[:9].any() and valid[9:].all() and not got[:, :9].any()


def test_a_small_no_data_value_is_compared_with_all_digits(tmp_path: Path) -> None:
    values = scene('float32')
    values[:, :5] = 0.1
    values[:, 5:9] = 0.1 + 1e-7
    _, valid = read(write_raster(tmp_path / 'a.tif', values, nodata=0.1))
    assert not valid[:5].any() and valid[5:].all()


def test_bands_with_no_data_of_their_own(tmp_path: Path) -> None:
    """Only a band that has a no-data value can lack data; rasterio writes them through a VRT."""
    values = scene()
    values[:, :5] = np.array([1, 2, 3], np.uint8)[:, None, None]
    path = write_raster(tmp_path / 'a.tif', values)
    mosaic = tmp_path / 'a.vrt'
    rasterio.shutil.copy(str(path), str(mosaic), driver='VRT')
    plain = mosaic.read_text()
    for numbers, invalid in (((1, 2, 3), True), ((1, 2, None), False), ((1, 2, 4), False)):
        parts = plain.split('<ColorInterp>')
        text = parts[0] + ''.join(
            ('' if number is None else f'<NoDataValue>{number}</NoDataValue>')
            + f'<ColorInterp>{part}'
            for number, part in zip(numbers, parts[1:])
        )
        mosaic.write_text(text)
        valid = read(mosaic)[1]
        assert valid[:5].any() != invalid and valid[5:].sum() > 0.99 * valid[5:].size
        with rasterio.open(mosaic) as file:
            np.testing.assert_array_equal(valid, file.dataset_mask() != 0)


@pytest.mark.parametrize('nodata', [-9999, 300, 0.5])
def test_no_data_that_no_pixel_can_equal_hides_nothing(nodata: float, tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'a.tif', scene())
    mosaic = tmp_path / 'a.vrt'
    rasterio.shutil.copy(str(path), str(mosaic), driver='VRT')
    mosaic.write_text(
        mosaic.read_text().replace(
            '<ColorInterp>', f'<NoDataValue>{nodata}</NoDataValue><ColorInterp>'
        )
    )
    raster = Raster(mosaic)
    assert raster.read(0, 0, SIDE, SIDE)[1].all() and not raster.may_have_gaps


def test_alpha_as_data_leaves_no_data_in_force(tmp_path: Path) -> None:
    """A fourth band that a program tagged as alpha although it is infrared."""
    values = scene()
    values[:, :5] = 0
    infrared = np.zeros((SIDE, SIDE), np.uint8)
    infrared[:2] = 9
    path = with_alpha(tmp_path / 'a.tif', values, infrared, 0)
    valid = read(path, (1, 2, 3, 4))[1]
    assert valid[:2].all() and not valid[2:5].any() and valid[5:].all()
    assert read(path)[1].sum() == 0


def test_every_way_of_reading_has_the_rule(tmp_path: Path) -> None:
    values = scene()
    values[:, :32] = 255
    values[1, 40:80] = 255
    raster = Raster(with_alpha(tmp_path / 'a.tif', values, alpha_of_columns(32), 255))
    coarse, valid = raster.read_reduced(8)
    assert not valid[:4].any() and not valid[:, :4].any() and valid[4:, 4:].all()
    assert (coarse[1, 5:10, 4:] == 255).all() and not coarse[:, :4].any()
    across, valid = raster.read(-8, 24, 48, 16)
    assert not valid[:8].any() and not valid[:, :40].any() and valid[8:, 40:].all()
    assert raster.read_with_nodata(0, 0, SIDE, SIDE)[1][:, 32:].all()


def test_labels_with_a_mask_and_no_data(tmp_path: Path) -> None:
    """``label_nodata=None`` gives the file's no-data back its class; a mask stays one."""
    image = write_raster(tmp_path / 'a.tif', paint(draw_classes(SIDE, SIDE)))
    labels = np.ones((SIDE, SIDE), np.uint8)
    labels[:5], labels[:, :9] = 0, 2
    path = write_raster(tmp_path / 'labels.tif', labels, nodata=0)
    mask = np.full((SIDE, SIDE), 255, np.uint8)
    mask[:, :7] = 0
    with rasterio.Env(GDAL_TIFF_INTERNAL_MASK='YES'), rasterio.open(path, 'r+') as file:
        file.write_mask(mask)
    for nodata, classes in (
        ('file', {1: 91 * 87, 2: 2 * 96}),
        (None, {0: 5 * 87, 1: 91 * 87, 2: 2 * 96}),
        (1, {0: 5 * 87, 2: 2 * 96}),
    ):
        got, labeled = RasterLabels(path, Raster(image), nodata).read(0, 0, SIDE, SIDE)
        values, counts = np.unique(got[labeled], return_counts=True)
        assert dict(zip(values.tolist(), counts.tolist())) == classes


@pytest.mark.parametrize(
    'text, nodata',
    [
        (b'-9.2233720368547758e+18', -(2**63)),
        (b'-9223372036854775808', -(2**63)),
        (b'9223372036854775807', 2**63 - 1),
        (b'9223372036854775806', 2**63 - 2),
        (b'-1', -1),
        (b'1.5', 1.5),
        (b'nan', np.nan),
    ],
)
@pytest.mark.parametrize('big', ['NO', 'YES'])
@pytest.mark.parametrize('order', ['LITTLE', 'BIG'])
def test_no_data_of_64_bits(
    tmp_path: Path, text: bytes, nodata: float, big: str, order: str
) -> None:
    """The text of the tag counts: a float has 53 bits, and GDAL reads -9 of -9.2e+18."""
    if not rasterio.dtypes.check_dtype('int64'):
        pytest.skip(f'rasterio {rasterio.__version__} cannot write int64')
    values = np.zeros((1, 8, 8), np.int64)
    values[0, :2] = [[2**63 - 1], [2**63 - 2]]
    values[0, 2:5] = [[-(2**63)], [-1], [1]]
    path = write_raster(tmp_path / 'a.tif', values, nodata=-(2**63), bigtiff=big, endianness=order)
    written = re.search(rb'-9[.0-9e+]{18,}', path.read_bytes())
    assert written is not None
    end = written.end()
    path.write_bytes(
        path.read_bytes()[: end - len(written[0])]
        + text.ljust(len(written[0]), b'\0')[: len(written[0])]
        + path.read_bytes()[end:]
    )
    raster = Raster(path)
    assert repr(raster.nodata) == repr(nodata)
    np.testing.assert_array_equal(raster.read(0, 0, 8, 8)[1], values[0] != nodata)


def test_no_data_of_64_bits_in_a_mosaic(tmp_path: Path) -> None:
    if not rasterio.dtypes.check_dtype('int64'):
        pytest.skip(f'rasterio {rasterio.__version__} cannot write int64')
    values = np.zeros((1, 8, 8), np.int64)
    values[0, :2] = -(2**63)
    path = write_raster(tmp_path / 'a.tif', values)
    mosaic = tmp_path / 'a.vrt'
    rasterio.shutil.copy(str(path), str(mosaic), driver='VRT')
    mosaic.write_text(
        mosaic.read_text(encoding='utf-8').replace(
            '<ColorInterp>', f'<NoDataValue>{-(2**63)}</NoDataValue><ColorInterp>'
        ),
        encoding='utf-8',
    )
    raster = Raster(mosaic)
    assert raster.nodata == -(2**63)
    np.testing.assert_array_equal(raster.read(0, 0, 8, 8)[1], values[0] == 0)
