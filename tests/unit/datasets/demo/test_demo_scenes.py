"""The demo scenes and the folder they are written to."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Set, Tuple

import cv2
import numpy as np
import pytest
import rasterio
from mmengine.registry import DefaultScope
from mmseg.datasets import LoveDADataset
from rasterio.transform import Affine

from mapsage.datasets.demo import demo_dataset
from mapsage.datasets.demo.demo_dataset import MARKER, DemoParams, write_demo_data
from mapsage.datasets.demo.demo_scenes import NO_DATA, SCENE_KINDS, DemoScene, draw_scene

SMALL = DemoParams(train_scenes=2, val_scenes=1, scene_size=128, tile_size=64)


@pytest.fixture(scope='module')
def scenes() -> Dict[str, DemoScene]:
    return {kind: draw_scene(7, kind) for kind in SCENE_KINDS}


def _files(root: Path) -> Set[Tuple[str, int]]:
    return {(str(p.relative_to(root)), p.stat().st_mtime_ns)
            for p in root.rglob('*') if p.is_file()}


def test_a_seed_gives_one_scene() -> None:
    first, again, other = (draw_scene(seed, 'village', 128) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.image, again.image)
    np.testing.assert_array_equal(first.mask, again.mask)
    assert (first.mask != other.mask).mean() > .1


def test_types_values_and_every_class(scenes: Dict[str, DemoScene]) -> None:
    for scene in scenes.values():
        assert scene.image.shape == (640, 640, 3) and scene.image.dtype == np.uint8
        assert scene.mask.shape == (640, 640) and scene.mask.dtype == np.uint8
    values = np.unique(np.concatenate([s.mask.ravel() for s in scenes.values()]))
    assert values.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_classes_are_unequal_and_many_tiles_are_dull(scenes: Dict[str, DemoScene]) -> None:
    counts = sum(np.bincount(s.mask.ravel(), minlength=8)[1:] for s in scenes.values())
    assert counts.max() > 6 * counts.min()
    tiles = [s.mask[y:y + 128, x:x + 128] for s in scenes.values()
             for y in range(0, 640, 128) for x in range(0, 640, 128)]
    dull = np.mean([(tile == tile[0, 0]).all() for tile in tiles])
    assert .12 < dull < .5


def test_no_data_is_a_black_corner() -> None:
    image, mask = draw_scene(5, 'lake', 128, no_data=True)
    corners = mask[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == NO_DATA).sum() == 1
    np.testing.assert_array_equal(mask == NO_DATA, (image == 0).all(-1))
    assert 0.005 < (mask == NO_DATA).mean() < .2


def test_color_alone_does_not_tell_the_class(scenes: Dict[str, DemoScene]) -> None:
    """The best guess from a pixel's color, fitted on the scored pixels, is often wrong."""
    pixels = np.concatenate([s.image.reshape(-1, 3) for s in scenes.values()]) // 32
    labels = np.concatenate([s.mask.ravel() for s in scenes.values()]).astype(int)
    votes = np.zeros((8**3, 8), int)
    cells = pixels.astype(int) @ np.array([64, 8, 1])
    np.add.at(votes, (cells, labels), 1)
    guess = votes.argmax(1)[cells]
    ious = [((guess == c) & (labels == c)).sum() / ((guess == c) | (labels == c)).sum()
            for c in range(1, 8)]
    assert np.mean(ious) < .5


@pytest.mark.parametrize('arguments, message', [
    (dict(kind='moon'), "kind='moon'.*'forest'"),
    (dict(kind='town', size=32), 'size=32.*64'),
])
def test_scene_errors(arguments: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_scene(0, **arguments)


@pytest.mark.parametrize('arguments, message', [
    (dict(seed=-1), 'seed=-1'),
    (dict(val_scenes=0), 'val_scenes=0'),
    (dict(tile_size=100), 'tile_size=100.*multiple of 32'),
    (dict(scene_size=200), 'scene_size=200.*tile_size=128'),
])
def test_parameter_errors(arguments: Dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DemoParams(**arguments)


def test_mmseg_reads_what_is_written(tmp_path: Path) -> None:
    root = tmp_path / 'data' / 'demo'
    assert write_demo_data(root, SMALL)
    assert [p.name for p in root.parent.iterdir()] == ['demo']
    pipeline = [dict(type=t) for t in ('LoadImageFromFile', 'LoadAnnotations', 'PackSegInputs')]
    with DefaultScope.overwrite_default_scope('mmseg'):
        for split, tiles in SMALL.tiles().items():
            dataset = LoveDADataset(
                data_root=str(root),
                data_prefix=dict(img_path=f'img_dir/{split}', seg_map_path=f'ann_dir/{split}'),
                pipeline=pipeline)
            assert len(dataset) == tiles
            number = int(Path(dataset.get_data_info(0)['img_path']).stem)
            stored = cv2.imread(str(root / f'ann_dir/{split}/{number}.png'), cv2.IMREAD_UNCHANGED)
            labels = dataset[0]['data_samples'].gt_sem_seg.data[0].numpy()
            np.testing.assert_array_equal(labels, np.where(stored == 0, 255, stored - 1.))


def test_tiles_are_in_scene_order_and_splits_share_none(tmp_path: Path) -> None:
    write_demo_data(tmp_path / 'demo', SMALL)
    scene = draw_scene(0, next(iter(SCENE_KINDS)), SMALL.scene_size)
    second = cv2.imread(str(tmp_path / 'demo/img_dir/train/1.png'))[..., ::-1]
    np.testing.assert_array_equal(second, scene.image[:64, 64:])
    tiles = {
        split: {p.read_bytes() for p in (tmp_path / 'demo/img_dir' / split).iterdir()}
        for split in ('train', 'val')
    }
    assert len(tiles['train']) == 8 and len(tiles['val']) == 4
    assert not tiles['train'] & tiles['val']


def test_a_complete_folder_is_reused(tmp_path: Path) -> None:
    write_demo_data(tmp_path / 'demo', SMALL)
    before = _files(tmp_path)
    assert not write_demo_data(tmp_path / 'demo', SMALL)
    assert _files(tmp_path) == before


def test_an_occupied_folder_is_left_alone(tmp_path: Path) -> None:
    write_demo_data(tmp_path / 'demo', SMALL)
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'thesis.txt').write_text('years of work')
    before = _files(tmp_path)
    with pytest.raises(ValueError, match=r'seed=0 \(asked for 1\)'):
        write_demo_data(tmp_path / 'demo', DemoParams(1, 2, 1, 128, 64))
    with pytest.raises(ValueError, match=f'mine.*no {MARKER}'):
        write_demo_data(tmp_path / 'mine', SMALL)
    assert _files(tmp_path) == before


def test_the_scene_lies_in_a_map_and_shows_its_label(tmp_path: Path) -> None:
    root = tmp_path / 'demo'
    assert write_demo_data(root, SMALL) == ['tiles', 'scene']
    with rasterio.open(str(root / 'scene.tif')) as scene, \
            rasterio.open(str(root / 'scene_label.tif')) as label:
        assert scene.crs.to_epsg() == label.crs.to_epsg() == 32631
        assert scene.transform == label.transform == Affine(.5, 0, 5e5, 0, -.5, 4.5e6)
        assert scene.bounds == (5e5, 4.5e6 - 256, 5e5 + 256, 4.5e6)  # 512 pixels of 0.5 m
        assert scene.block_shapes == [(256, 256)] * 3 and scene.profile['compress'] == 'deflate'
        image, mask, valid = scene.read(), label.read(1), scene.dataset_mask() > 0
        colors = label.colormap(1)
    drawn = draw_scene(1999, 'river', 512, no_data=True)
    np.testing.assert_array_equal(image.transpose(1, 2, 0), drawn.image)
    np.testing.assert_array_equal(mask, drawn.mask)
    np.testing.assert_array_equal(valid, mask != NO_DATA)
    assert set(np.unique(mask)) == set(range(8)) and not valid.all()
    assert [colors[v][:3] for v in range(1, 8)] == [
        tuple(c) for c in LoveDADataset.METAINFO['palette']]


def test_an_older_folder_gets_the_same_scene_added(tmp_path: Path) -> None:
    names = 'scene.tif', 'scene_label.tif'
    write_demo_data(tmp_path / 'demo', SMALL)
    first = {name: (tmp_path / 'demo' / name).read_bytes() for name in names}
    for name in names:
        (tmp_path / 'demo' / name).unlink()
    tiles = _files(tmp_path)
    assert write_demo_data(tmp_path / 'demo', SMALL) == ['scene']
    assert {name: (tmp_path / 'demo' / name).read_bytes() for name in names} == first
    assert _files(tmp_path) > tiles
    assert len(_files(tmp_path)) == len(tiles) + 2


def test_an_interrupted_write_leaves_nothing_and_is_redone(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_dataset.cv2, 'imwrite', interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_demo_data(tmp_path / 'demo', SMALL)
    assert not list(tmp_path.iterdir())
    assert write_demo_data(tmp_path / 'demo', SMALL)
