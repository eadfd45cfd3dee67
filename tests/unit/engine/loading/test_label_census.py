"""Masks without a class, and ignored values that look like one, are a warning at the start."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, List

import cv2
import numpy as np
import pytest
from mmseg.datasets import BaseSegDataset

from mapsage.engine.loading.data_checks import DataError
from mapsage.engine.loading.label_census import count_labels, notes_on_labels


def dataset(tmp_path: Path, masks: List[np.ndarray], crop: int = 4, **settings: Any) -> Any:
    """Return a dataset of tiles whose masks are given."""
    for folder in ('images', 'masks'):
        (tmp_path / folder).mkdir()
    for number, mask in enumerate(masks):
        cv2.imwrite(str(tmp_path / f'images/瓦 {number}.png'), np.zeros((*mask.shape, 3), np.uint8))
        cv2.imwrite(str(tmp_path / f'masks/瓦 {number}.png'), mask)
    return BaseSegDataset(
        data_root=str(tmp_path),
        data_prefix=dict(img_path='images', seg_map_path='masks'),
        img_suffix='.png',
        metainfo=dict(classes=('ground', 'house', 'water')),
        pipeline=[
            dict(type='LoadImageFromFile'),
            dict(type='LoadAnnotations'),
            dict(type='RandomCrop', crop_size=(crop, crop)),
        ],
        **settings,
    )


def texts(tiles: Any) -> List[str]:
    return [text for level, text in notes_on_labels(tiles) if level == logging.WARNING]


@pytest.mark.usefixtures('mmseg_scope')
def test_masks_of_0_and_255(tmp_path: Path) -> None:
    mask = np.zeros((8, 8), np.uint8)
    mask[:2] = 255
    absent, ignored = texts(dataset(tmp_path, [mask, mask]))
    assert 'no pixel of 2 of 2 masks is house, water' in absent
    assert '25 % of the pixels of 2 of 2 masks are 255' in ignored


@pytest.mark.usefixtures('mmseg_scope')
def test_every_class_and_a_few_ignored_pixels_are_no_warning(tmp_path: Path) -> None:
    mask = np.arange(64, dtype=np.uint8).reshape(8, 8) % 3
    mask[0, 0] = 255
    tiles = dataset(tmp_path, [mask])
    census = count_labels(tiles)
    assert census is not None and census.counts.tolist() == [21, 21, 21] and census.ignored == 1
    assert texts(tiles) == []


@pytest.mark.usefixtures('mmseg_scope')
def test_crop_larger_than_the_images(tmp_path: Path) -> None:
    mask = np.arange(64, dtype=np.uint8).reshape(8, 8) % 3
    (warning,) = texts(dataset(tmp_path, [mask], crop=16))
    assert 'crop_size=(16, 16) is larger than its images' in warning and '(8, 8)' in warning


@pytest.mark.usefixtures('mmseg_scope')
def test_nodata_0_is_no_class(tmp_path: Path) -> None:
    mask = np.arange(64, dtype=np.uint8).reshape(8, 8) % 4
    census = count_labels(dataset(tmp_path, [mask], reduce_zero_label=True))
    assert census is not None and census.counts.tolist() == [16, 16, 16] and census.ignored == 16


@pytest.mark.usefixtures('mmseg_scope')
def test_a_broken_mask_is_left_to_the_loader(tmp_path: Path) -> None:
    tiles = dataset(tmp_path, [np.zeros((8, 8), np.uint8)])
    (tmp_path / 'masks/瓦 0.png').write_bytes(b'')
    assert notes_on_labels(tiles) == []


@pytest.mark.usefixtures('mmseg_scope')
@pytest.mark.parametrize(
    'value, words',
    [
        (np.full((8, 8), 3, np.uint8), 'holds the value 3 .* 3 classes allow 0 to 2, and 255'),
        (np.zeros((8, 8, 4), np.uint8), 'has 4 channels, expected one'),
    ],
    ids=['counted from 1', 'colors'],
)
def test_a_mask_that_no_training_could_use_is_an_error_at_the_start(
    value: np.ndarray, words: str, tmp_path: Path
) -> None:
    tiles = dataset(tmp_path, [np.zeros((8, 8), np.uint8), np.zeros((8, 8), np.uint8)])
    cv2.imwrite(str(tmp_path / 'masks/瓦 1.png'), value)
    with pytest.raises(DataError, match=f'瓦 1.png {words}'):
        notes_on_labels(tiles)
    # A transform of the user's may turn these values into classes.
    tiles.pipeline.transforms.append(lambda results: results)
    notes_on_labels(tiles)


@pytest.mark.usefixtures('mmseg_scope')
def test_images_of_16_bits_are_cut(tmp_path: Path) -> None:
    mask = np.arange(64, dtype=np.uint8).reshape(8, 8) % 3
    tiles = dataset(tmp_path, [mask])
    image = np.full((8, 8, 3), 2560, np.uint16)
    cv2.imwrite(str(tmp_path / 'images/瓦 0.png'), image)
    (warning,) = texts(tiles)
    assert 'up to 2560' in warning and '2560 becomes 10' in warning
    assert tiles.pipeline.transforms[0](tiles.get_data_info(0))['img'].max() == 10
