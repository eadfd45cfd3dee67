"""What a checkpoint records of the training data, and what a resume says of a difference."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List

import pytest
import torch
from geo_scenes import CLASSES, PALETTE, draw_classes, paint, write_raster
from mmengine.dataset import ConcatDataset, RepeatDataset
from mmengine.hooks import Hook
from mmseg.datasets import BaseSegDataset
from torch.utils.data import IterableDataset, Subset
from toy_runs import ToyNumbers, log_of, same_weights, toy_train

from mapsage.datasets import GeoTiffDataset
from mapsage.engine.loading.data_checks import DataError
from mapsage.engine.loading.data_record import compare_records, facts_of_data

META = dict(classes=('a', 'b'), palette=[[0, 0, 0], [9, 9, 9]])


def tiles(root: Path, **kwargs: Any) -> BaseSegDataset:
    return BaseSegDataset(
        **{
            **dict(
                data_root=str(root),
                img_suffix='.png',
                seg_map_suffix='.png',
                metainfo=META,
                data_prefix=dict(img_path='img', seg_map_path='ann'),
                pipeline=[],
            ),
            **kwargs,
        }
    )


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Six tiles in two folders. Tile n has n bytes, its mask 10 + n."""
    for number in range(6):
        for kind, size in (('img', number), ('ann', 10 + number)):
            path = tmp_path / 'data' / kind / f'area{number % 2}' / f'{number}.png'
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(b'x' * size)
    return tmp_path / 'data'


def rename(old: str, new: str) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        for kind in ('img', 'ann'):
            (root / kind / old).rename(root / kind / new)

    return apply


def remove(name: str) -> Callable[[Path], None]:
    def apply(root: Path) -> None:
        for kind in ('img', 'ann'):
            (root / kind / name).unlink()

    return apply


def resize(name: str) -> Callable[[Path], None]:
    return lambda root: (root / name).write_bytes(b'x' * 99) and None


def touch(root: Path) -> None:
    for path in root.rglob('*.png'):
        os.utime(str(path), (1, 1))


WRAPPERS: Dict[str, Callable[[Path], Any]] = {
    'plain': tiles,
    'not serialized': lambda root: tiles(root, serialize_data=False),
    'repeated': lambda root: RepeatDataset(tiles(root), times=50),
    'joined': lambda root: ConcatDataset(
        [
            tiles(
                root / kind,
                data_root=str(root),
                data_prefix=dict(img_path=f'img/{kind}', seg_map_path=f'ann/{kind}'),
            )
            for kind in ('area0', 'area1')
        ]
    ),
    'subset': lambda root: Subset(tiles(root), range(len(tiles(root)))),
}


@pytest.mark.parametrize('build', WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize(
    'change, meaning, content',
    [
        (remove('area1/3.png'), [' samples, now '], []),
        (rename('area0/0.png', 'area0/3.png'), ['the names of the samples, now '], []),
        (resize('img/area1/3.png'), [], ['the size of ']),
        (resize('ann/area0/4.png'), [], ['the size of ']),
        (touch, [], []),
        (lambda root: None, [], []),
    ],
    ids=['removed', 'renamed', 'image', 'mask', 'touched', 'same'],
)
def test_a_difference_is_named(
    build: Callable[[Path], Any],
    change: Callable[[Path], None],
    meaning: List[str],
    content: List[str],
    root: Path,
    tmp_path: Path,
) -> None:
    """Of the same files in another folder, too."""
    before = json.loads(json.dumps(facts_of_data(build(root)).record))
    copied = tmp_path / 'elsewhere' / 'copy'
    shutil.copytree(str(root), str(copied))
    change(copied)
    difference = compare_records(before, facts_of_data(build(copied)))
    for texts, expected in ((difference.meaning, meaning), (difference.content, content)):
        assert len(texts) == len(expected) and all(
            part in text for text, part in zip(texts, expected)
        ), difference
    for text in difference.content:
        assert text.endswith(('/img/area1/3.png', '/ann/area0/4.png'))


def test_names_of_few_changed_files_among_many(tmp_path: Path) -> None:
    """The record stays small, and a difference leads to a block of files."""
    for number in range(1000):
        for kind in ('img', 'ann'):
            path = tmp_path / kind / f'{number:04d}.png'
            path.parent.mkdir(exist_ok=True)
            path.touch()
    before = facts_of_data(tiles(tmp_path)).record
    assert len(json.dumps(before)) < 8000
    (tmp_path / 'ann' / '0500.png').write_bytes(b'x')
    (tmp_path / 'img' / '0999.png').write_bytes(b'x')
    (text,) = compare_records(before, facts_of_data(tiles(tmp_path))).content
    assert text.startswith('the size of one or more of ')
    assert text.count('one or more of') == 2 and text.endswith('0503.png')
    assert '/img/0992.png to ' in text and '/img/0999.png,' in text


def scenes(root: Path, **kwargs: Any) -> GeoTiffDataset:
    return GeoTiffDataset(
        scenes='s*.tif',
        labels='labels',
        window=64,
        data_root=str(root),
        metainfo=dict(classes=CLASSES, palette=PALETTE),
        pipeline=[],
        **kwargs,
    )


@pytest.fixture
def scene_root(tmp_path: Path) -> Path:
    classes = draw_classes(128, 64)
    for name in ('s1', 's2'):
        write_raster(tmp_path / 'scenes' / f'{name}.tif', paint(classes))
        write_raster(tmp_path / 'scenes' / 'labels' / f'{name}.tif', classes)
    return tmp_path / 'scenes'


@pytest.mark.parametrize('name', ['s2.tif', 'labels/s1.tif'])
def test_a_scene_that_was_written_again_is_named(name: str, scene_root: Path) -> None:
    """Also if its size is the same."""
    before = facts_of_data(scenes(scene_root)).record
    assert before['samples'] == 4 and before['files'] == 4
    assert not any(compare_records(before, facts_of_data(scenes(scene_root))))
    os.utime(str(scene_root / name), (1, 1))
    difference = compare_records(before, facts_of_data(scenes(scene_root)))
    assert difference == ([], [f'the time of the last change of {scene_root / name}'])


def test_windows_of_other_scenes_are_another_order(scene_root: Path) -> None:
    before = facts_of_data(scenes(scene_root)).record
    for folder in (scene_root, scene_root / 'labels'):
        (folder / 's1.tif').rename(folder / 's3.tif')
    assert compare_records(before, facts_of_data(scenes(scene_root))).meaning == [
        'the names of the samples, now s2.tif, s3.tif'
    ]
    smaller = facts_of_data(scenes(scene_root, stride=32)).record
    assert compare_records(smaller, facts_of_data(scenes(scene_root))).meaning == [
        '6 samples, now 4 samples'
    ]


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        return iter(())


def test_streams_and_datasets_without_files() -> None:
    stream, numbers = facts_of_data(Stream()), facts_of_data(ToyNumbers(7))
    assert stream.record['samples'] is None and not stream.record['order']
    assert numbers.record['samples'] == 7 and numbers.record['classes'] == ['low', 'high']
    assert compare_records(stream.record, numbers).meaning == [
        'a stream of samples, now 7 samples',
        'classes none, now low, high',
    ]


class Stop(Exception):
    pass


class StopAt(Hook):
    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        if runner.iter == 5:
            runner.finish_saves()
            raise Stop


@pytest.fixture
def interrupted(tmp_path: Path) -> Path:
    with pytest.raises(Stop):
        toy_train(tmp_path / 'run', hooks=[StopAt()])
    return tmp_path / 'run'


def test_a_resume_with_other_samples_is_an_error_unless_accepted(interrupted: Path) -> None:
    fewer = {'train_dataloader.dataset.length': 12}
    with pytest.raises(DataError, match=r'16 samples, now 12.*env_cfg.accept_other_data=True'):
        toy_train(interrupted, resume=True, **fewer)
    accepted = {**fewer, 'env_cfg.accept_other_data': True}
    with pytest.raises(Stop):
        toy_train(interrupted, resume=True, hooks=[StopAt()], **accepted)
    runner, _ = toy_train(interrupted, resume=True, **accepted)
    assert (
        'WARNING - the training data are not those of the checkpoint: 16 samples, now 12'
        in log_of(runner)
    )
    # The next checkpoint has the new data.
    toy_train(interrupted, resume=True, **{**fewer, 'train_cfg.max_iters': 10})


def test_other_classes_are_an_error_and_no_record_a_line(interrupted: Path) -> None:
    load = {'weights_only': False} if torch.__version__ >= '2' else {}
    path = interrupted / 'iter_4.pth'
    checkpoint = torch.load(str(path), **load)
    checkpoint['meta']['data']['classes'] = ['low', 'middle', 'high', 'highest', 'other']
    torch.save(checkpoint, str(path))
    with pytest.raises(
        DataError,
        match='checkpoint: classes low, middle, high and 2 more, now '
        'low, high.*env_cfg.accept_other_data=True',
    ):
        toy_train(interrupted, resume=True)
    named, _ = toy_train(interrupted, resume=True, **{'env_cfg.accept_other_data': True})
    assert (
        'WARNING - the training data are not those of the checkpoint: classes low, middle, '
        'high and 2 more, now low, high' in log_of(named)
    )
    (interrupted / 'iter_8.pth').unlink()
    del checkpoint['meta']['data']
    torch.save(checkpoint, str(path))
    unknown, _ = toy_train(interrupted, resume=True)
    assert log_of(unknown).count('does not record its training data') == 1
    assert same_weights(named.model.state_dict(), unknown.model.state_dict())
