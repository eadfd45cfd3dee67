"""The canvas and the file it is saved to."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest

from mapsage.pictures.canvas import Canvas, chinese_families, save_png


@pytest.mark.parametrize('size', [(301, 97), (640, 480)])
def test_a_canvas_has_its_size_and_keeps_pictures_unchanged(size: tuple) -> None:
    picture = np.random.RandomState(0).randint(0, 256, (20, 30, 3)).astype(np.uint8)
    canvas = Canvas(*size)
    canvas.picture(11, 13, picture)
    pixels = canvas.pixels()
    assert pixels.shape == (size[1], size[0], 3) and pixels.dtype == np.uint8
    np.testing.assert_array_equal(pixels[13:33, 11:41], picture)
    assert (pixels[12, 10:42] == 168).all() and (pixels[11] == 255).all()


def test_text_is_drawn_left_to_right_on_its_baseline() -> None:
    canvas = Canvas(200, 60)
    canvas.text(20, 40, 'a$b$', size=12)
    rows, columns = np.nonzero(canvas.pixels().min(2) < 128)
    assert 18 <= columns.min() <= 24 and columns.max() < 100
    assert 20 < rows.min() and rows.max() <= 44


def drawn(text: str) -> np.ndarray:
    canvas = Canvas(120, 60)
    canvas.text(20, 40, text, size=12)
    return canvas.pixels()


@pytest.mark.filterwarnings('error:Glyph')
def test_chinese_names_are_drawn() -> None:
    if not chinese_families():
        pytest.skip('needs a font with Chinese characters (apt-get install fonts-noto-cjk)')
    # A character that the font lacks is a box, the same for all of them.
    assert (drawn('水') != drawn('林')).any()
    canvas = Canvas(120, 60)
    canvas.axes(20, 20, 80, 20).set_title('水 water')
    canvas.pixels()


def test_a_saved_picture_replaces_another_and_can_be_read_by_all(tmp_path: Path) -> None:
    path = tmp_path / 'new' / 'a.png'
    for value in (10, 200):
        save_png(str(path), np.full((4, 5, 3), (value, 0, 99), np.uint8))
    np.testing.assert_array_equal(cv2.imread(str(path))[0, 0], (99, 0, 200))
    assert path.stat().st_mode & 0o777 == 0o644
    assert [file.name for file in path.parent.iterdir()] == ['a.png']
