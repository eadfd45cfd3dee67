"""The demo of change: what is built, felled and flooded, and its folders."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import rasterio

from mapsage.extras.demo import ChangeParams, write_change_pairs
from mapsage.extras.demo.change_ground import CHANGE_KINDS, draw_change
from mapsage.extras.demo.ground_canvas import BARREN, BUILDING, FOREST, ROAD, WATER

SMALL = ChangeParams(train_scenes=2, val_scenes=1, scene_size=192, tile_size=64, pair_size=192)


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('change') / 'demo'
    assert write_change_pairs(folder, SMALL)
    return folder


def test_houses_are_built_forest_is_felled_and_land_is_flooded() -> None:
    pairs = set()
    for seed, kind in enumerate(CHANGE_KINDS):
        ground = draw_change(seed, kind, 320)
        changed = ground.mask_before != ground.mask_after
        pairs |= set(zip(ground.mask_before[changed].tolist(), ground.mask_after[changed].tolist()))
        # Roads, buildings and water stay.
        assert not np.isin(ground.mask_before[changed], (ROAD, BUILDING, WATER)).any()
    after = {new for _, new in pairs}
    assert after == {BUILDING, BARREN, WATER} and (FOREST, BARREN) in pairs
    assert {old for old, new in pairs if new == BARREN} == {FOREST}


def test_unchanged_ground_looks_different_at_both_dates() -> None:
    ground = draw_change(1, 'farmland', 192)
    same = ground.mask_before == ground.mask_after
    difference = np.abs(ground.before[same].astype(int) - ground.after[same])
    assert 5 < difference.mean() < 80


def test_labels_say_what_differs(root: Path) -> None:
    total = 0
    for path in sorted((root / 'train' / 'label').iterdir()):
        label, first, second = (
            cv2.imread(str(root / 'train' / name / path.name), 0)
            for name in ('label', 'label_A', 'label_B')
        )
        assert set(np.unique(label)) <= {0, 255} and first.max() <= 7
        assert ((label == 255) == (first != second)).all()
        assert ((first == 0) == (second == 0)).all() and (first[label == 0] == 0).all()
        total += int((label == 255).sum())
    assert 0.02 < total / (18 * 64 * 64) < 0.4
    assert len(list((root / 'val' / 'A').iterdir())) == 9


def test_the_pair_lies_on_one_grid_with_the_dates_in_its_names(root: Path) -> None:
    names = sorted(path.name for path in (root / 'pair').iterdir())
    assert names == ['after_20230702.tif', 'before_20190614.tif', 'truth.tif']
    grids = set()
    for name in names:
        with rasterio.open(str(root / 'pair' / name)) as file:
            grids.add((file.width, file.height, file.transform, file.crs.to_epsg()))
    assert len(grids) == 1


def test_a_complete_folder_is_reused_and_another_one_refused(root: Path, tmp_path: Path) -> None:
    assert not write_change_pairs(root, SMALL)
    with pytest.raises(ValueError, match='seed=0 .asked for 1'):
        write_change_pairs(root, ChangeParams(1, 2, 1, 192, 64, 192))
    again = tmp_path / 'again'
    write_change_pairs(again, SMALL)
    assert (again / 'train' / 'B' / '3.png').read_bytes() == (
        root / 'train' / 'B' / '3.png'
    ).read_bytes()


@pytest.mark.parametrize(
    'options',
    [
        dict(seed=-1),
        dict(train_scenes=0),
        dict(tile_size=60),
        dict(scene_size=200),
        dict(pair_size=64),
    ],
)
def test_parameters_out_of_range_are_refused(options: dict) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        ChangeParams(**options)
