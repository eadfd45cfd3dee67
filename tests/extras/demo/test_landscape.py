"""Parcels, trees and water of the demo scenes."""

from __future__ import annotations

import numpy as np

from mapsage.extras.demo.ground_canvas import (
    AGRICULTURAL,
    BACKGROUND,
    BARREN,
    FOREST,
    NO_DATA,
    WATER,
    GroundCanvas,
)
from mapsage.extras.demo.landscape import (
    SceneKind,
    paint_forest,
    paint_parcels,
    paint_water,
    plant_trees,
)

SIDE = 160


def _kind(**changes: float) -> SceneKind:
    return SceneKind(
        **{
            **dict(
                forest=0.0,
                lake=0.0,
                town=0.0,
                river=False,
                barren=0.0,
                crops=0.0,
                parcel_area=3000.0,
                settled=0.0,
            ),
            **changes,
        }
    )


def _canvas() -> GroundCanvas:
    return GroundCanvas.blank(3, SIDE, NO_DATA)


def test_parcels_cover_the_scene_with_the_kind_of_land_asked_for() -> None:
    countryside = np.zeros((SIDE, SIDE), bool)
    for kind, value in (
        (_kind(), BACKGROUND),
        (_kind(barren=1.0), BARREN),
        (_kind(crops=1.0), AGRICULTURAL),
    ):
        canvas = _canvas()
        cuts, streets, blocks = paint_parcels(canvas, kind, countryside)
        assert (canvas.mask == value).all() and (canvas.albedo > 0).any(2).all()
        assert len(cuts) > 3 and not streets and not blocks


def test_a_town_gives_streets_and_blocks() -> None:
    _, streets, blocks = paint_parcels(
        _canvas(), _kind(crops=1.0, parcel_area=9000.0), np.ones((SIDE, SIDE), bool)
    )
    assert streets and blocks and all(block.shape[1] == 2 for block in blocks)


def test_trees_stand_in_their_region_and_are_forest() -> None:
    canvas, region = _canvas(), np.zeros((SIDE, SIDE), bool)
    plant_trees(canvas, region, 10, (3.0, 5.0))
    assert (canvas.mask == NO_DATA).all()
    region[60:100, 60:100] = True
    plant_trees(canvas, region, 10, (3.0, 5.0))
    forest = canvas.mask == FOREST
    assert forest.sum() > 300 and not forest[:50].any() and not forest[:, 110:].any()
    assert (canvas.height[forest] > 2).all() and not canvas.height[~forest].any()


def test_a_forest_fills_its_region() -> None:
    canvas, region = _canvas(), np.zeros((SIDE, SIDE), bool)
    region[40:] = True
    paint_forest(canvas, region)
    assert (canvas.mask[region] == FOREST).all() and canvas.height[region].max() > 4


def test_a_lake_lies_where_the_ground_is_deepest() -> None:
    canvas = _canvas()
    depth = np.tile(np.arange(SIDE, dtype=np.float32), (SIDE, 1))
    paint_water(canvas, _kind(lake=0.25), depth)
    assert (canvas.mask[:, 120:] == WATER).all() and not (canvas.mask[:, :119] == WATER).any()
    assert set(np.unique(canvas.mask[:, 116:120])) <= {BACKGROUND, BARREN}  # the bank
    dry = _canvas()
    paint_water(dry, _kind(), depth)
    assert (dry.mask == NO_DATA).all()
