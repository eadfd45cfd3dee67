"""Tiles of large images: where they begin, their colors, their files."""

from __future__ import annotations

from pathlib import Path
from typing import List

import cv2
import numpy as np
import pytest

from mapsage.extras.demo.prepare.source_files import PrepareError
from mapsage.extras.demo.prepare.tiling import ColorClasses, encode_png, read_strips, starts


@pytest.mark.parametrize(
    'length, size, stride, expected',
    [
        (6000, 512, 512, [*range(0, 5488, 512), 5488]),
        (1024, 512, 512, [0, 512]),
        (300, 512, 512, [0]),
        (2000, 896, 512, [0, 512, 1024, 1104]),
        (896, 896, 512, [0]),
    ],
)
def test_starts(length: int, size: int, stride: int, expected: List[int]) -> None:
    assert starts(length, size, stride) == expected


def test_a_full_size_area_gives_the_documented_tiles() -> None:
    """MMSeg's documents: 3456 and 2016 tiles for the 24 and 14 areas of Potsdam."""
    assert 24 * len(starts(6000, 512, 512)) ** 2 == 3456 and 14 * 144 == 2016


def test_palette_images_are_read_by_their_colors(tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.fromarray(np.arange(12, dtype=np.uint8).reshape(4, 3))
    picture.putpalette([v for i in range(256) for v in (255 - i, i, 7)])
    picture.save(str(tmp_path / 'p.png'))
    strips = list(read_strips(tmp_path / 'p.png', 'p.png', 3, 2))
    values = np.arange(12).reshape(4, 3)
    colors = np.stack([255 - values, values, np.full_like(values, 7)], 2)
    np.testing.assert_array_equal(strips[0], colors[:3])
    np.testing.assert_array_equal(strips[1], colors[1:])


def test_unknown_colors_are_an_error_or_ignored() -> None:
    known = {(0, 0, 0): 0, (255, 255, 255): 1, (0, 0, 255): 2}
    colors = np.array([[[0, 0, 255], [255, 255, 255], [0, 0, 254]]], np.uint8)
    with pytest.raises(PrepareError, match=r'a\.tif: pixel \(column 2, row 5\) .*\(0, 0, 254\)'):
        ColorClasses(known).read(colors, 'a.tif', 5)
    mask, unknown = ColorClasses(known, 9).read(colors, 'a.tif', 5)
    assert mask.tolist() == [[2, 1, 9]] and unknown.tolist() == [[False, False, True]]


def test_a_tile_is_padded_right_and_below() -> None:
    rgb = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)
    tile = cv2.imdecode(np.frombuffer(encode_png(rgb, 4, 7), np.uint8), cv2.IMREAD_UNCHANGED)
    np.testing.assert_array_equal(tile[:2, :3, ::-1], rgb)
    assert tile.shape == (4, 4, 3) and (tile[2:] == 7).all() and (tile[:, 3:] == 7).all()
