"""Every pixel of a scene is in a window, counts for something, and belongs to one strip."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.maps.windows import Grid, blend_weights, consecutive_runs, window_starts

LENGTHS = st.integers(1, 400)


@st.composite
def axes(draw) -> tuple:
    window = draw(st.integers(1, 64))
    return draw(LENGTHS), window, draw(st.integers(0, window - 1))


@given(axes())
def test_windows_cover_an_axis_with_the_overlap_asked_for(axis: tuple) -> None:
    length, window, overlap = axis
    starts = window_starts(length, window, overlap)
    assert starts[0] == 0
    if length <= window:
        assert starts == (0,)
        return
    assert starts[-1] + window == length
    steps = np.diff(starts)
    assert (steps > 0).all() and (steps <= window - overlap).all()
    # evenly: no sliver of a window at the end
    assert steps.max() - steps.min() <= 1
    # and with one window fewer they could not
    assert (len(starts) - 2) * (window - overlap) + window < length


@pytest.mark.parametrize('axis', [(0, 4, 0), (4, 0, 0), (4, 4, 4), (4, 4, -1)])
def test_lengths_that_make_no_windows_are_refused(axis: tuple) -> None:
    with pytest.raises(ValueError, match='expected'):
        window_starts(*axis)


@given(axes())
def test_weights_are_positive_and_normalized_sums_are_one(axis: tuple) -> None:
    length, window, overlap = axis
    weights = blend_weights(window, overlap)
    assert weights.dtype == np.float32 and weights.shape == (window,)
    assert (weights > 0).all() and (weights <= 1).all()
    np.testing.assert_array_equal(weights, weights[::-1])
    total, normalized = np.zeros(max(length, window)), np.zeros(max(length, window))
    for start in window_starts(length, window, overlap):
        total[start : start + window] += weights
    assert (total > 0).all()
    for start in window_starts(length, window, overlap):
        normalized[start : start + window] += weights / total[start : start + window]
    np.testing.assert_allclose(normalized, 1, rtol=1e-6)


@given(st.integers(2, 64), st.data())
def test_two_neighbors_sum_to_one_where_they_overlap(window: int, data: st.DataObject) -> None:
    overlap = data.draw(st.integers(1, window // 2))
    weights = blend_weights(window, overlap)
    np.testing.assert_allclose(weights[window - overlap :] + weights[:overlap], 1, atol=1e-6)


def test_weights_rise_smoothly() -> None:
    weights = blend_weights(64, 16)
    assert (np.diff(weights[:16]) > 0).all() and (weights[16:48] == 1).all()
    assert np.abs(np.diff(weights)).max() < 0.1  # 1 / 16 is a straight line's, pi / 2 times that


@given(axes(), axes())
def test_strips_tile_the_scene_and_need_the_windows_that_reach_them(
    down: tuple, across: tuple
) -> None:
    window = down[1], across[1]
    overlap = min(down[2], across[1] - 1)
    grid = Grid(down[0], across[0], window, overlap)
    edge = 0
    for number, row in enumerate(grid.rows):
        start, stop = grid.strip(number)
        assert start == edge and stop > start
        edge = stop
        reaching = [
            index for index, each in enumerate(grid.rows[: number + 1]) if each + window[0] > start
        ]
        assert list(range(grid.first_row(number), number + 1)) == reaching
        assert all(later >= stop for later in grid.rows[number + 1 :]) and row == start
    assert edge == grid.height


def test_a_strip_needs_one_row_above_it_with_overlaps_up_to_half_a_window() -> None:
    grid = Grid(20000, 20000, (512, 512), 128)
    assert all(number - grid.first_row(number) <= 1 for number in range(len(grid.rows)))


def test_runs_of_consecutive_strips() -> None:
    assert consecutive_runs([5, 0, 1, 2, 7, 6], 9) == [(0, 2), (5, 7)]
    assert consecutive_runs([5, 0, 1, 2, 7, 6], 2) == [(0, 1), (2, 2), (5, 5), (6, 7)]
    assert consecutive_runs([], 9) == []
