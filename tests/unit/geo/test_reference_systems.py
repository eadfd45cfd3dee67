"""One answer to whether two CRS are the same on the ground, and a sentence without PROJ's file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyproj
import pytest
from geo_scenes import write_raster
from rasterio.crs import CRS
from rasterio.transform import from_origin

from mapsage.geo import Mosaic, Raster, RasterLabels, full_turn, same_crs
from mapsage.geo.registration import check_same_grid


def esri(code: int) -> str:
    return str(pyproj.CRS.from_epsg(code).to_wkt('WKT1_ESRI'))


def with_towgs84(code: int) -> str:
    crs = pyproj.CRS.from_epsg(code)
    parameters = pyproj.crs.coordinate_operation.ToWGS84Transformation(
        crs.geodetic_crs, 565.4, 50.3, 465.6, -0.4, 0.3, -1.9, 4.1
    )
    return str(pyproj.crs.BoundCRS(crs, 'EPSG:4326', parameters).to_wkt())


SPELLINGS: Any = {
    'axis order': ('EPSG:3035', esri(3035)),
    'axis order of Gauss-Krueger': ('EPSG:31467', esri(31467)),
    'axis order of degrees': ('EPSG:4326', 'OGC:CRS84'),
    'datum by another name': ('EPSG:4326', esri(4326)),
    'compound': ('EPSG:25832', 'EPSG:25832+7837'),
    'compound of another author': (esri(3035), 'EPSG:3035+5621'),
    'three dimensions': ('EPSG:4326', 'EPSG:4979'),
    'TOWGS84': ('EPSG:28992', with_towgs84(28992)),
    'text of PROJ': ('EPSG:32631', '+proj=utm +zone=31 +datum=WGS84 +units=m +no_defs'),
    'axes north and east': ('EPSG:32661', 'EPSG:5041'),
}
DIFFERENT: Any = {
    'zone': ('EPSG:32631', 'EPSG:32632'),
    'datum': ('EPSG:26717', 'EPSG:26917'),
    'datum that is close': ('EPSG:32632', 'EPSG:25832'),
    'feet': ('EPSG:2263', 'EPSG:32118'),
    'gon': ('EPSG:4807', 'EPSG:4275'),
    'geographic': ('EPSG:32631', 'EPSG:4326'),
    'sphere': ('EPSG:3857', 'EPSG:3395'),
    'orientation': ('EPSG:5513', 'EPSG:5514'),
    'compound in another zone': ('EPSG:25832+7837', 'EPSG:25833+7837'),
}


@pytest.mark.parametrize('first, second', SPELLINGS.values(), ids=SPELLINGS)
def test_spellings_of_one_crs_are_the_same(first: str, second: str) -> None:
    assert same_crs(first, second) and same_crs(second, first)
    assert same_crs(CRS.from_user_input(first), CRS.from_user_input(second))
    assert same_crs(pyproj.CRS(first), CRS.from_user_input(second))


@pytest.mark.parametrize('first, second', DIFFERENT.values(), ids=DIFFERENT)
def test_other_systems_are_different(first: str, second: str) -> None:
    assert not same_crs(first, second) and not same_crs(second, first)
    assert not same_crs(CRS.from_user_input(first), CRS.from_user_input(second))


def test_no_crs_equals_no_crs_only() -> None:
    assert same_crs(None, None) and not same_crs(None, 'EPSG:4326')
    assert not same_crs('EPSG:4326', None)


@pytest.mark.parametrize(
    'code, spelling', [(3035, esri(3035)), (4326, 'EPSG:4979'), (25832, 'EPSG:25832+7837')]
)
def test_rasters_in_two_spellings_fit(code: int, spelling: str, tmp_path: Path) -> None:
    """As labels, as a pair of dates, and as scenes of a mosaic that are not interpolated."""
    side = 1e-4 if code == 4326 else 10.0
    origin = (10.0, 50.0) if code == 4326 else (4321000.0, 3210000.0)
    image = np.random.RandomState(0).randint(1, 255, (3, 40, 60)).astype(np.uint8)
    first = write_raster(
        tmp_path / 'a.tif',
        image[:, :, :30],
        dict(crs=f'EPSG:{code}', transform=from_origin(*origin, side, side)),
    )
    second = write_raster(
        tmp_path / 'b.tif',
        image[:, :, :30],
        dict(crs=spelling, transform=from_origin(*origin, side, side)),
    )
    labels = write_raster(
        tmp_path / 'labels.tif',
        image[0, :, :30],
        dict(crs=spelling, transform=from_origin(*origin, side, side)),
    )
    right = write_raster(
        tmp_path / 'right.tif',
        image[:, :, 30:],
        dict(crs=spelling, transform=from_origin(origin[0] + 30 * side, origin[1], side, side)),
    )
    np.testing.assert_array_equal(
        RasterLabels(labels, Raster(first)).read(0, 0, 30, 40)[0], image[0, :, :30]
    )
    check_same_grid(Raster(first), Raster(second))
    mosaic = Mosaic([first, right])
    assert mosaic.resampled == []
    np.testing.assert_array_equal(mosaic.read(0, 0, 60, 40)[0], image)


@pytest.mark.parametrize(
    'crs, expected',
    [
        ('EPSG:4326', 360),
        ('EPSG:4807', 400),
        ('EPSG:3857', 2 * np.pi * 6378137),
        ('EPSG:3832', 2 * np.pi * 6378137),
        ('EPSG:4087', 2 * np.pi * 6378137),
        ('EPSG:32760', 0),
        ('EPSG:3031', 0),
        ('EPSG:3460', 0),
        (None, 0),
    ],
)
def test_a_turn_around_the_globe(crs: Any, expected: float) -> None:
    assert full_turn(crs) == pytest.approx(expected, abs=1e-6)


@pytest.mark.long
def test_a_folder_of_another_program_is_named(tmp_path: Path) -> None:
    """Importing needs no database of PROJ; a scene with coordinates does, a picture does not."""
    variable = 'PROJ_LIB'
    write_raster(tmp_path / 'a.tif', np.ones((8, 8), np.uint8))
    write_raster(tmp_path / 'n.tif', np.ones((8, 8), np.uint8), {})
    program = (
        'import sys, mapsage\n'
        'from mapsage.geo import GeoError, Raster\n'
        'assert Raster("n.tif").read(0, 0, 8, 8)[1].all()\n'
        'try:\n    Raster("a.tif")\n'
        'except GeoError as error:\n    print("REFUSED", error)\n'
    )
    environment = {
        name: value for name, value in os.environ.items() if name not in ('PROJ_DATA', 'PROJ_LIB')
    }
    environment.update({variable: str(tmp_path), 'PYTHONPATH': os.getcwd()})
    done = subprocess.run(
        [sys.executable, '-c', program],
        cwd=str(tmp_path),
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=120,
    )
    text = done.stdout.decode()
    assert done.returncode == 0, text
    assert f'{variable}={tmp_path}' in text and f'unset {variable}' in text, text
