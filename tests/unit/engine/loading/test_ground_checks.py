"""Ground that training and validation have in common."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import affine
import cv2
import numpy as np
import pytest
from geo_scenes import PIXELS, UTM, rectangle, write_raster
from geotiff_data import build_dataset, write_vector
from mmengine.dataset import ConcatDataset, RepeatDataset
from mmseg.datasets import BaseSegDataset
from rasterio.crs import CRS

from mapsage.engine.loading.ground_checks import copies_note, ground_note, shared_ground

SPLIT = dict(by='blocks', size=25, share=0.4, margin=8)


def at(right: float, down: float = 0, turned: float = 0) -> dict:
    """Return the place of a scene of 0.5 m pixels, some meters next to UTM's, turned by degrees."""
    return dict(
        UTM,
        transform=affine.Affine.translation(500000 + right, 4100000 - down)
        * affine.Affine.rotation(-turned)
        * affine.Affine.scale(0.5, -0.5),
    )


def scenes(root: Path, name: str, place: dict, width: int = 256, height: int = 256) -> Any:
    """Return a dataset of one scene, 128 x 128 m, in windows of 32 m."""
    for folder, bands in (('scenes', 3), ('labels', 1)):
        write_raster(
            root / name / f'{folder}/{name}.tif', np.ones((bands, height, width), 'uint8'), place
        )
    return build_dataset(root / name, window=64)


@pytest.mark.parametrize(
    'right, inside, near',
    [(0, 1, 0), (64, 0.5, 0.125), (128, 0, 0.125), (136, 0, 0.0625), (160, 0, 0), (5000, 0, 0)],
)
def test_scenes_side_by_side(tmp_path: Path, right: float, inside: float, near: float) -> None:
    """Half a window is 16 m."""
    found = shared_ground(scenes(tmp_path, 'a', at(0)), scenes(tmp_path, 'b', at(right)))
    assert found is not None and found.distance == pytest.approx(16, abs=0.1)
    assert found.inside == pytest.approx(inside, abs=0.01)
    assert found.near == pytest.approx(near, abs=0.02)


def test_other_grids_and_wrappers(tmp_path: Path) -> None:
    train = ConcatDataset([scenes(tmp_path, 'a', at(0)), scenes(tmp_path, 'c', at(1000))])
    turned = scenes(tmp_path, 'b', at(64, 0, 45), 128, 128)  # a half of the square, in the scene
    found = shared_ground(train, RepeatDataset(turned, 3))
    assert found is not None and found.inside == pytest.approx(1, abs=0.02)
    mercator = dict(
        crs=CRS.from_epsg(3857),
        transform=affine.Affine(0.6265, 0, 13024380.4, 0, -0.6265, 4445551.6),
    )  # 0.5 m on the ground, from the same corner
    found = shared_ground(train, scenes(tmp_path, 'd', mercator))
    assert found is not None and found.inside == pytest.approx(1, abs=0.03)
    note = ground_note(train, turned)
    assert note is not None and "split=dict(by='blocks'" in note
    assert note.startswith('scores may be better than on new ground. ')
    assert '% of the ground of val_dataloader lies in windows of train_dataloader' in note


def test_parts_of_one_split_share_nothing(tmp_path: Path) -> None:
    scenes(tmp_path, 'a', at(0))

    def part(name: str, **changes: Any) -> Any:
        return build_dataset(tmp_path / 'a', window=32, split=dict(SPLIT, part=name, **changes))

    assert ground_note(part('train'), part('val')) is None
    assert shared_ground(part('train'), part('val', seed=1)).inside > 0.1  # type: ignore[union-attr]
    note = ground_note(part('train'), part('val', seed=1))
    assert note is not None and 'Their splits differ: BlockSplit(' in note and 'seed=1' in note
    both = ground_note(part('val'), part('val'))
    assert both is not None and '100.0 % of the ground' in both
    pixels = dict(unit='pixels', size=50)
    assert ground_note(part('train', **pixels), part('val', **pixels)) is None


def test_random_windows_and_scenes_without_georeference(tmp_path: Path) -> None:
    scenes(tmp_path, 'a', PIXELS)
    labels = np.full((256, 256), 255, 'uint8')
    labels[:, :128] = 1
    write_raster(tmp_path / 'a/half/a.tif', labels, PIXELS)
    train = build_dataset(tmp_path / 'a', window=64, labels='half', windows=dict(type='random'))
    found = shared_ground(train, build_dataset(tmp_path / 'a', window=64))
    assert found is not None and (found.inside, found.distance) == (0.5, 32)
    assert found.near == pytest.approx(0.125, abs=0.01)
    other = scenes(tmp_path, 'b', PIXELS)
    assert shared_ground(train, other).inside == 0  # type: ignore[union-attr]
    assert ground_note(train, other) is None


def test_an_area_of_interest_limits_the_ground(tmp_path: Path) -> None:
    train = scenes(tmp_path, 'a', at(0))
    for name, left in (('west', 0), ('east', 192)):
        write_vector(
            tmp_path / f'a/{name}.gpkg',
            [rectangle(at(0), left, 0, left + 64, 256)],
            [1],
            'EPSG:32650',
        )
    west, east = (
        build_dataset(tmp_path / 'a', window=64, stride=48, aoi=f'{name}.gpkg')
        for name in ('west', 'east')
    )
    assert shared_ground(train, west).inside == 1  # type: ignore[union-attr]
    assert shared_ground(east, west).inside == 0  # type: ignore[union-attr]
    inside = shared_ground(west, train).inside  # type: ignore[union-attr]
    assert inside == pytest.approx(0.25, abs=0.02)


def test_datasets_without_scenes_say_nothing(tmp_path: Path) -> None:
    assert ground_note([1, 2], scenes(tmp_path, 'a', at(0))) is None


def test_images_of_validation_that_are_images_of_training(tmp_path: Path) -> None:
    """Copies are found by their content, under any name, in wrapped datasets too."""
    for part, first in (('train', 0), ('val', 100), ('copies', 3)):
        for number in range(6):
            seed = (
                first + number
                if number < 2
                else ('train', 'val', 'copies').index(part) * 50 + number
            )
            image = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), 'uint8')
            for folder in ('images', 'labels'):
                (tmp_path / part / folder).mkdir(parents=True, exist_ok=True)
            # BMP files of one shape have the same number of bytes.
            cv2.imwrite(str(tmp_path / part / f'images/{part}_{number}.bmp'), image)
            cv2.imwrite(str(tmp_path / part / f'labels/{part}_{number}.png'), image[..., 0] % 2)

    def folder(part: str) -> BaseSegDataset:
        return BaseSegDataset(
            data_root=str(tmp_path / part),
            data_prefix=dict(img_path='images', seg_map_path='labels'),
            img_suffix='.bmp',
            metainfo=dict(classes=('a', 'b')),
        )

    train = RepeatDataset(folder('train'), 3)
    assert copies_note(train, folder('val')) is None
    note = copies_note(train, ConcatDataset([folder('val'), folder('copies')]))
    assert note is not None and note.startswith('2 of 12 images of val_dataloader are images of ')
    assert 'copies_0.bmp' in note and 'train_3.bmp' in note
