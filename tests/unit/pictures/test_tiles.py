"""Images and label maps as tiles."""

from __future__ import annotations

import cv2
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mapsage.pictures import tiles

PALETTE = [[0, 90, 0], [0, 0, 255], [255, 0, 0]]


def test_stretch_uses_the_whole_range_and_blackens_what_is_not_finite() -> None:
    band = np.linspace(1000, 2000, 10000, dtype=np.float32).reshape(100, 100)
    band[0, 0] = np.nan
    shown = tiles.display_rgb(band)
    assert shown[0, 0].tolist() == [0, 0, 0]
    assert shown.max() == 255
    assert abs(int(shown[50, 0, 0]) - 127) < 4
    assert (shown[..., 0] == shown[..., 2]).all()


def test_eight_bit_images_keep_their_values() -> None:
    image = np.random.default_rng(0).integers(0, 40, (5, 6, 4), dtype=np.uint8)
    assert (tiles.display_rgb(image) == image[:, :, :3]).all()


def test_disagreement_marks_wrong_pixels_and_leaves_no_data_out() -> None:
    truth = np.array([[0, 1, 255]])
    wrong = tiles.disagreement(np.zeros((1, 3, 3), np.uint8), truth, np.array([[0, 0, 0]]), 2)
    assert wrong[0, 1].tolist() == list(tiles.WRONG)
    assert wrong[0, 0].tolist() == [150, 150, 150]
    assert (wrong[0, 2] == tiles.hatch(1, 3)[0, 2]).all()


@settings(max_examples=50, deadline=None)
@given(
    labels=hnp.arrays(np.uint8, hnp.array_shapes(min_dims=2, max_dims=2, max_side=40)),
    height=st.integers(1, 60),
    width=st.integers(1, 60),
)
def test_resized_labels_hold_no_new_value(labels: np.ndarray, height: int, width: int) -> None:
    resized = tiles.resize(labels, height, width, nearest=True)
    assert resized.shape == (height, width)
    assert set(np.unique(resized)) <= set(np.unique(labels))


def test_an_image_that_keeps_its_number_of_pixels_is_interpolated() -> None:
    image = np.random.default_rng(0).random((4, 16)).astype('float32')
    expected = cv2.resize(image, (8, 8), interpolation=cv2.INTER_LINEAR)
    assert (tiles.resize(image, 8, 8, nearest=False) == expected).all()


def test_shrink_keeps_the_aspect() -> None:
    assert tiles.shrink(np.zeros((4096, 1024), np.uint8), 1024, nearest=True).shape == (1024, 256)
    small = np.zeros((10, 20, 3))
    assert tiles.shrink(small, 1024, nearest=False) is small


def test_default_palette_is_the_same_each_time_and_distinct() -> None:
    colors = tiles.default_palette(60)
    assert (colors == tiles.default_palette(60)).all()
    assert (colors[:7] == tiles.default_palette(7)).all()
    assert len({tuple(color) for color in colors.tolist()}) == 60
    assert tiles.default_palette(0).shape == (0, 3)


def test_a_short_palette_is_completed() -> None:
    colors = tiles.class_palette(3, PALETTE[:2])
    assert colors[:2].tolist() == PALETTE[:2]
    assert (colors[2] == tiles.default_palette(3)[2]).all()
