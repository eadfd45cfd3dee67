"""What makes the features of a scene's windows other ones: the scene, its bands, the place."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Dict, List

import pytest
import rasterio
from geo_scenes import UTM, draw_classes, rectangle, write_mosaic, write_raster
from geotiff_data import PIPELINE, build_dataset, write_scene, write_vector

from mapsage.extras.streaming.cache.keys import sample_hashes

BANDS = dict(window=96, bands=[1, 2, 3, 4])
RANDOM_CROP = dict(type='RandomCrop', crop_size=(8, 8))


class Dim:
    """A transform of the user's own, which may do anything."""

    def __call__(self, results: dict) -> dict:
        return results


def windows(root: Path, **changes: Any) -> List[str]:
    return sample_hashes(build_dataset(root, **dict(BANDS, **changes)))


@pytest.fixture
def scenes(tmp_path: Path) -> Path:
    """Two scenes of 12 windows; the first is not compressed, so that a change keeps its size."""
    root = tmp_path / 'scenes_and_labels'
    write_scene(root, 'a', bands=4, compress='none')
    write_scene(root, 'b', bands=4)
    return root


def repaint(path: Path, factor: int = 2) -> None:
    """Change all values of a raster."""
    with rasterio.open(str(path), 'r+') as file:
        file.write(file.read() // factor)


def test_windows_of_scenes_are_known_by_their_place_and_their_scene(
    scenes: Path, tmp_path: Path
) -> None:
    known = windows(scenes)
    assert len(set(known)) == 24 and windows(scenes) == known
    there = tmp_path / 'there'
    shutil.copytree(str(scenes), str(there))
    assert windows(there) == known
    size = (there / 'scenes/a.tif').stat().st_size
    repaint(there / 'scenes/a.tif')
    assert (there / 'scenes/a.tif').stat().st_size == size
    changed = windows(there)
    assert not set(changed[:12]) & set(known) and changed[12:] == known[12:]
    (scenes / 'scenes/a.tif').unlink()
    assert windows(scenes) == known[12:]


@pytest.mark.parametrize(
    'changes, kept',
    [
        (dict(bands=[2, 1, 3, 4]), 0),
        (dict(bands=[1, 2, 3]), 0),
        (dict(window=97), 0),
        (dict(stride=48), 24),
        (dict(scenes=['scenes/b.tif']), 12),
        (dict(outside=255), 24),
        (dict(labels=None), 24),
        (dict(label_nodata=1), 24),
        (dict(test_mode=True), 24),
    ],
)
def test_settings_of_labels_and_grid_change_no_features(
    scenes: Path, changes: Dict[str, Any], kept: int
) -> None:
    before, now = windows(scenes), windows(scenes, **changes)
    assert len(set(before) & set(now)) == kept


@pytest.mark.parametrize('vector', [False, True])
@pytest.mark.parametrize(
    'crop, matter',
    [
        ([], False),
        ([RANDOM_CROP], False),
        ([dict(RANDOM_CROP, cat_max_ratio=0.8)], True),
        ([dict(type='RandomChoice', transforms=[[dict(RANDOM_CROP, cat_max_ratio=0.8)]])], True),
        ([Dim()], True),
    ],
)
def test_labels_matter_only_where_a_crop_is_chosen_by_them(
    scenes: Path, vector: bool, crop: List[Any], matter: bool
) -> None:
    houses = scenes / 'houses.gpkg'
    write_vector(houses, [rectangle(UTM, 10, 10, 60, 60)], ['house'], 'EPSG:32650')
    pipeline = [*PIPELINE[:2], *crop, PIPELINE[2]]
    given = dict(pipeline=pipeline, labels='houses.gpkg' if vector else 'labels')
    known = windows(scenes, **given)
    if vector:
        write_vector(houses, [rectangle(UTM, 20, 10, 60, 60)], ['water'], 'EPSG:32650')
    else:
        repaint(scenes / 'labels/a.tif')
        repaint(scenes / 'labels/b.tif')
    assert (not set(known) & set(windows(scenes, **given))) == matter
    if vector:
        assert (windows(scenes, outside=1, **given) != windows(scenes, **given)) == matter


def test_a_mosaic_is_known_by_its_sources(tmp_path: Path) -> None:
    sources = [
        write_raster(tmp_path / f'{name}.tif', draw_classes(), compress='none') for name in 'ab'
    ]
    (tmp_path / 'scenes').mkdir()
    mosaic = write_mosaic(tmp_path / 'scenes/m.vrt', sources)
    given = dict(labels=None, bands=[1])
    known = windows(tmp_path, **given)
    text = mosaic.read_text()
    repaint(sources[1])
    assert not set(known) & set(windows(tmp_path, **given)) and mosaic.read_text() == text
