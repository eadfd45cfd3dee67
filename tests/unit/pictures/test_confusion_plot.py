"""The picture of a confusion matrix."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from label_pairs import NAMES, data_sample, label_maps

from mapsage.evaluation import (
    ConfusionMatrixMetric,
)
from mapsage.pictures.canvas import save_png
from mapsage.pictures.confusion_plot import render_confusion, short_count


def test_picture_shows_rows_in_percent(tmp_path: Path) -> None:
    matrix = np.array([[990000, 10000, 0], [500, 500, 0], [0, 0, 0]])
    picture = render_confusion(matrix, ('field', 'a$b$', 'water'), subtitle='mIoU 12.34')
    scaled = render_confusion(matrix * np.array([[1], [7], [1]]), ('field', 'a$b$', 'water'))
    assert picture.dtype == np.uint8 and picture.shape[2] == 3
    darkest, lightest = (
        int((picture.reshape(-1, 3) == color).all(1).sum())
        for color in ((8, 48, 107), (247, 251, 255))
    )
    # The cell with 0 % has the lightest color, the cell with 99 % is one step from the darkest.
    assert lightest > 1500
    assert darkest == 0 and (picture.sum(2) < 200).sum() > 1500
    rows = slice(140, None)
    assert np.abs(picture[rows, :400].astype(int) - scaled[rows, :400]).mean() < 1
    metric = ConfusionMatrixMetric(picture=str(tmp_path / 'new' / 'matrix.png'))
    metric.dataset_meta = dict(classes=NAMES)
    metric.process(None, [data_sample(*label_maps(0, 7)).to_dict()])
    metric.evaluate(1)
    assert cv2.imread(str(tmp_path / 'new' / 'matrix.png')).shape[1] > 500
    with pytest.raises(ValueError, match='has 2 class names'):
        render_confusion(matrix, ('a', 'b'))


def test_picture_of_many_classes(tmp_path: Path) -> None:
    matrix = np.diag(np.arange(120)) + 1
    picture = render_confusion(matrix, [f'class {number}' for number in range(120)])
    save_png(str(tmp_path / 'many.png'), picture)
    # A row is high enough for its name.
    assert 120 * 11 < picture.shape[0] < 120 * 11 + 300


def test_short_counts() -> None:
    assert [
        short_count(n)
        for n in (0, 999, 1000, 12345, 999949, 999950, 10**6, 999999999, 123456789012)
    ] == ['0', '999', '1.0k', '12.3k', '999.9k', '1.0M', '1.0M', '1.0G', '123.5G']
