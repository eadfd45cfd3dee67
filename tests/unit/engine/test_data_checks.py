"""A mistake in a dataset is found and its file named, on real files."""
from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Iterator

import cv2
import pytest
from mmengine.registry import DATASETS, init_default_scope
from support import write_tiny_data
from torch.utils.data import IterableDataset

from mapsage.engine.data_checks import (
    DataError,
    band_order_note,
    build_checked,
    check_labels,
    explain_error,
)


def config(root: Path, **more: Any) -> dict:
    return dict(
        type='LoveDADataset', data_root=str(root),
        data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'),
        pipeline=[dict(type='LoadImageFromFile'),
                  dict(type='LoadAnnotations', reduce_zero_label=True),
                  dict(type='PackSegInputs')], **more)


def build(cfg: dict) -> Any:
    init_default_scope('mmseg')
    return DATASETS.build(cfg)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return write_tiny_data(tmp_path / 'data', train=3, val=1, size=16)


def test_good_data_passes(root: Path) -> None:
    dataset = build_checked(build, config(root))
    for index in range(len(dataset)):
        check_labels(dataset, index, dataset[index])


def test_missing_folder(root: Path) -> None:
    shutil.rmtree(str(root))
    with pytest.raises(DataError, match='img_dir/train does not exist'):
        build_checked(build, config(root))


def test_empty_folder(root: Path) -> None:
    for path in (root / 'img_dir' / 'train').iterdir():
        path.unlink()
    with pytest.raises(DataError, match='found no samples'):
        build_checked(build, config(root))


def test_missing_masks_are_counted(root: Path) -> None:
    for name in ('0.png', '2.png'):
        (root / 'ann_dir' / 'train' / name).unlink()
    with pytest.raises(DataError, match=r'2 of the masks .* 3 samples .*ann_dir/train/0.png'):
        build_checked(build, config(root))


@pytest.mark.parametrize('value, reported', [(8, 8), (200, 200), (255, 255)])
def test_label_outside_the_classes(root: Path, value: int, reported: int) -> None:
    path = root / 'ann_dir' / 'train' / '1.png'
    mask = cv2.imread(str(path), cv2.IMREAD_GRAYSCALE)
    mask[:2, :3] = value
    cv2.imwrite(str(path), mask)
    dataset = build(config(root))
    if value == 255:
        check_labels(dataset, 1, dataset[1])  # 255 means ignored, before the shift as after it
        return
    with pytest.raises(DataError, match=rf'1.png holds the value {reported} \(6 pixel'):
        check_labels(dataset, 1, dataset[1])


def spoil_error(dataset: Any, index: int) -> str:
    with pytest.raises(Exception) as caught:
        dataset[index]
    return str(explain_error(dataset, index, caught.value))


@pytest.mark.parametrize('kind', ['img_dir', 'ann_dir'])
def test_corrupt_file_is_named(root: Path, kind: str) -> None:
    path = root / kind / 'train' / '1.png'
    dataset = build(config(root))
    path.write_bytes(path.read_bytes()[:20])
    said = spoil_error(dataset, 1)
    assert f'{path} (20 bytes) cannot be decoded' in said and 'sample 1 of LoveDADataset' in said


def test_file_that_vanished(root: Path) -> None:
    path = root / 'img_dir' / 'train' / '1.png'
    dataset = build(config(root))
    os.unlink(str(path))
    assert f'{path} does not exist' in spoil_error(dataset, 1)


def test_other_errors_keep_their_words(root: Path) -> None:
    dataset = build(config(root))
    error = explain_error(dataset, 0, KeyError('gt_depth'))
    assert isinstance(error, DataError) and "KeyError: 'gt_depth'" in str(error)
    assert explain_error(dataset, 0, error) is error


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


def test_a_stream_has_no_samples_to_count() -> None:
    stream = Stream()
    assert build_checked(lambda _: stream, dict(type='Stream')) is stream


def test_other_value_errors_pass() -> None:
    def raises(_: dict) -> None:
        raise ValueError('depth must be positive')

    with pytest.raises(ValueError, match='depth must be positive'):
        build_checked(raises, dict(type='X'))


def test_scenes_in_the_order_of_the_file_and_a_model_that_turns_them_round() -> None:
    def note(bands: Any, turns: bool, loader: str = 'LoadGeoTiffWindow') -> Any:
        dataset = dict(pipeline=[dict(type=loader)], **({'bands': bands} if bands else {}))
        return band_order_note(dict(
            model=dict(data_preprocessor=dict(bgr_to_rgb=turns)),
            val_dataloader=dict(dataset=dataset), test_dataloader=None))

    assert 'val_dataloader: LoadGeoTiffWindow gives the bands as [1, 2, 3]' in note(None, True)
    assert 'set bands=[3, 2, 1]' in note([1, 2, 3], True)
    assert note([3, 2, 1], True) is None and note(None, False) is None
    assert note(None, True, 'LoadImageFromFile') is None and band_order_note({}) is None
