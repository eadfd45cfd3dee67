"""Times and wavelengths in the tags of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import numpy as np
import pytest
import rasterio

from mapsage.geo import acquisition_time, band_wavelengths


def write(
    path: Path,
    tags: Dict[str, str],
    domain: str = '',
    *bands: Dict[str, str],
    band_domain: str = '',
) -> str:
    """Write a file of two bands with tags."""
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        count=2,
        height=4,
        width=4,
        dtype='uint8',
        transform=rasterio.Affine(10, 0, 0, 0, -10, 0),
    ) as file:
        file.write(np.ones((2, 4, 4), np.uint8))
        file.update_tags(ns=domain or None, **tags)
        for band, values in enumerate(bands, 1):
            file.update_tags(band, ns=band_domain or None, **values)
    return str(path)


@pytest.mark.parametrize(
    'tags, domain, expected',
    [
        (dict(ACQUISITIONDATETIME='2024-05-01 10:20:30'), 'IMAGERY', '2024-05-01T10:20:30Z'),
        (
            dict(SENSING_TIME='2020-09-05T16:22:48.7210670Z; 2020-09-05T16:22:59.1Z'),
            '',
            '2020-09-05T16:22:48Z',
        ),
        (dict(SENSING_TIME='2020-09-05'), '', '2020-09-05'),
        # When a program wrote the file.
        (dict(TIFFTAG_DATETIME='2026:01:02 03:04:05'), '', None),
    ],
)
def test_the_time_of_an_image(
    tmp_path: Path, tags: Dict[str, str], domain: str, expected: Any
) -> None:
    assert acquisition_time(write(tmp_path / 'a.tif', tags, domain)) == expected


def test_wavelengths_of_gdal_and_envi_are_in_micrometers(tmp_path: Path) -> None:
    gdal = write(
        tmp_path / 'a.tif',
        {},
        '',
        dict(CENTRAL_WAVELENGTH_UM='0.49'),
        dict(CENTRAL_WAVELENGTH_UM='0.665'),
        band_domain='IMAGERY',
    )
    assert band_wavelengths(gdal, (2, 1)) == [0.665, 0.49]
    envi = write(
        tmp_path / 'b.tif',
        {},
        '',
        dict(wavelength='490.5', wavelength_units='Nanometers'),
        dict(wavelength='0.665', wavelength_units='Micrometers'),
    )
    assert band_wavelengths(envi, (1, 2)) == pytest.approx([0.4905, 0.665])


@pytest.mark.parametrize(
    'second',
    [
        {},
        dict(wavelength='665'),
        dict(wavelength='red', wavelength_units='nm'),
        dict(wavelength='-1', wavelength_units='nm'),
    ],
)
def test_a_band_without_a_wavelength_leaves_all_unknown(
    tmp_path: Path, second: Dict[str, str]
) -> None:
    first = dict(wavelength='490', wavelength_units='nm')
    assert band_wavelengths(write(tmp_path / 'a.tif', {}, '', first, second), (1, 2)) is None
