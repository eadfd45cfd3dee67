"""Scenes and labels as a browser reads them: on the grid of the map, and converted once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyproj
import pytest
import rasterio
import rasterio.shutil
import shapely
from affine import Affine
from geo_scenes import rectangle, write_areas
from view_maps import (
    DEGREES,
    NOWHERE,
    TURNED,
    UTM,
    WRONG,
    add_map,
    folders,
    values_of,
    write_raster,
)

from mapsage.extras.viewer import ViewError, find_maps
from mapsage.extras.viewer.display import TruthSettings, scene_for_display, truth_for_display
from mapsage.extras.viewer.session import scores_of
from mapsage.geo import GeoError


def to_degrees(points: np.ndarray) -> np.ndarray:
    """Return the degrees of points in UTM zone 31N."""
    return np.stack(
        pyproj.Transformer.from_crs(32631, 4326, always_xy=True).transform(
            points[:, 0], points[:, 1]
        ),
        1,
    )


def quiet(share: float) -> None:
    """Nobody listens."""


@pytest.mark.parametrize('place', [UTM, NOWHERE, TURNED, DEGREES])
def test_labels_and_scene_lie_on_the_map(place: dict, tmp_path: Path) -> None:
    where = folders(tmp_path)
    labels = add_map(where, 'a', polygons=False, **place)
    (entry,) = find_maps([where.maps], where.scenes, where.truth)
    truth, confusion = truth_for_display(entry, quiet)
    right, labeled = scores_of(confusion)['accuracy']
    assert (labeled - right, labeled) == (5000, labels.size - 800)
    assert (values_of(truth)[0] == values_of(entry.truth)[0]).all()
    told: list = []
    scene = scene_for_display(entry, told.append)
    assert told[-1] == 1
    with rasterio.open(scene) as source, rasterio.open(entry.path) as target:
        assert source.shape == target.shape and source.transform == target.transform
        assert source.crs == target.crs and source.profile['compress'] == 'jpeg'
        close = np.abs(source.read(1).astype(int) - values_of(Path(entry.scenes[0]))[0])
    assert np.median(close) <= 2  # JPEG
    assert scene_for_display(entry, told.append) == scene and told[-1] == 1
    assert len(told) == len(set(told))  # nothing was converted a second time


def test_a_cog_is_shown_as_it_is(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    scene = where.scenes / 'a.tif'
    rasterio.shutil.copy(str(scene), str(tmp_path / 'cog.tif'), driver='COG')
    os.replace(tmp_path / 'cog.tif', scene)
    (entry,) = find_maps([where.maps], where.scenes)
    assert scene_for_display(entry, quiet) == scene


@pytest.mark.parametrize(
    'bands, dtype', [(1, np.uint8), (2, np.int16), (4, np.uint16), (3, np.float32)]
)
def test_values_of_any_kind_become_colors(bands: int, dtype: Any, tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    ramp = np.linspace(100, 1100, 600 * 400).reshape(400, 600)
    values = np.stack([ramp] * bands)
    values = values % 256 if dtype == np.uint8 else values
    if dtype == np.float32:
        values[:, 200:220] = np.nan
    write_raster(where.scenes / 'a.tif', values.astype(dtype), **UTM)
    (entry,) = find_maps([where.maps], where.scenes)
    shown = values_of(scene_for_display(entry, quiet))
    assert shown.shape == (3, 400, 600) and shown.dtype == np.uint8
    if dtype != np.uint8:  # stretched from the 2nd to the 98th percentile
        assert shown[0, 0].max() < 20 and shown[0, -1].min() > 235


def test_labels_on_another_grid(tmp_path: Path) -> None:
    where = folders(tmp_path)
    labels = add_map(where, 'a')
    coarse = UTM['transform'] * Affine.translation(-20, -20) * Affine.scale(2)
    wide = np.full((240, 340), 255, np.uint8)
    wide[10:210, 10:310] = labels[::2, ::2]
    write_raster(where.truth / 'a.tif', wide[None], UTM['crs'], coarse)
    (entry,) = find_maps([where.maps], truth=where.truth)
    right, labeled = scores_of(truth_for_display(entry, quiet)[1])['accuracy']
    assert right == labeled == labels.size - 800


def test_zero_may_be_unlabeled(tmp_path: Path) -> None:
    where = folders(tmp_path)
    labels = add_map(where, 'a')
    shifted = np.where(labels == 255, 0, labels + 1).astype(np.uint8)
    shifted[WRONG] = 0
    write_raster(where.truth / 'a.tif', shifted[None], **UTM)
    (entry,) = find_maps([where.maps], truth=where.truth)
    settings = TruthSettings(reduce_zero_label=True)
    right, labeled = scores_of(truth_for_display(entry, quiet, settings)[1])['accuracy']
    assert right == labeled == labels.size - 800 - 5000
    # another copy, other counts
    assert scores_of(truth_for_display(entry, quiet)[1])['accuracy'][0] < right


@pytest.mark.parametrize(
    'dtype, value',
    [('float32', 1.5), ('float32', np.nan), ('float64', np.inf), ('int16', 257), ('int16', -1)],
)
def test_a_value_that_is_no_class_is_unlabeled(tmp_path: Path, dtype: str, value: float) -> None:
    where = folders(tmp_path)
    labels = add_map(where, 'a')
    values = np.where(labels == 255, -1, labels.astype(int)).astype(dtype)
    values[WRONG] = value
    write_raster(where.truth / 'a.tif', values[None], **UTM)
    (entry,) = find_maps([where.maps], truth=where.truth)
    right, labeled = scores_of(truth_for_display(entry, quiet)[1])['accuracy']
    assert right == labeled == labels.size - 800 - 5000


def test_what_cannot_be_placed_is_said(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    write_raster(where.truth / 'a.tif', np.zeros((1, 30, 30), np.uint8), None, None)
    (entry,) = find_maps([where.maps], where.truth, where.truth)
    with pytest.raises(ViewError, match='30 x 30 pixels and no coordinates.*600 x 400'):
        scene_for_display(entry, quiet)
    with pytest.raises(ViewError, match='30 x 30 pixels and no coordinates'):
        truth_for_display(entry, quiet)
    write_raster(where.truth / 'a.tif', np.full((1, 400, 600), 200, np.uint8), **UTM)
    with pytest.raises(ViewError, match='no labeled pixel.*--reduce-zero-label'):
        truth_for_display(find_maps([where.maps], truth=where.truth)[0], quiet)


def test_a_copy_of_an_earlier_scene_goes(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    (entry,) = find_maps([where.maps], where.scenes)
    before = scene_for_display(entry, quiet)
    write_raster(where.scenes / 'a.tif', np.full((3, 400, 600), 77, np.uint8), **UTM)
    after = scene_for_display(find_maps([where.maps], where.scenes)[0], quiet)
    assert before != after and not before.exists()
    assert (values_of(after) == 77).all()


@pytest.mark.parametrize('name', ['*', '[a-z]', 'a'])
def test_other_files_among_the_copies_stay(name: str, tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, name)
    copies = where.maps / '.view'
    copies.mkdir()
    others = [
        'photo_scene_2020.tif',
        'a_scene_.tif',
        'x_scene_0123456789ab.tif',
        f'{name}_scene_2020.tif',
        f'{name}_scene_0123456789ab.tif.bak',
    ]
    for other in others:
        (copies / other).write_text('holiday')
    (entry,) = find_maps([where.maps], where.scenes)
    scene_for_display(entry, quiet)
    assert len(list(copies.iterdir())) == len(others) + 1


def test_a_link_in_place_of_the_folder_of_copies_is_refused(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    (tmp_path / 'photos').mkdir()
    (where.maps / '.view').symlink_to(tmp_path / 'photos')
    with pytest.raises(ViewError, match='is a link'):
        scene_for_display(find_maps([where.maps], where.scenes)[0], quiet)
    assert list((tmp_path / 'photos').iterdir()) == []


@pytest.mark.parametrize('named', ['a.gpkg', 'one file'])
def test_labels_may_be_the_polygons_of_the_training(named: str, tmp_path: Path) -> None:
    """Burned as GeoTiffDataset does, in any CRS; a file without a field has one class."""
    where = folders(tmp_path)
    labels = add_map(where, 'a', classes=2, polygons=False)
    (where.truth / 'a.tif').unlink()
    path = where.truth / ('a.gpkg' if named == 'a.gpkg' else 'buildings.gpkg')
    shapes = [
        shapely.transform(rectangle(UTM, *box), to_degrees)
        for box in ((100, 100, 200, 150), (300, 0, 350, 50))
    ]
    write_areas(path, shapes, 'EPSG:4326', kind='Polygon')
    burnt = np.zeros_like(labels)
    burnt[100:150, 100:200] = burnt[:50, 300:350] = 1
    (entry,) = find_maps([where.maps], truth=where.truth if named == 'a.gpkg' else path)
    with pytest.raises(GeoError, match="no field 'class_name'.*default_class='class 1'"):
        truth_for_display(entry, quiet)
    copy, confusion = truth_for_display(entry, quiet, TruthSettings(default_class='class 1'))
    np.testing.assert_array_equal(values_of(copy)[0], burnt)
    known = labels != 255
    expected = [
        [int((known & (burnt == row) & (labels == column)).sum()) for column in (0, 1)]
        for row in (0, 1)
    ]
    assert confusion == expected and (labels[burnt == 1] == 0).any()
    _, inside = truth_for_display(
        entry, quiet, TruthSettings(default_class=1, outside=255, reduce_zero_label=True)
    )
    assert inside == [[0, 0], expected[1]]


def test_polygons_of_another_place_are_said(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    write_areas(
        where.truth / 'far.gpkg', [shapely.box(100, 10, 101, 11)], 'EPSG:4326', kind='Polygon'
    )
    (entry,) = find_maps([where.maps], truth=where.truth / 'far.gpkg')
    with pytest.raises(GeoError, match='no polygon of .*far.gpkg .*meets a scene'):
        truth_for_display(entry, quiet, TruthSettings(default_class=1))


def test_a_raster_goes_before_polygons_of_its_name(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a')
    write_areas(where.truth / 'a.gpkg', [shapely.box(0, 0, 1, 1)], 'EPSG:4326', kind='Polygon')
    write_areas(where.scenes / 'a.gpkg', [shapely.box(0, 0, 1, 1)], 'EPSG:4326', kind='Polygon')
    (entry,) = find_maps([where.maps], where.scenes, where.truth)
    assert entry.truth == where.truth / 'a.tif'
    assert entry.scenes == [str(where.scenes / 'a.tif')]


def test_iou_by_class() -> None:
    assert scores_of([[6, 2, 0], [0, 2, 0], [0, 0, 0]]) == dict(
        accuracy=[8, 10], iou=[6 / 8, 2 / 4, None]
    )
    assert scores_of(None) == dict(accuracy=None, iou=None)
