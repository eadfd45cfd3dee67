"""Positions in pixels, in map coordinates and in another CRS.

A straight line is curved in another CRS. So the outline of a window has nodes between its corners,
and polygons get nodes on long edges (:func:`project_polygons`), before they are reprojected.
"""

from __future__ import annotations

from typing import List, Optional, Tuple

import affine
import numpy as np
import pyproj
import shapely
from rasterio.crs import CRS

from .errors import Box
from .raster import Raster
from .reference_systems import full_turn, next_to, same_crs

# Number of segments of each side of a window.
_STEPS = 8
# Most times that an edge is divided by three.
_DIVISIONS = 12


def to_map(transform: affine.Affine, pixels: np.ndarray) -> np.ndarray:
    """Return the map coordinates, float64 (N, 2), of positions (column, row) in pixels, (N, 2)."""
    a, b, c, d, e, f = transform[:6]
    x, y = pixels[:, 0], pixels[:, 1]
    return np.stack([a * x + b * y + c, d * x + e * y + f], 1)


def window_bounds(transform: affine.Affine, window: Box) -> List[float]:
    """Return left, bottom, right and top of a window in pixels, in map coordinates."""
    column, row, width, height = window
    corners = [(x, y) for x in (column, column + width) for y in (row, row + height)]
    points = to_map(transform, np.array(corners))
    return [*points.min(0), *points.max(0)]


def corner_offsets(raster: Raster, reference: Raster, corners: np.ndarray) -> np.ndarray:
    """Return the distances between the corners of two rasters, float64 (N, 2).

    Args:
        raster: The raster.
        reference: Raster in the same CRS; the distances are in its pixels, to the right and down.
        corners: Columns and rows in both rasters, (N, 2).
    """
    points, expected = (to_map(scene.transform, corners) for scene in (raster, reference))
    points[:, 0] = next_to(points[:, 0], expected[:, 0], full_turn(reference.crs))
    return to_map(~reference.transform, points) - corners


def short_crs(crs: Optional[CRS]) -> str:
    """Return the name of a CRS, shortened for a message; 'none' without one."""
    return 'none' if crs is None else str(crs.to_string())[:60]


def window_outline(
    raster: Raster, column: int, row: int, width: int, height: int
) -> shapely.Polygon:
    """Return a window in pixels of a raster as a polygon in its CRS, with nodes on its sides."""
    along = np.linspace(0, 1, _STEPS, endpoint=False)
    zero, one = np.zeros(_STEPS), np.ones(_STEPS)
    x = np.concatenate([along, one, 1 - along, zero]) * width + column
    y = np.concatenate([zero, along, one, 1 - along]) * height + row
    return shapely.Polygon(to_map(raster.transform, np.stack([x, y], 1)))


def reprojected(polygon: shapely.Geometry, source: str, target: str) -> shapely.Geometry:
    """Return a polygon in another CRS.

    Args:
        polygon: Polygon in the CRS ``source``.
        source: CRS as WKT or by name (``EPSG:4326``).
        target: CRS of the result, as WKT or by name.
    """
    if same_crs(source, target):
        return polygon
    transformer = pyproj.Transformer.from_crs(source, target, always_xy=True)
    return shapely.transform(
        polygon, lambda points: np.stack(transformer.transform(points[:, 0], points[:, 1]), 1)
    )


def project_polygons(
    polygons: np.ndarray,
    transformer: pyproj.Transformer,
    tolerance: float,
    full_turns: Tuple[float, float],
) -> np.ndarray:
    """Return polygons in another CRS, in which their edges lie within a tolerance.

    An edge is straight in the CRS of the polygons: in GeoJSON, longitude and latitude change in
    proportion to each other. An edge that is curved in the other CRS gets nodes where a straight
    one would be off; most edges need none. An edge of more than half a turn is one across the
    antimeridian, except an edge of exactly a whole turn, as around a pole.

    Args:
        polygons: Single polygons, object (N,).
        transformer: Transformer to the other CRS; x, which may be a longitude, comes first.
        tolerance: Largest distance of an edge from its place, in the unit of the other CRS.
        full_turns: Results of :func:`full_turn` for the two CRS.

    Returns:
        Polygons, object (N,). Coordinates are infinite where the other CRS has none.
    """

    def project(points: np.ndarray) -> np.ndarray:
        return np.stack(transformer.transform(points[:, 0], points[:, 1]), 1)

    kind, points, (rings, owners) = shapely.to_ragged_array(polygons, include_z=False)
    moved = project(points)
    # An edge begins at each point but the last one of a ring.
    is_start = np.ones(len(points), bool)
    is_start[rings[1:] - 1] = False
    edge = np.flatnonzero(is_start)
    edge = edge[_may_curve(points, moved, edge, full_turns) > tolerance]
    begin, end = np.zeros(len(edge)), np.ones(len(edge))
    start, finish = moved[edge], moved[edge + 1]
    nodes: List[Tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    for _ in range(_DIVISIONS):
        # Two positions, since an edge like an S is not off in its middle.
        along = [begin + (end - begin) * third / 3 for third in (1, 2)]
        parts = [
            project(
                points[edge]
                + share[:, None] * _shortest(points[edge + 1] - points[edge], full_turns[0])
            )
            for share in along
        ]
        off = np.maximum(*(_distance(part, start, finish, full_turns[1]) for part in parts))
        with np.errstate(invalid='ignore'):
            curved = np.isfinite(off) & (off > tolerance)
        if not curved.any():
            break
        edge, start, finish = edge[curved], start[curved], finish[curved]
        corners = [begin[curved], along[0][curved], along[1][curved], end[curved]]
        first, second = parts[0][curved], parts[1][curved]
        nodes += [(edge, corners[1], first), (edge, corners[2], second)]
        edge = np.tile(edge, 3)
        begin, end = np.concatenate(corners[:3]), np.concatenate(corners[1:])
        start = np.concatenate([start, first, second])
        finish = np.concatenate([first, second, finish])
    if nodes:
        edge, position, places = (np.concatenate(column) for column in zip(*nodes))
        order = np.lexsort((position, edge))
        moved = np.insert(moved, edge[order] + 1, places[order], 0)
        rings = rings + np.searchsorted(edge[order], rings)
    return shapely.from_ragged_array(kind, moved, (rings, owners))


def _may_curve(
    points: np.ndarray, moved: np.ndarray, edge: np.ndarray, full_turns: Tuple[float, float]
) -> np.ndarray:
    """Return distances (N,) that edges are not off by, so that short ones need no closer look.

    An arc of a parallel is off its chord by an eighth of length times angle times tan(latitude).
    The bound is at least eight times that, which also covers projections that are not conformal.
    """
    length = np.hypot(*(moved[edge + 1] - moved[edge]).T)
    if not any(full_turns):
        return np.full(len(edge), np.inf)
    # The CRS whose coordinates are angles. In a cylindrical projection x is an angle too, and y at
    # least the latitude or, in equal-area ones, nearly so.
    angles, full_turn = (points, full_turns[0]) if full_turns[0] else (moved, full_turns[1])
    to_radians = 2 * np.pi / full_turn
    angle = np.hypot(*(angles[edge + 1] - angles[edge]).T) * to_radians
    latitude = np.maximum(*np.abs(np.stack([angles[edge, 1], angles[edge + 1, 1]]))) * to_radians
    with np.errstate(invalid='ignore'):
        bound = length * angle * (1 + np.tan(latitude.clip(0, np.pi / 2 - 1e-9)))
    # A jump at the antimeridian, a whole turn, or an edge at a pole, which can have any length.
    return np.where((angle < 1) & (latitude < 1.5), bound, np.inf)


def _shortest(steps: np.ndarray, full_turn: float) -> np.ndarray:
    """Return differences (N, 2) the short way around the globe; those of a full turn stay."""
    turns = np.where(
        np.abs(np.abs(steps[:, 0]) - full_turn) > 1e-9 * full_turn,
        np.round(steps[:, 0] / (full_turn or 1)),
        0,
    )
    return steps - np.stack([full_turn * turns, 0 * turns], 1)


def _distance(
    points: np.ndarray, start: np.ndarray, finish: np.ndarray, full_turn: float
) -> np.ndarray:
    """Return the distances (N,) of points (N, 2) from segments; x may differ by full turns."""
    to_point, chord = (
        delta - np.stack([full_turn * np.round(delta[:, 0] / (full_turn or 1)), 0 * delta[:, 0]], 1)
        for delta in (points - start, finish - start)
    )
    square = (chord**2).sum(1)
    along = np.divide(
        (to_point * chord).sum(1), square, out=np.zeros(len(chord)), where=square > 0
    ).clip(0, 1)
    return np.hypot(*(to_point - along[:, None] * chord).T)
