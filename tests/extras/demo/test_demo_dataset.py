"""The folder that the demo scenes are written to."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, Set, Tuple

import cv2
import numpy as np
import pytest
from mmengine.registry import DefaultScope
from mmseg.datasets import LoveDADataset

from mapsage.extras.demo import demo_dataset
from mapsage.extras.demo.demo_dataset import DemoParams, write_demo_data
from mapsage.extras.demo.demo_folder import MARKER
from mapsage.extras.demo.demo_scenes import SCENE_KINDS, draw_scene

SMALL = DemoParams(train_scenes=2, val_scenes=1, scene_size=128, tile_size=64)


def _files(root: Path) -> Set[Tuple[str, int]]:
    return {
        (str(p.relative_to(root)), p.stat().st_mtime_ns) for p in root.rglob('*') if p.is_file()
    }


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(seed=-1), 'seed=-1'),
        (dict(val_scenes=0), 'val_scenes=0'),
        (dict(tile_size=100), 'tile_size=100.*multiple of 32'),
        (dict(scene_size=200), 'scene_size=200.*tile_size=128'),
    ],
)
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
                pipeline=pipeline,
            )
            assert len(dataset) == tiles
            number = int(Path(dataset.get_data_info(0)['img_path']).stem)
            stored = cv2.imread(str(root / f'ann_dir/{split}/{number}.png'), cv2.IMREAD_UNCHANGED)
            labels = dataset[0]['data_samples'].gt_sem_seg.data[0].numpy()
            np.testing.assert_array_equal(labels, np.where(stored == 0, 255, stored - 1.0))


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    def interrupt(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(demo_dataset.cv2, 'imwrite', interrupt)
        with pytest.raises(KeyboardInterrupt):
            write_demo_data(tmp_path / 'demo', SMALL)
    assert not list(tmp_path.iterdir())
    assert write_demo_data(tmp_path / 'demo', SMALL)
