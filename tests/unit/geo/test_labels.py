"""Label rasters, and which label file belongs to a scene."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import rasterio.transform
from affine import Affine
from geo_scenes import PIXELS, UTM, draw_classes, paint, write_raster
from geotiff_data import build_dataset, write_scene

from mapsage.geo import GeoError, LabelFiles, Raster, RasterLabels


def test_label_rasters_that_do_not_fit(tmp_path: Path) -> None:
    _, classes = write_scene(tmp_path)
    label, scene = tmp_path / 'labels/a.tif', tmp_path / 'scenes/a.tif'
    both = f'labels {re.escape(str(label))}.*{re.escape(str(scene))}'
    write_raster(label, classes, dict(UTM, crs=UTM['crs'].from_epsg(32651)))
    with pytest.raises(GeoError, match=f'{both}.*EPSG:32650') as caught:
        build_dataset(tmp_path)
    assert 'EPSG:32651' in str(caught.value) and 'rio warp --like' in str(caught.value)
    moved = rasterio.transform.from_origin(500001.5, 4100000.0, 0.5, 0.5)
    write_raster(label, classes, dict(UTM, transform=moved))
    with pytest.raises(GeoError, match='lie up to 3 pixels off'):
        build_dataset(tmp_path)
    write_raster(label, classes[:-1])
    with pytest.raises(GeoError, match='are 300 x 259 pixels, their scene .* is 300 x 260'):
        build_dataset(tmp_path)
    write_raster(label, paint(classes))
    with pytest.raises(GeoError, match=r'have 3 band\(s\) of uint8, expected one band'):
        build_dataset(tmp_path)
    label.unlink()
    with pytest.raises(GeoError, match=r'needs one label file a\.\* .*found none'):
        build_dataset(tmp_path)
    write_raster(label, classes, PIXELS)  # without georeference, of the scene's size
    assert len(build_dataset(tmp_path)) == 9


@pytest.mark.parametrize('angle', [0, 30, 45, 90, 135])
def test_grids_that_are_rotated(tmp_path: Path, angle: int) -> None:
    classes = draw_classes(60, 60)
    grid = UTM['transform'] * Affine.rotation(angle)
    scene = Raster(write_raster(tmp_path / 'scene.tif', paint(classes), dict(UTM, transform=grid)))
    for shift, refused in ((0.05, False), (40, True)):
        for move in ((shift, shift), (shift, 0), (-shift, shift)):
            path = write_raster(
                tmp_path / 'labels.tif',
                classes,
                dict(UTM, transform=grid * Affine.translation(*move)),
            )
            if refused:
                with pytest.raises(GeoError, match='lie up to 40 pixels off'):
                    RasterLabels(path, scene)
            else:
                RasterLabels(path, scene)


def test_pixels_without_a_label_are_marked(tmp_path: Path) -> None:
    classes = draw_classes(64, 64)
    classes[:4] = 9
    scene = Raster(write_raster(tmp_path / 'scene.tif', paint(classes)))
    labels = RasterLabels(write_raster(tmp_path / 'labels.tif', classes, nodata=9), scene)
    values, labeled = labels.read(-2, 0, 10, 10)
    assert values.dtype == np.uint8
    assert not labeled[:, :2].any() and not labeled[:4].any() and labeled[4:, 2:].all()
    np.testing.assert_array_equal(values[4:, 2:], classes[4:10, :8])


def test_a_label_file_is_found_by_the_name_of_its_scene(tmp_path: Path) -> None:
    folder = tmp_path / 'labels'
    folder.mkdir()
    assert LabelFiles(str(folder / 'all.gpkg')).find('scenes/a.tif') == str(folder / 'all.gpkg')
    for name in ('a.gpkg', 'a.txt', 'ab.tif'):
        (folder / name).touch()
    assert LabelFiles(str(folder)).find('scenes/a.tif') == str(folder / 'a.gpkg')
    (folder / 'a.TIF').touch()
    with pytest.raises(GeoError, match=r'needs one label file a\.\* .*found a\.TIF, a\.gpkg'):
        LabelFiles(str(folder)).find('scenes/a.tif')


def test_a_folder_is_listed_once(tmp_path: Path) -> None:
    folder = tmp_path / 'labels'
    folder.mkdir()
    for number in range(50):
        (folder / f'{number}.tif').touch()
    files = LabelFiles(str(folder))
    folder.rename(tmp_path / 'moved')
    assert [files.find(f'scenes/{number}.tif') for number in range(50)] == [
        str(folder / f'{number}.tif') for number in range(50)
    ]
