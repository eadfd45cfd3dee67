"""Scenes in another size than their own."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import rasterio
from geo_scenes import DEGREES, UTM, draw_classes, paint, write_raster

from mapsage.geo import Raster, pixel_side
from mapsage.maps.inputs import Scene, choose_size
from mapsage.maps.model import Bands


@pytest.mark.parametrize('dtype', ['uint8', 'float32'])
@pytest.mark.parametrize('size', [(130, 150), (97, 111), (441, 509), (260, 150)])
def test_windows_in_another_size_are_those_of_the_resized_scene(
    tmp_path: Path, size: tuple, dtype: str
) -> None:
    values = paint(draw_classes(), 3, dtype)
    path = write_raster(tmp_path / 'a.tif', values)
    scene = Scene(str(path), Bands(3, False), size)
    expected = cv2.resize(values.transpose(1, 2, 0), size[::-1], interpolation=cv2.INTER_LINEAR)
    for column, row in ((0, 0), (30, 31), (size[1] - 64, size[0] - 64)):
        window, valid, damage = scene.read(column, row, (64, 64))
        assert window.dtype == dtype and valid.all() and valid.shape == (64, 64) and not damage
        np.testing.assert_allclose(
            window.transpose(1, 2, 0).astype(float),
            expected[row : row + 64, column : column + 64],
            atol=1 if dtype == 'uint8' else 1e-3,
        )
    window, valid, _ = scene.read(size[1] - 40, size[0] - 30, (64, 64))
    assert valid.shape == (30, 40) and window.shape == (3, 64, 64)
    np.testing.assert_array_equal(window[:, 30:50], window[:, 28:8:-1])  # mirrored


@pytest.mark.parametrize('size', [None, (97, 111)])
def test_16_bits_are_handed_out_to_those_who_take_them(tmp_path: Path, size: Any) -> None:
    values = paint(draw_classes(), 3, 'uint16')
    scene = Scene(str(write_raster(tmp_path / 'a.tif', values)), Bands(3, False), size)
    wide = scene.read(5, 6, (64, 64))[0]
    scene.dtypes = (np.uint8, np.uint16)
    window = scene.read(5, 6, (64, 64))[0]
    assert wide.dtype == np.float32
    # Interpolated values have fractions.
    assert window.dtype == (np.uint16 if size is None else np.float32)
    np.testing.assert_array_equal(window, wide)


def test_a_pixel_of_the_ground_in_meters(tmp_path: Path) -> None:
    assert pixel_side(Raster(write_raster(tmp_path / 'a.tif', draw_classes()))) == pytest.approx(
        0.5, rel=1e-3
    )
    # an arc second is 30.9 m, and half as wide at 60 degrees north
    degrees = Raster(write_raster(tmp_path / 'b.tif', draw_classes(), DEGREES))
    assert pixel_side(degrees) == pytest.approx(30.9 * 0.5**0.5, rel=5e-3)
    bare = Raster(write_raster(tmp_path / 'c.tif', draw_classes(), dict(UTM, crs=None)))
    assert np.isnan(pixel_side(bare))


@pytest.mark.parametrize(
    'crs, transform, size, sides',
    [
        ('EPSG:32633', (0.5, 0, 5e5, 0, -0.25, 5e6), (50, 100), r'0\.5\d* x 0\.25\d* m'),
        # 60 degrees north: a degree of longitude is about half a degree of latitude.
        ('EPSG:4326', (1e-5, 0, 15, 0, -1e-5, 60), (223, 112), r'0\.558 x 1\.114 m'),
        ('EPSG:3857', (1, 0, 1.6e6, 0, -2, 8.4e6), (200, 100), r'0\.50\d* x 1\.00\d* m'),
        ('EPSG:32633', (0, 0.5, 5e5, -0.25, 0, 5e6), (100, 50), r'0\.25\d* x 0\.5\d* m'),
    ],
    ids=['meters', 'degrees', 'mercator', 'turned'],
)
def test_the_model_sees_square_pixels_with_gsd(
    tmp_path: Path, crs: str, transform: tuple, size: tuple, sides: str
) -> None:
    path = tmp_path / 'a.tif'
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        width=100,
        height=100,
        count=1,
        dtype='uint8',
        crs=crs,
        transform=rasterio.Affine(*transform),
    ) as file:
        file.write(np.ones((1, 100, 100), np.uint8))
    model_size, origin = choose_size(Scene(str(path), Bands(1, False)), None, gsd=0.5)
    assert np.allclose(model_size, size, atol=1)
    assert re.search(rf'--gsd 0\.5, and its pixels have {sides} \(width x height\)', origin)
