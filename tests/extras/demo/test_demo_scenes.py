"""The demo scenes."""

from __future__ import annotations

from typing import Any, Dict

import numpy as np
import pytest

from mapsage.extras.demo.demo_scenes import NO_DATA, SCENE_KINDS, DemoScene, draw_scene


@pytest.fixture(scope='module')
def scenes() -> Dict[str, DemoScene]:
    return {kind: draw_scene(7, kind) for kind in SCENE_KINDS}


def test_a_seed_gives_one_scene() -> None:
    first, again, other = (draw_scene(seed, 'village', 128) for seed in (3, 3, 4))
    np.testing.assert_array_equal(first.image, again.image)
    np.testing.assert_array_equal(first.mask, again.mask)
    assert (first.mask != other.mask).mean() > 0.1


def test_types_values_and_every_class(scenes: Dict[str, DemoScene]) -> None:
    for scene in scenes.values():
        assert scene.image.shape == (640, 640, 3) and scene.image.dtype == np.uint8
        assert scene.mask.shape == (640, 640) and scene.mask.dtype == np.uint8
    values = np.unique(np.concatenate([s.mask.ravel() for s in scenes.values()]))
    assert values.tolist() == [1, 2, 3, 4, 5, 6, 7]


def test_classes_are_unequal_and_many_tiles_are_dull(scenes: Dict[str, DemoScene]) -> None:
    counts = sum(np.bincount(s.mask.ravel(), minlength=8)[1:] for s in scenes.values())
    assert counts.max() > 6 * counts.min()
    tiles = [
        s.mask[y : y + 128, x : x + 128]
        for s in scenes.values()
        for y in range(0, 640, 128)
        for x in range(0, 640, 128)
    ]
    dull = np.mean([(tile == tile[0, 0]).all() for tile in tiles])
    assert 0.12 < dull < 0.5


def test_no_data_is_a_black_corner() -> None:
    image, mask = draw_scene(5, 'lake', 128, no_data=True)
    corners = mask[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert (corners == NO_DATA).sum() == 1
    np.testing.assert_array_equal(mask == NO_DATA, (image == 0).all(-1))
    assert 0.005 < (mask == NO_DATA).mean() < 0.2


def test_color_alone_does_not_tell_the_class(scenes: Dict[str, DemoScene]) -> None:
    """The best guess from a pixel's color, fitted on the scored pixels, is often wrong."""
    pixels = np.concatenate([s.image.reshape(-1, 3) for s in scenes.values()]) // 32
    labels = np.concatenate([s.mask.ravel() for s in scenes.values()]).astype(int)
    votes = np.zeros((8**3, 8), int)
    cells = pixels.astype(int) @ np.array([64, 8, 1])
    np.add.at(votes, (cells, labels), 1)
    guess = votes.argmax(1)[cells]
    ious = [
        ((guess == c) & (labels == c)).sum() / ((guess == c) | (labels == c)).sum()
        for c in range(1, 8)
    ]
    assert np.mean(ious) < 0.5


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(kind='moon'), "kind='moon'.*'forest'"),
        (dict(kind='town', size=32), 'size=32.*64'),
    ],
)
def test_scene_errors(arguments: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw_scene(0, **arguments)
