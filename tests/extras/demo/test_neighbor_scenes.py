"""Six neighboring scenes with four bands, and their polygons."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Dict

import numpy as np
import pyproj
import pytest
import rasterio
from mmseg.datasets import LoveDADataset
from rasterio.transform import Affine

from mapsage.extras.demo import wide_ground
from mapsage.extras.demo.ground_canvas import ROAD, WATER
from mapsage.extras.demo.neighbor_scenes import NeighborParams, write_neighbor_scenes
from mapsage.geo import Raster, VectorLabels

SMALL = NeighborParams(scene_size=160)
NAMES = 'a1', 'a2', 'a3', 'b1', 'b2', 'b3'


@pytest.fixture(scope='module')
def root(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('neighbors') / 'geotiff'
    assert write_neighbor_scenes(folder, SMALL)
    return folder


def truth_of(root: Path, scene: Any) -> np.ndarray:
    """Return the true class of each pixel of a scene, 255 beyond the ground."""
    columns, rows = np.meshgrid(np.arange(scene.width) + 0.5, np.arange(scene.height) + 0.5)
    x, y = scene.transform * (columns, rows)
    with rasterio.open(str(root / 'truth.tif')) as file:
        if scene.crs != file.crs:
            transformer = pyproj.Transformer.from_crs(scene.crs, file.crs, always_xy=True)
            x, y = transformer.transform(x, y)
        columns, rows = (np.floor(each).astype(int) for each in ~file.transform * (x, y))
        inside = (columns >= 0) & (rows >= 0) & (columns < file.width) & (rows < file.height)
        truth = np.full(columns.shape, 255)
        truth[inside] = file.read(1)[rows[inside], columns[inside]]
    return truth


def test_what_is_written(root: Path) -> None:
    assert sorted(str(path.relative_to(root)) for path in root.rglob('*') if path.is_file()) == [
        'demo.json',
        'labels.gpkg',
        *(f'scenes/{name}.tif' for name in NAMES),
        'truth.tif',
    ]
    transforms: Dict[str, Affine] = {}
    for name in NAMES:
        with rasterio.open(str(root / 'scenes' / f'{name}.tif')) as file:
            assert (file.count, file.dtypes[0], file.nodata) == (4, 'uint16', 0)
            assert (file.width, file.height) == (160, 160)
            assert file.descriptions == ('red', 'green', 'blue', 'near infrared')
            assert [each.name for each in file.colorinterp] == ['red', 'green', 'blue', 'undefined']
            assert file.crs.to_epsg() == (32632 if name == 'a3' else 32631)
            transforms[name] = file.transform
            gaps = (file.dataset_mask() == 0).mean()
            assert (0.02 if name == 'a1' else 0) <= gaps < 0.15
    assert transforms['a1'] == Affine(0.5, 0, 5e5, 0, -0.5, 4.5e6)
    assert transforms['a2'] == Affine(0.5, 0, 5e5 + 72, 0, -0.5, 4.5e6)
    assert transforms['b1'] == Affine(0.5, 0, 5e5, 0, -0.5, 4.5e6 - 72)
    turned = transforms['b2']
    assert math.degrees(math.atan2(turned.d, turned.a)) == pytest.approx(8)


def test_pixels_lie_where_the_file_says(root: Path) -> None:
    """Water swallows near infrared: in each scene, at the places that the truth has it."""
    seen = np.zeros(7, int)
    for name in NAMES:
        with rasterio.open(str(root / 'scenes' / f'{name}.tif')) as file:
            truth = truth_of(root, file)
            infrared, valid = file.read(4), file.dataset_mask() > 0
        water = valid & (truth == WATER - 1)
        seen += np.bincount(truth[valid & (truth < 7)], minlength=7)
        if water.sum() > 200:
            assert np.median(infrared[water]) < 0.5 * np.median(infrared[valid & (truth < 7)]), name
            dark = infrared < 0.5 * np.median(infrared[valid])
            assert dark[water].mean() > 0.8
        assert (truth[valid] == 255).mean() < 0.02  # bilinear pixels half beyond the ground
    assert (seen > 0).sum() >= 5


def test_polygons_are_the_truth(root: Path) -> None:
    source = VectorLabels(root / 'labels.gpkg', 'class_name', LoveDADataset.METAINFO['classes'])
    for name in NAMES:
        scene = Raster(root / 'scenes' / f'{name}.tif')
        labels, _ = source.for_scene(scene, 255).read(0, 0, 160, 160)
        truth = truth_of(root, scene)
        assert (labels == truth).mean() > 0.95, name  # but for simplified outlines
        assert (labels[truth == 255] == 255).all()


def test_the_folder_is_reused_and_another_one_left_alone(root: Path, tmp_path: Path) -> None:
    assert not write_neighbor_scenes(root, SMALL)
    with pytest.raises(ValueError, match=r'scene_size=160 \(asked for 200\)'):
        write_neighbor_scenes(root, NeighborParams(scene_size=200))
    with pytest.raises(ValueError, match='scene_size=100 is too small'):
        NeighborParams(scene_size=100)
    with pytest.raises(ValueError, match='seed=-1'):
        NeighborParams(seed=-1)
    assert write_neighbor_scenes(tmp_path / 'again', SMALL)
    for path in root.rglob('*.tif'):
        assert path.read_bytes() == (tmp_path / 'again' / path.relative_to(root)).read_bytes()


def test_roads_lie_where_sheets_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide_ground, '_SHEET', 150)
    ground = wide_ground.draw_ground(3, 290, 200)  # two by two sheets
    assert ground.bands.shape == (4, 200, 290) and ground.mask.shape == (200, 290)
    assert set(np.unique(ground.mask)) <= set(range(1, 8)) and ground.bands.min() >= 1
    middle = ground.mask[:, 100:190]
    assert (middle == ROAD).any(1).all()  # a road from north to south, which no row leaves out
    assert (ground.mask[60:140] == ROAD).any(0).all()
