"""The picture of a whole map."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from geo_scenes import CLASSES, PALETTE, draw_classes, paint, write_raster

from mapsage.geo import Raster
from mapsage.pictures import map_preview


@pytest.mark.parametrize('read', [8, 1024])
def test_a_thumbnail_is_the_mean_of_valid_pixels(
    tmp_path: Path, read: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = paint(draw_classes(30, 22), 2, 'int16')
    values[:, :4] = -1
    values[:, 4, 0] = -1
    monkeypatch.setattr(map_preview, '_READ', read)
    small = map_preview.thumbnail(Raster(write_raster(tmp_path / 'a.tif', values, nodata=-1)), 4)
    assert small.shape == (6, 8, 2) and small.dtype == np.float32
    assert np.isnan(small[0]).all() and not np.isnan(small[1:]).any()
    np.testing.assert_allclose(small[2, 3], values[:, 8:12, 12:16].mean((1, 2)), rtol=1e-6)
    # Without the invalid pixel.
    block = values[:, 4:8, :4].reshape(2, -1)[:, 1:]
    np.testing.assert_allclose(small[1, 0], block.mean(1), rtol=1e-6)
    np.testing.assert_allclose(small[5, 7], values[:, 20:22, 28:30].mean((1, 2)), rtol=1e-6)


def test_labels_of_strips_equal_those_from_the_whole_map() -> None:
    labels = np.arange(22 * 30).reshape(22, 30)
    strips = [map_preview.shrink_labels(labels[row : row + 5], row, 4) for row in range(0, 22, 5)]
    np.testing.assert_array_equal(np.concatenate(strips), labels[::4, ::4])


def test_the_picture_shows_the_colors_of_the_map(tmp_path: Path) -> None:
    classes = draw_classes()
    raster = Raster(write_raster(tmp_path / 'a.tif', paint(classes)))
    map_preview.save_map_preview(
        str(tmp_path / 'p.png'),
        raster,
        map_preview.thumbnail(raster, 2),
        map_preview.shrink_labels(classes, 0, 2),
        'title',
        CLASSES,
        np.array(PALETTE, np.uint8),
        [0.8, 0.1, 0.1],
        255,
    )
    picture = cv2.imread(str(tmp_path / 'p.png'))[..., ::-1].reshape(-1, 3)
    for color in PALETTE:
        # More pixels than the swatch in the legend has.
        assert (picture == color).all(1).sum() > 18 * 18
