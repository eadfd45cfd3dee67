"""Grids of windows: every pixel counts once, and windows without data are left out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from geo_scenes import write_raster
from hypothesis import given
from hypothesis import strategies as st

from mapsage.datasets.geotiff.window_grid import WindowGrid
from mapsage.geo import Raster


@given(st.integers(1, 300), st.integers(1, 80), st.integers(1, 80))
def test_every_pixel_of_a_side_counts_in_one_window(size: int, window: int, stride: int) -> None:
    # A larger step than the window would leave pixels out.
    stride = min(stride, window)
    grid = WindowGrid(window, stride)
    counted = np.zeros(max(size, window), int)
    for start in grid._starts(size):
        first, last = grid.share(start, size)
        counted[start + first : start + last] += 1
    assert (counted[:size] == 1).all()


def test_windows_without_data_are_left_out(tmp_path: Path) -> None:
    """One valid pixel keeps its window, also where a low resolution does not show it."""
    values = np.zeros((1, 128, 192), 'uint8')
    values[0, :64, :64] = 7
    # Of two pixels, the low resolution shows the even or the odd one.
    values[0, 97, 131] = values[0, 96, 66] = 7
    with_gaps = Raster(write_raster(tmp_path / 'a.tif', values, nodata=0))
    whole = Raster(write_raster(tmp_path / 'b.tif', values))
    corners = WindowGrid(64, 64).corners([with_gaps, whole])
    assert corners[0] == [(0, 0), (64, 64), (128, 64)]
    assert corners[1] == [(x, y) for y in (0, 64) for x in (0, 64, 128)]


def test_the_last_window_ends_with_the_scene(tmp_path: Path) -> None:
    scene = Raster(write_raster(tmp_path / 'a.tif', np.ones((1, 70, 100), 'uint8')))
    assert WindowGrid(64, 64).corners([scene]) == [[(0, 0), (36, 0), (0, 6), (36, 6)]]


def test_the_overlap_of_neighbors_is_divided_in_its_middle() -> None:
    grid = WindowGrid(64, 48)
    # The windows begin at 0, 48 and 56; they share 16 and 56 pixels.
    assert [grid.share(start, 120) for start in (0, 48, 56)] == [(0, 56), (8, 36), (28, 64)]
