"""Outlines of pixel regions: tracing, areas, simplification."""

from __future__ import annotations

import numpy as np
import shapely

from mapsage.geo.outlines import Rings, polygon_areas, rebuild, ring_areas, simplify, walk

FRAME = shapely.box(0, 0, 5, 4).difference(shapely.box(1, 1, 3, 2))  # 20 - 2 square pixels


def _areas(rings: Rings) -> np.ndarray:
    return polygon_areas(ring_areas(rings.points, rings.ring), rings.polygon)


def _toothed_halves() -> np.ndarray:
    """Return the two parts of a box of 10 x 12 pixels, cut along a toothed line near x = 4.5."""
    border = [(4 + row % 2, row + end) for row in range(12) for end in (0, 1)]
    left = shapely.Polygon([(0, 0), *border, (0, 12)])
    return np.array([left, shapely.box(0, 0, 10, 12).difference(left)])


def test_a_walk_passes_every_pixel_corner_and_marks_the_turns() -> None:
    rings = walk(np.array([FRAME, shapely.box(7, 0, 9, 1)]))
    assert np.bincount(rings.ring).tolist() == [18, 6, 6]
    assert rings.polygon.tolist() == [0, 0, 1]
    assert np.bincount(rings.ring[rings.corner]).tolist() == [4, 4, 4]
    same_ring = rings.ring[1:] == rings.ring[:-1]
    assert (np.abs(np.diff(rings.points, axis=0)).sum(1)[same_ring] == 1).all()


def test_areas_are_those_of_outlines_without_their_holes() -> None:
    rings = walk(np.array([FRAME, shapely.box(7, 0, 9, 1)]))
    assert ring_areas(rings.points, rings.ring).tolist() == [20, 2, 2]
    assert _areas(rings).tolist() == [18, 2]


def test_corners_alone_rebuild_the_polygons() -> None:
    polygons = np.array([FRAME, shapely.box(7, 0, 9, 1)])
    rings = walk(polygons)
    rebuilt = rebuild(rings, rings.corner)
    assert shapely.equals(rebuilt, polygons).all()
    assert shapely.get_num_coordinates(rebuilt).tolist() == [10, 5]


def test_both_sides_of_a_border_are_simplified_alike() -> None:
    halves = _toothed_halves()
    rings = walk(halves)
    ends = [(4, 0), (5, 12)]  # where the border meets the outside
    node = (rings.points[:, None] == np.array(ends)).all(2).any(1)
    simple = simplify(rings, node, 1.5)
    assert shapely.get_num_coordinates(simple).sum() < shapely.get_num_coordinates(halves).sum() / 2
    assert shapely.is_valid(simple).all()
    assert shapely.area(simple).tolist() == [54, 66]
    assert shapely.area(shapely.intersection(*simple)) == 0


def test_a_region_as_thin_as_the_tolerance_keeps_its_outline() -> None:
    line = shapely.box(2, 3, 9, 4)
    rings = walk(np.array([line]))
    simple = simplify(rings, np.zeros(len(rings.points), bool), 3)
    assert shapely.equals(simple[0], line)
