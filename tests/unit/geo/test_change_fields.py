"""Polygons of change with the classes of both dates, the dates and a score."""

from __future__ import annotations

import sqlite3
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import pyogrio
import pytest
import rasterio
from rasterio.crs import CRS
from rasterio.transform import from_origin

from mapsage.geo.change_classes import transition_of
from mapsage.geo.change_fields import ChangeFields
from mapsage.geo.polygons import write_polygons
from mapsage.geo.qgis_style import map_style

NAMES = ('unchanged', 'forest > building', 'changed')


def write(path: Path, plane: np.ndarray) -> str:
    with rasterio.open(
        str(path),
        'w',
        driver='GTiff',
        dtype='uint8',
        count=1,
        height=len(plane),
        width=plane.shape[1],
        nodata=255,
        crs=CRS.from_epsg(32631),
        transform=from_origin(500_000, 4_500_000, 0.5, 0.5),
    ) as file:
        file.write(plane, 1)
    return str(path)


@pytest.fixture
def classes() -> np.ndarray:
    plane = np.zeros((40, 60), np.uint8)
    plane[3:9, 4:20] = 1
    plane[5:7, 8:10] = 0  # a hole
    plane[20:31, 30:35] = 2
    plane[39] = 255
    return plane


def polygons(tmp_path: Path, classes: np.ndarray, fields: ChangeFields) -> List[Dict[str, Any]]:
    path = tmp_path / 'map.gpkg'
    write_polygons(
        write(tmp_path / 'map.tif', classes),
        path,
        NAMES,
        background=0,
        palette=[[255, 255, 255], [1, 2, 3], [4, 5, 6]],
        further=fields,
    )
    with sqlite3.connect(str(path)) as file:
        file.row_factory = sqlite3.Row
        return [dict(row) for row in file.execute('SELECT * FROM map ORDER BY class_id')]


def test_polygons_have_classes_dates_and_the_mean_confidence(
    tmp_path: Path, classes: np.ndarray
) -> None:
    rng = np.random.default_rng(0)
    percents = rng.integers(30, 100, classes.shape)
    confidence = np.where(classes == 255, 255, percents).astype(np.uint8)
    fields = ChangeFields(
        [transition_of(name) for name in NAMES],
        ('2019-06-14', ''),
        write(tmp_path / 'confidence.tif', confidence),
    )
    built, changed = polygons(tmp_path, classes, fields)
    assert (built['from_class'], built['to_class'], built['class_name']) == (
        'forest',
        'building',
        'forest > building',
    )
    assert built['area_px'] == 6 * 16 - 4 and built['date_from'] == '2019-06-14'
    assert built['date_to'] is None and changed['from_class'] is None
    for row, label in ((built, 1), (changed, 2)):
        expected = confidence[classes == label].mean() / 100
        assert row['score'] == pytest.approx(expected, abs=1e-4)
    without = polygons(tmp_path, classes, ChangeFields([transition_of(name) for name in NAMES]))
    assert [row['score'] for row in without] == [None, None]


def test_a_map_without_change_has_the_fields(tmp_path: Path, classes: np.ndarray) -> None:
    fields = ChangeFields([transition_of(name) for name in NAMES])
    path = tmp_path / 'map.gpkg'
    write_polygons(
        write(tmp_path / 'map.tif', classes * 0), path, NAMES, background=0, further=fields
    )
    info = pyogrio.read_info(str(path), layer='map')
    assert {'from_class', 'to_class', 'date_from', 'date_to', 'score'} <= set(info['fields'])


def test_unchanged_ground_is_transparent_in_qgis() -> None:
    style = map_style(NAMES, [[255, 255, 255], [1, 2, 3], [4, 5, 6]]).decode()
    alphas = [entry.split('alpha="')[1].split('"')[0] for entry in style.split('<paletteEntry')[1:]]
    assert alphas == ['0', '255', '255']
