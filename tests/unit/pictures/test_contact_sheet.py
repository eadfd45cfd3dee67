"""A sheet of samples: its tiles pixel by pixel, and what it leaves out."""

from __future__ import annotations

from typing import Any

import cv2
import numpy as np
import pytest

from mapsage.pictures import LabeledImage, render_contact_sheet, tiles
from mapsage.pictures.preview import TILE_WIDTH

CLASSES = ('land', 'water')
PALETTE = [[0, 90, 0], [0, 0, 255]]


def sample(**changes: Any) -> LabeledImage:
    labels = np.zeros((30, 30), np.int64)
    labels[10:20, 5:25] = 1
    labels[:3] = 255
    fields = dict(image=np.full((30, 30, 3), (200, 100, 50), np.uint8), labels=labels, name='a.png')
    fields.update(changes)
    return LabeledImage(**fields)


def contains(picture: np.ndarray, tile: np.ndarray) -> bool:
    differences = cv2.matchTemplate(picture, tile, cv2.TM_SQDIFF)
    top, left = np.unravel_index(differences.argmin(), differences.shape)
    height, width = tile.shape[:2]
    return bool((picture[top : top + height, left : left + width] == tile).all())


def test_labels_tint_the_image_and_have_outlines() -> None:
    shown = sample()
    tile = tiles.overlay(shown.image, shown.labels, np.array(PALETTE, np.uint8))
    # 0.6 of the image and 0.4 of water; the upper edge of water has its full color.
    assert tile[15, 10].tolist() == [120, 60, 132]
    assert tile[10, 5:25].tolist() == [PALETTE[1]] * 20
    assert tile[25, 5].tolist() == [120, 96, 30]
    hatched = {tuple(pixel) for pixel in tile[0].tolist()}
    assert len(hatched) == 2 and not hatched & {(200, 100, 50), (120, 96, 30)}


def test_the_sheet_contains_image_and_overlay_of_every_sample() -> None:
    tall = sample(image=np.full((60, 30, 3), 90, np.uint8), labels=np.ones((60, 30), int))
    unlabeled = sample(labels=None, image=np.full((30, 30, 3), 33, np.uint8))
    picture = render_contact_sheet([sample(), tall, unlabeled], CLASSES, PALETTE, 'title')
    side = TILE_WIDTH
    for shown, (height, width) in (
        (sample(), (side, side)),
        (tall, (600, 300)),
        (unlabeled, (side, side)),
    ):
        image = tiles.resize(shown.image, height, width, nearest=False)
        assert contains(picture, image)
        if shown.labels is not None:
            labels = tiles.resize(shown.labels, height, width, nearest=True)
            assert contains(picture, tiles.overlay(image, labels, np.array(PALETTE, np.uint8)))
    assert picture.shape[1] > 4 * side
    single = render_contact_sheet([unlabeled], ())
    assert 2 * side < single.shape[1] < 3 * side


def test_what_it_refuses() -> None:
    with pytest.raises(ValueError, match='0 samples'):
        render_contact_sheet([], CLASSES)
    with pytest.raises(ValueError, match=r'labels of a.png have shape \(3, 4, 5\)'):
        render_contact_sheet([sample(labels=np.zeros((3, 4, 5), int))], CLASSES)
