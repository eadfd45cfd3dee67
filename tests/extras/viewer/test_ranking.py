"""Which tiles of a map come first in a review."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from view_maps import UTM, WRONG, add_map, folders, values_of, write_raster

from mapsage.extras.viewer import ViewError
from mapsage.extras.viewer.ranking import RankedTile, order, rank, windows_of
from mapsage.geo import confidence_path
from mapsage.maps.windows import window_starts


@pytest.mark.parametrize('size', [(64, 64), (65, 1), (400, 600), (1, 129), (129, 128)])
def test_windows_are_those_that_labels_are_suggested_for(size) -> None:
    found = list(windows_of(size, (64, 64)))
    assert found == [
        (column, row, min(64, size[1]), min(64, size[0]))
        for row in window_starts(size[0], 64, 0)
        for column in window_starts(size[1], 64, 0)
    ]
    # The model saw the scene at half its size: its windows are twice as large on the map.
    seen = tuple(-(-side // 2) for side in size)
    covered = np.zeros(size, bool)
    for column, row, width, height in windows_of(size, (64, 64), seen):
        assert width in (size[1], 128) or size[1] % 2
        covered[row : row + height, column : column + width] = True
    assert covered.all()


def test_errors_where_labels_are_else_uncertainty(tmp_path: Path) -> None:
    where = folders(tmp_path)
    labels = add_map(where, 'a', polygons=False)
    path, windows = where.maps / 'a.tif', list(windows_of((400, 600), (128, 128)))
    truth = values_of(where.truth / 'a.tif')[0]
    truth[:, 400:] = 255  # no labels on the right
    (where.truth / 'a.tif').unlink()
    write_raster(where.truth / 'a.tif', truth[None], nodata=255, **UTM)
    found = rank(path, confidence_path(path), where.truth / 'a.tif', windows)
    assert {each[:4] for each in found} == set(windows)
    doubt = np.where(labels == 255, 0, np.where(np.arange(600) < 300, 60, 10)) / 100
    wrong = np.zeros((400, 600))
    wrong[WRONG] = 1
    for each in found:
        here = np.s_[each.row : each.row + each.height, each.column : each.column + each.width]
        is_labeled = (truth[here] != 255).any()
        assert each.measure == ('error' if is_labeled else 'uncertainty')
        assert each.score == pytest.approx((wrong if is_labeled else doubt)[here].mean(), abs=6e-5)
    assert {each.measure for each in found} == {'error', 'uncertainty'}
    assert {each.measure for each in rank(path, None, None, windows)} == {''}
    ranked = [each for _, each in order([(0, each) for each in found])]
    assert [each.measure for each in ranked] == sorted(each.measure for each in found)
    assert ranked[0].score == max(each.score for each in found if each.measure == 'error') > 0


def test_tiles_without_data_are_left_out_and_changed_ones_told(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False)
    path, windows = where.maps / 'a.tif', [(0, 0, 40, 20), (40, 0, 40, 20), (0, 20, 600, 380)]
    before = rank(path, None, None, windows)
    assert [each[:4] for each in before] == windows[1:]  # the first 40 x 20 pixels have no data
    assert rank(path, None, None, windows) == before
    add_map(where, 'a', classes=5, polygons=False)
    after = rank(path, None, None, windows)
    assert after[0].checksum == before[0].checksum  # its two classes are the same in both
    assert after[1].checksum != before[1].checksum


def test_files_of_another_size_are_said(tmp_path: Path) -> None:
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False)
    add_map(where, 'b', size=(300, 200), polygons=False)
    with pytest.raises(ViewError, match='300 x 200 pixels, the map 600 x 400'):
        rank(where.maps / 'a.tif', where.maps / 'b_confidence.tif', None, [(0, 0, 9, 9)])


def test_errors_come_before_uncertainty_and_equal_tiles_in_their_order() -> None:
    def tile(column: int, score: float, measure: str) -> RankedTile:
        return RankedTile(column, 0, 9, 9, score, measure, 0)

    tiles = [
        (1, tile(9, 0, '')),
        (0, tile(3, 0.9, 'uncertainty')),
        (2, tile(0, 0.3, 'error')),
        (0, tile(9, 0.2, 'error')),
        (0, tile(0, 0, '')),
        (1, tile(0, 0.2, 'error')),
        (0, tile(1, 0.2, 'error')),
        (0, tile(5, 0.1, 'error')),
    ]
    assert [(number, each.column, each.measure) for number, each in order(tiles)] == [
        (2, 0, 'error'),
        (0, 1, 'error'),
        (0, 9, 'error'),
        (1, 0, 'error'),
        (0, 5, 'error'),
        (0, 3, 'uncertainty'),
        (0, 0, ''),
        (1, 9, ''),
    ]
