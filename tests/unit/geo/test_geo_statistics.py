"""Statistics of the bands of scenes."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Iterator

import numpy as np
import pytest
import rasterio
from geo_scenes import draw_classes, paint, write_raster

from mapsage.geo import GeoError, band_statistics, tally_bands


def test_statistics_are_those_of_the_valid_pixels(tmp_path: Path) -> None:
    scenes = [paint(draw_classes(), 2, 'int16'), paint(draw_classes(700, 90), 2, 'int16') - 300]
    scenes[0][:, :50] = -32768
    paths = [
        write_raster(tmp_path / f'{i}.tif', scene, nodata=-32768, tiled=not i)
        for i, scene in enumerate(scenes)
    ]
    pixels = np.concatenate([scenes[0][:, 50:].reshape(2, -1), scenes[1].reshape(2, -1)], 1)
    found = band_statistics(paths)
    assert found.pixels == pixels.shape[1] and found.bands == (1, 2)
    np.testing.assert_allclose(found.mean, pixels.mean(1), rtol=1e-12)
    np.testing.assert_allclose(found.std, pixels.std(1), rtol=1e-12)
    np.testing.assert_array_equal(found.minimum, pixels.min(1))
    np.testing.assert_array_equal(found.maximum, pixels.max(1))
    np.testing.assert_allclose(found.percentile_2, np.percentile(pixels, 2, axis=1))
    np.testing.assert_allclose(found.percentile_98, np.percentile(pixels, 98, axis=1))
    assert band_statistics(paths, bands=[2]).mean == pytest.approx(pixels[1].mean())


def test_statistics_of_a_sample_are_near(tmp_path: Path) -> None:
    random = np.random.RandomState(0)
    scene = random.normal(1000, 50, (1, 2048, 2048)).astype('float32')
    path = write_raster(tmp_path / 'a.tif', scene, compress='none', blockxsize=256, blockysize=256)
    with rasterio.open(path, 'r+') as file:  # an overview of means has a smaller deviation
        file.build_overviews([4, 8], rasterio.enums.Resampling.average)
    found = band_statistics([path], samples=2048 * 2048 // 4)
    assert found.pixels == 2048 * 2048 // 4
    assert found.mean[0] == pytest.approx(1000, abs=1) and found.std[0] == pytest.approx(50, abs=1)


def test_statistics_keep_a_sample_and_not_its_window() -> None:
    def windows() -> Iterator[np.ndarray]:
        previous = None
        for _ in range(2):
            assert previous is None or previous() is None, 'the window before is in memory'
            window = np.ones((3, 1000), np.float32)
            previous = weakref.ref(window)
            yield window
            del window

    statistics = tally_bands(windows(), (1, 2, 3), 100_000)
    assert statistics is not None and statistics.pixels == 2000


def test_statistics_without_a_valid_pixel(tmp_path: Path) -> None:
    path = write_raster(tmp_path / 'a.tif', np.zeros((1, 64, 64), 'uint8'), nodata=0)
    with pytest.raises(GeoError, match='no valid pixel'):
        band_statistics([path])
