"""Outlines of pixel regions as flat arrays: tracing, simplification of shared borders, areas.

All outlines of a batch are in one array of points, and number arrays say which ring and polygon a
point belongs to; so NumPy handles millions of points without a Python loop. The polygons of a map
are written by `polygons.py`.

Shapes:
    points, ring, corner, node   one value per point, N; points is (N, 2) of column, row
    polygon                      one value per ring
    arc                          number of the arc (border between two nodes) of each point
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

import numpy as np
import shapely


@dataclass
class Rings:
    """Closed rings around pixel regions, with a point at each pixel corner along the outline.

    Attributes:
        points: Columns and rows, int64 (N, 2); the first point of a ring is not repeated.
        ring: Number of the ring of each point, int64 (N,), ascending.
        polygon: Number of the polygon of each ring, int64 (rings,); the first ring of a polygon is
            its outline, the others are its holes.
        corner: Whether the ring changes direction at the point, bool (N,).
    """

    points: np.ndarray
    ring: np.ndarray
    polygon: np.ndarray
    corner: np.ndarray


def walk(polygons: np.ndarray) -> Rings:
    """Trace shapely polygons, whose edges follow rows and columns, in steps of one pixel."""
    rings, polygon = shapely.get_rings(polygons, return_index=True)
    points, ring = shapely.get_coordinates(rings, return_index=True)
    points = np.rint(points).astype(np.int64)
    # Shapely repeats a ring's first point at its end.
    inner = ring[:-1] == ring[1:]
    step, start, ring = (points[1:] - points[:-1])[inner], points[:-1][inner], ring[:-1][inner]
    length = np.abs(step).sum(1)
    edge = np.repeat(np.arange(len(length)), length)
    along = np.arange(len(edge)) - np.repeat(np.cumsum(length) - length, length)
    direction = np.sign(step)[edge]
    walked, ring = start[edge] + along[:, None] * direction, ring[edge]
    return Rings(walked, ring, polygon, (direction != direction[_previous_in_ring(ring)]).any(1))


def rebuild(rings: Rings, keep: np.ndarray) -> np.ndarray:
    """Return shapely polygons of the points where ``keep`` (bool (N,)) is set."""
    return build_polygons(rings.points[keep], rings.ring[keep], rings.polygon)


def build_polygons(points: np.ndarray, ring: np.ndarray, polygon: np.ndarray) -> np.ndarray:
    """Return shapely polygons from rings in order, each of at least three points."""
    return shapely.polygons(shapely.linearrings(points, indices=ring), indices=polygon)


def simplify(rings: Rings, node: np.ndarray, tolerance: float) -> np.ndarray:
    """Simplify polygons so that neighbors still share the same border.

    A border runs between two nodes, which are points where three or more regions meet. Each of the
    two neighbors has the border in its outline, in opposite directions. The border is simplified
    (Douglas-Peucker) in a direction that depends on its coordinates only, so both neighbors get the
    same points. A ring that would collapse and a polygon that would cross itself keep their exact
    outline; both are about as thin as the tolerance.

    Args:
        rings: Exact outlines.
        node: Whether each point is a node, bool (N,).
        tolerance: Largest distance in pixels from the exact outline.

    Returns:
        Valid shapely polygons (P,).
    """
    keep = rings.corner | node
    points, ring, start = _rotate_to_start(rings.points[keep], rings.ring[keep], node[keep])
    simple, arc = _simplify_arcs(points, ring, start, tolerance)
    # The last point of an arc is dropped, because the next arc starts with it.
    last_of_arc = np.r_[arc[1:] != arc[:-1], True]
    simple, simple_ring = simple[~last_of_arc], ring[start][arc[~last_of_arc]]
    collapsed = np.bincount(simple_ring, minlength=len(rings.polygon)) < 3
    exact = rings.corner & collapsed[rings.ring]
    simple, simple_ring = (
        np.concatenate([simple[~collapsed[simple_ring]], rings.points[exact]]),
        np.r_[simple_ring[~collapsed[simple_ring]], rings.ring[exact]],
    )
    order = np.argsort(simple_ring, kind='stable')
    polygons = build_polygons(simple[order], simple_ring[order], rings.polygon)
    invalid = ~shapely.is_valid(polygons)
    if invalid.any():
        polygons[invalid] = rebuild(rings, rings.corner)[invalid]
    return polygons


def ring_areas(points: np.ndarray, ring: np.ndarray) -> np.ndarray:
    """Return the unsigned areas (shoelace formula) of the rings in order, float64 (rings,)."""
    first = _firsts(ring)
    local = points - np.repeat(points[first], np.diff(np.r_[first, len(ring)]), axis=0)
    previous = local[_previous_in_ring(ring)]
    return (
        np.abs(np.add.reduceat(previous[:, 0] * local[:, 1] - local[:, 0] * previous[:, 1], first))
        / 2
    )


def polygon_areas(areas: np.ndarray, polygon: np.ndarray) -> np.ndarray:
    """Return the areas of polygons, outline minus holes, from the areas of their rings."""
    outline = np.r_[True, polygon[1:] != polygon[:-1]]
    return np.bincount(polygon, np.where(outline, areas, -areas))


def _firsts(group: np.ndarray) -> np.ndarray:
    """Return the index at which each of consecutive groups begins."""
    return np.flatnonzero(np.r_[True, group[1:] != group[:-1]])


def _previous_in_ring(ring: np.ndarray) -> np.ndarray:
    """Return the index of the point before each point, cyclic within its ring."""
    previous = np.arange(len(ring)) - 1
    first = _firsts(ring)
    previous[first] = np.r_[first[1:], len(ring)] - 1
    return previous


def _rotate_to_start(
    points: np.ndarray, ring: np.ndarray, node: np.ndarray
) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rotate each ring to begin at a node, or at its smallest point if it has no node.

    Returns:
        Points in their new order, their rings (unchanged), and where an arc starts, bool (N,).
    """
    first = _firsts(ring)
    count = np.diff(np.r_[first, len(ring)])
    # Sorted by ring, then nodes first, then by position, the first point of each ring is its start.
    begin = np.lexsort((points[:, 0], points[:, 1], ~node, ring))[first]
    offset = np.arange(len(ring)) - np.repeat(first, count)
    order = np.repeat(first, count) + (offset + np.repeat(begin - first, count)) % np.repeat(
        count, count
    )
    start = node[order]
    start[first] = True
    return points[order], ring, start


def _simplify_arcs(
    points: np.ndarray, ring: np.ndarray, start: np.ndarray, tolerance: float
) -> Tuple[np.ndarray, np.ndarray]:
    """Simplify each arc: the points from a start to the next start in its ring, both included.

    Returns:
        Remaining points in the order of the rings, int64 (M, 2), and their arcs, int64 (M,).
    """
    starts = np.flatnonzero(start)
    first_of_ring = np.r_[True, ring[starts][1:] != ring[starts][:-1]]
    ring_start = starts[first_of_ring][np.cumsum(first_of_ring) - 1]
    ends = np.where(np.r_[first_of_ring[1:], True], ring_start, np.r_[starts[1:], 0])
    members = np.insert(np.arange(len(points)), np.r_[starts[1:], len(points)], ends)
    arc = np.repeat(np.arange(len(starts)), np.diff(np.r_[starts, len(points)]) + 1)
    flat = points[members]
    backward = _runs_backward(flat, arc)
    flat = flat[_flip(arc, backward)]
    lines = shapely.simplify(
        shapely.linestrings(flat, indices=arc), tolerance, preserve_topology=False
    )
    simple, simple_arc = shapely.get_coordinates(lines, return_index=True)
    return np.rint(simple).astype(np.int64)[_flip(simple_arc, backward)], simple_arc


def _runs_backward(flat: np.ndarray, arc: np.ndarray) -> np.ndarray:
    """Return which arcs to reverse, so that a border has the same direction in both outlines.

    Returns:
        bool (arcs,).
    """
    first = _firsts(arc)
    last = np.r_[first[1:], len(arc)] - 1
    key = flat[:, 1] * (flat[:, 0].max() + 1) + flat[:, 0]
    closed = key[first] == key[last]
    return np.where(closed, key[first + 1] > key[last - 1], key[first] > key[last])


def _flip(group: np.ndarray, backward: np.ndarray) -> np.ndarray:
    """Return the order of points that reverses the groups marked in ``backward``."""
    first = _firsts(group)
    last = np.r_[first[1:], len(group)] - 1
    position = np.arange(len(group))
    return np.where(backward[group], first[group] + last[group] - position, position)
