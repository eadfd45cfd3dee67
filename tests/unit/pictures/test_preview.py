"""The preview picture: its tiles pixel by pixel, its legend, and what it refuses."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import cv2
import numpy as np
import pytest

from mapsage.pictures import PreviewSample, render_preview, save_preview, tiles
from mapsage.pictures.preview import TILE_WIDTH, _legend_entries

CLASSES = ('land', 'water', 'road')
PALETTE = [[0, 90, 0], [0, 0, 255], [255, 0, 0]]
LOVEDA = (
    Path(
        os.environ.get(
            'MAPSAGE_SAMPLE_DATA', Path(__file__).resolve().parents[4] / 'shared' / 'data'
        )
    )
    / 'loveda_sample'
)


def sample(side: int = 32, **changes: object) -> PreviewSample:
    truth = np.arange(side * side).reshape(side, side) % 3
    truth[0] = 255
    fields = dict(
        image=np.full((side, side, 3), (200, 100, 50), dtype=np.uint8),
        prediction=np.zeros((side, side), dtype=np.int64),
        truth=truth,
        name='a.png',
    )
    fields.update(changes)
    return PreviewSample(**fields)  # type: ignore[arg-type]


def contains(picture: np.ndarray, tile: np.ndarray) -> bool:
    """Return whether the tile is somewhere in the picture, pixel for pixel."""
    differences = cv2.matchTemplate(picture, tile, cv2.TM_SQDIFF)
    top, left = np.unravel_index(differences.argmin(), differences.shape)
    height, width = tile.shape[:2]
    return bool((picture[top : top + height, left : left + width] == tile).all())


def test_the_picture_holds_all_four_tiles() -> None:
    shown = sample()
    picture = render_preview([shown], CLASSES, PALETTE)
    colors = np.array(PALETTE, dtype=np.uint8)
    side = (TILE_WIDTH, TILE_WIDTH)
    truth = tiles.resize(shown.truth, *side, nearest=True)
    prediction = tiles.resize(shown.prediction, *side, nearest=True)
    image = tiles.resize(shown.image, *side, nearest=False)
    for tile in (
        image,
        tiles.color_labels(truth, colors),
        tiles.color_labels(prediction, colors),
        tiles.disagreement(image, truth, prediction, 3),
    ):
        assert contains(picture, tile)


def test_samples_of_two_dates_have_two_images() -> None:
    after = np.full((32, 32, 3), (10, 180, 60), dtype=np.uint8)
    picture = render_preview([sample(after=after)], CLASSES, PALETTE)
    for image in (sample().image, after):
        assert contains(picture, tiles.resize(image, TILE_WIDTH, TILE_WIDTH, nearest=False))
    assert picture.shape[1] > render_preview([sample()], CLASSES, PALETTE).shape[1] + TILE_WIDTH


def test_missing_truth_leaves_two_columns() -> None:
    with_truth = render_preview([sample()], CLASSES, PALETTE)
    without = render_preview([sample(truth=None)], CLASSES, PALETTE)
    assert without.shape[1] < with_truth.shape[1] * 0.6
    mixed = render_preview([sample(), sample(truth=None)], CLASSES, PALETTE)
    assert mixed.shape[1] == with_truth.shape[1]


def test_truth_and_prediction_may_differ_in_size_from_the_image() -> None:
    shown = sample(prediction=np.ones((64, 128), dtype=np.uint8))
    assert render_preview([shown, sample(8)], CLASSES, PALETTE).ndim == 3


def test_legend_names_every_class_of_a_short_list() -> None:
    entries, note = _legend_entries([sample()], CLASSES, tiles.class_palette(3))
    assert [name for name, _ in entries] == [
        'land',
        'water',
        'road',
        'no data (255)',
        'wrong pixel',
    ]
    assert note == ''


def test_legend_of_a_long_list_names_what_is_in_the_picture() -> None:
    names = [f'class {index}' for index in range(60)]
    shown = sample(truth=np.full((4, 4), 58), prediction=np.full((4, 4), 3))
    entries, note = _legend_entries([shown], names, tiles.class_palette(60))
    assert [name for name, _ in entries] == ['class 3', 'class 58', 'wrong pixel']
    assert note == '2 of 60 classes in this picture'


def test_sixty_classes_fit() -> None:
    labels = np.arange(3600).reshape(60, 60) % 60
    picture = render_preview(
        [sample(prediction=labels, truth=labels)],
        [f'a long class name {index}' for index in range(60)],
    )
    assert contains(picture, np.tile(tiles.default_palette(60)[59], (18, 18, 1)))


def test_save_replaces_the_file_in_one_step(tmp_path: Path) -> None:
    path = tmp_path / 'run' / 'preview.png'
    save_preview(str(path), [sample(16)], CLASSES, PALETTE, 'title', 'first')
    first = path.read_bytes()
    save_preview(str(path), [sample(16)], CLASSES, PALETTE, 'title', 'second')
    assert path.read_bytes() != first
    assert [entry.name for entry in path.parent.iterdir()] == ['preview.png']
    shown = cv2.imread(str(path))[:, :, ::-1]
    assert (shown == render_preview([sample(16)], CLASSES, PALETTE, 'title', 'second')).all()


def test_a_failed_save_leaves_the_previous_picture(tmp_path: Path) -> None:
    path = tmp_path / 'preview.png'
    save_preview(str(path), [sample(16)], CLASSES)
    before = path.read_bytes()
    with pytest.raises(ValueError, match='expected \\(H, W\\) labels'):
        save_preview(str(path), [sample(16, prediction=np.zeros((1, 4, 4)))], CLASSES)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    'samples, classes, palette, message',
    [
        ([], CLASSES, PALETTE, '0 samples'),
        ([sample()], (), None, 'METAINFO'),
        ([sample()], CLASSES, [[1, 2]], 'palette'),
        ([sample()], CLASSES, [[1, 2, 300]], 'palette'),
        (
            [sample(), sample(after=np.zeros((32, 32, 3)))],
            CLASSES,
            PALETTE,
            'one date and others two',
        ),
        ([sample(image=np.zeros((2, 2, 2, 2)))], CLASSES, PALETTE, 'shape \\(2, 2, 2, 2\\)'),
        ([sample(truth=np.zeros((1, 2, 2)))], CLASSES, PALETTE, 'truth of a.png'),
    ],
)
def test_mistakes_are_named(samples: list, classes: tuple, palette: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        render_preview(samples, classes, palette)  # type: ignore[arg-type]


def test_pyplot_is_not_affected() -> None:
    render_preview([sample(8)], CLASSES)
    assert (
        'matplotlib.pyplot' not in sys.modules or not sys.modules['matplotlib.pyplot'].get_fignums()
    )


@pytest.mark.skipif(not LOVEDA.is_dir(), reason='the LoveDA sample is not on this machine')
def test_a_real_pair(tmp_path: Path) -> None:
    image = cv2.imread(str(LOVEDA / 'img_dir' / 'train' / '0.png'))[:, :, ::-1]
    mask = cv2.imread(str(LOVEDA / 'ann_dir' / 'train' / '0.png'), cv2.IMREAD_GRAYSCALE)
    truth = mask - np.uint8(1)  # 0 is no data and wraps to 255
    picture = render_preview(
        [PreviewSample(image, truth, truth)], [f'class {index}' for index in range(7)]
    )
    assert contains(picture, tiles.resize(image, TILE_WIDTH, TILE_WIDTH, nearest=False))
    assert not (picture == np.array(tiles.WRONG)).all(axis=2)[:TILE_WIDTH].any()


@pytest.mark.parametrize(
    'image',
    [
        np.arange(64, dtype=np.uint16).reshape(8, 8) * 900,
        np.linspace(-1, 1, 192, dtype=np.float32).reshape(8, 8, 3),
        np.full((8, 8, 1), 7, dtype=np.int32),
        np.zeros((8, 8, 13), dtype=np.float64),
        np.zeros((8, 8, 2), dtype=bool),
        np.zeros((2000, 700, 4), dtype=np.uint16),
    ],
    ids=lambda image: f'{image.dtype}{image.shape}',
)
def test_any_image_can_be_shown(image: np.ndarray) -> None:
    assert render_preview([sample(image=image)], CLASSES).dtype == np.uint8
