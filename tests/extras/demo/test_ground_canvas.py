"""The canvas of the demo scenes: fields, polygons, land division, light."""

from __future__ import annotations

from typing import List

import cv2
import numpy as np
import pytest

from mapsage.extras.demo.ground_canvas import (
    ROAD,
    GroundCanvas,
    Segment,
    divide,
    largest,
    longest_edge,
    photograph,
)


def _canvas(seed: int = 1, side: int = 96) -> GroundCanvas:
    return GroundCanvas.blank(seed, side, ROAD)


def test_noise_is_normalized_and_repeats_with_its_seed() -> None:
    noise = _canvas().noise(30)
    assert noise.dtype == np.float32 and noise.shape == (96, 96)
    assert abs(noise.mean()) < 1e-5 and noise.std() == pytest.approx(1, abs=1e-4)
    np.testing.assert_array_equal(noise, _canvas().noise(30))
    assert (noise != _canvas(2).noise(30)).any()


def test_a_polygon_is_filled_within_the_canvas() -> None:
    canvas = _canvas()
    window, inside = canvas.fill(np.array([[-20, 10], [9, 10], [9, 19], [-20, 19]], float))
    assert window == np.s_[10:20, 0:10] and inside.dtype == bool and inside.all()
    canvas.mask[window][inside] = 5
    assert (canvas.mask == 5).sum() == 100


def test_the_largest_share_of_a_field() -> None:
    field = np.arange(100.0).reshape(10, 10)
    chosen = largest(field, 0.3)
    assert chosen.sum() == 30 and chosen[7:].all()
    assert not largest(field, 0.0).any()


def test_the_longest_edge_has_unit_length() -> None:
    edge = longest_edge(np.array([[0, 0], [30, 40], [30, 41], [0, 1]], float))
    np.testing.assert_allclose(np.abs(edge), [0.6, 0.8])


def test_division_keeps_the_area_and_records_each_cut() -> None:
    square = np.array([[0, 0], [200, 0], [200, 200], [0, 200]], float)
    cuts: List[Segment] = []
    parts = divide(np.random.RandomState(0), square, 2000, 0.3, cuts)
    areas = [cv2.contourArea(part.astype(np.float32)) for part in parts]
    assert sum(areas) == pytest.approx(40000, rel=1e-4)
    assert len(parts) == len(cuts) + 1 and max(areas) < 4000
    assert cuts[0][2] == 0 and max(depth for _, _, depth in cuts) > 2


def test_a_picture_has_shadows_and_keeps_zero_for_no_data() -> None:
    canvas = _canvas()
    canvas.albedo[:] = 0.5
    flat = photograph(canvas)
    assert flat.dtype == np.uint8 and flat.shape == (96, 96, 3) and flat.min() >= 1
    tall = _canvas()
    tall.albedo[:] = 0.5
    tall.height[40:56, 40:56] = 15
    shaded = photograph(tall).astype(int) - flat  # the same light, haze and noise
    ground = np.ones((96, 96), bool)
    ground[36:60, 36:60] = False
    assert (shaded[ground] < -20).sum() > 300 and shaded[ground].max() < 20
