"""Roads and buildings of the demo scenes."""

from __future__ import annotations

import numpy as np

from mapsage.extras.demo.ground_canvas import (
    BACKGROUND,
    BUILDING,
    ROAD,
    WATER,
    GroundCanvas,
    Segment,
)
from mapsage.extras.demo.settlement import build_farms, build_town, paint_roads

SIDE = 200
ACROSS: Segment = (np.array([0.0, 100.0]), np.array([200.0, 100.0]), 0)


def _canvas() -> GroundCanvas:
    canvas = GroundCanvas.blank(5, SIDE, BACKGROUND)
    canvas.albedo[:] = 0.3
    return canvas


def test_only_a_paved_road_crosses_water() -> None:
    for paved in (False, True):
        canvas = _canvas()
        canvas.mask[:, 80:120] = WATER
        street: Segment = (np.array([0.0, 40.0]), np.array([200.0, 40.0]), 0)
        paint_roads(canvas, [ACROSS], [street], paved)
        road = canvas.mask == ROAD
        assert road[40, :75].all() and not road[40, 80:120].any()
        assert road[100].all() if paved else not road[100].any()


def test_a_town_builds_within_its_blocks() -> None:
    canvas = _canvas()
    blocks = [np.array([[x, 10.0], [x + 90, 10.0], [x + 90, 190.0], [x, 190.0]]) for x in (5, 105)]
    build_town(canvas, blocks)
    built = canvas.mask == BUILDING
    assert built.sum() > 1000 and not built[:, 198:].any() and not built[:3].any()
    assert (canvas.height[built] >= 6).all()


def test_farms_stand_beside_old_borders_and_never_on_a_road() -> None:
    canvas = _canvas()
    canvas.mask[132:140] = ROAD
    build_farms(canvas, [ACROSS] * 8, chance=1.0)
    assert (canvas.mask[40:90] == BUILDING).any() and (canvas.mask[132:140] == ROAD).all()
    untouched = _canvas()
    build_farms(untouched, [(ACROSS[0], ACROSS[1], 3)] * 8, chance=1.0)  # too young a border
    assert (untouched.mask == BACKGROUND).all()
