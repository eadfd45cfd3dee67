"""Index of the existing labels in datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from labeling_files import NAMES, write_tiles
from mmengine.registry import DATASETS, DefaultScope

from mapsage.extras.labels.known_labels import UNKNOWN, KnownLabels, labeled_share


def build(root: Path, masks: str, **settings: Any) -> Any:
    config = dict(
        type='BaseSegDataset',
        data_root=str(root),
        img_suffix='.png',
        reduce_zero_label=True,
        data_prefix=dict(img_path='img/train', seg_map_path=masks),
        metainfo=dict(classes=NAMES),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations'),
            dict(type='Resize', scale=(8, 8)),
            dict(type='PackSegInputs'),
        ],
        **settings,
    )
    wrapped = dict(type='RepeatDataset', times=3, dataset=config)
    with DefaultScope.overwrite_default_scope('mmseg'):
        dataset = DATASETS.build(dict(type='ConcatDataset', datasets=[wrapped]))
    dataset.full_init()
    return dataset


def test_the_first_of_two_datasets_wins_where_it_has_a_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    classes, _ = write_tiles(tmp_path)
    first = classes + 1
    # With reduce_zero_label, 0 is no label.
    first[:, :32] = 0
    cv2.imwrite(str(tmp_path / 'ann/train/t0.png'), first)
    (tmp_path / 'ann/val').mkdir()
    cv2.imwrite(str(tmp_path / 'ann/val/t0.png'), np.full((64, 64), 2, np.uint8))
    known = KnownLabels(
        None,
        build(tmp_path, 'ann/train', ann_file='labeled.txt'),
        build(tmp_path, 'ann/val', ann_file='labeled.txt'),
    )
    path = str(tmp_path / 'img/train/t0.png')
    monkeypatch.chdir(tmp_path / 'img')
    assert len(known) == 1 and 'train/t0.png' in known and 'train/t1.png' not in known
    expected = np.where(np.arange(64) < 32, 1, classes)
    np.testing.assert_array_equal(known.read(path, 10, 20, 40, 44), expected[20:, 10:50])
    # A window at the edge reaches beyond the image, where no label exists.
    window = known.read(path, 48, 48, 64, 64)
    assert labeled_share(window) == 1 / 16 and (window[16:] == UNKNOWN).all()
    assert labeled_share(known.read('train/t1.png', 0, 0, 8, 8)) == 0
    assert not known.is_scene(path)
