"""What people build in the demo scenes: roads, towns and farms.

Buildings are skipped where they would stand on a road, in water or on another building, so roads
and water must be painted first. The canvas is painted in place.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

import cv2
import numpy as np

from .ground_canvas import (
    BACKGROUND,
    BUILDING,
    FOREST,
    ROAD,
    WATER,
    Color,
    GroundCanvas,
    Segment,
    longest_edge,
)
from .landscape import MEADOWS, plant_trees

_ROOFS: Sequence[Color] = (
    (0.50, 0.28, 0.22),
    (0.44, 0.44, 0.45),
    (0.68, 0.66, 0.62),
    (0.32, 0.41, 0.52),
    (0.40, 0.33, 0.29),
    (0.25, 0.25, 0.27),
)
_ASPHALT: Sequence[Color] = ((0.34, 0.34, 0.35), (0.43, 0.42, 0.41), (0.56, 0.54, 0.50))
_TRACKS: Sequence[Color] = ((0.53, 0.45, 0.36), (0.47, 0.41, 0.34))
_CARS: Sequence[Color] = (
    (0.75, 0.75, 0.76),
    (0.15, 0.15, 0.17),
    (0.55, 0.16, 0.14),
    (0.25, 0.30, 0.45),
)


def paint_roads(
    canvas: GroundCanvas, cuts: List[Segment], streets: List[Segment], paved: bool
) -> None:
    """Paint grass strips and dirt tracks on parcel borders, streets in town, and a paved road.

    Paved roads exist only if ``paved`` is set. They cross water on a bridge; nothing else does.
    """
    rng, wear = canvas.rng, 1 + 0.05 * canvas.noise(12, 2)
    dry = canvas.mask != WATER
    open_land = dry & (canvas.mask != FOREST)
    for start, end, depth in cuts:
        line = np.array([start, end])
        if depth == 1 and rng.rand() < (0.7 if paved else 0.2):
            _pave(canvas, line, rng.uniform(4, 6), ROAD, _TRACKS, wear, dry)
        elif depth > 1 and rng.rand() < (0.3 if paved else 0.05):
            _pave(canvas, line, rng.uniform(2, 4), BACKGROUND, MEADOWS, wear, open_land)
    for start, end, depth in streets:
        _pave(canvas, np.array([start, end]), 9 if depth else 12, ROAD, _ASPHALT, wear, dry)
    for start, end, depth in cuts:
        if paved and (depth == 0 or (len(streets) > 8 and depth == 1)):
            line, width = np.array([start, end]), rng.uniform(10, 15)
            _pave(canvas, line, width, ROAD, _ASPHALT, wear, np.ones_like(dry))
            _add_traffic(canvas, line, width)


def _pave(
    canvas: GroundCanvas,
    line: np.ndarray,
    width: float,
    value: int,
    colors: Sequence[Color],
    wear: np.ndarray,
    where: np.ndarray,
) -> None:
    """Paint a straight strip through ``line`` (2, 2) on the pixels of ``where``."""
    strip = canvas.stroke(line, width) & where
    canvas.albedo[strip] = canvas.pick(colors) * wear[strip][:, None]
    canvas.mask[strip] = value
    canvas.height[strip] = 0


def _add_traffic(canvas: GroundCanvas, line: np.ndarray, width: float) -> None:
    """Add lane markings and cars to a road through ``line`` (2, 2); the class stays road."""
    rng = canvas.rng
    length = float(np.hypot(*(line[1] - line[0])))
    along = (line[1] - line[0]) / max(length, 1.0)
    across = np.array([-along[1], along[0]])
    for dash in np.arange(0, length, 12):
        middle = line[0] + along * dash
        window, inside = canvas.fill(_rectangle(middle, along, 5, 0.6))
        canvas.albedo[window][inside] = 0.72
        if rng.rand() < 0.10:
            lane = across * (width / 4) * rng.choice([-1, 1])
            window, inside = canvas.fill(_rectangle(middle + lane, along, 8, 3.4))
            canvas.albedo[window][inside] = canvas.pick(_CARS)
            canvas.height[window][inside] = 2.0


def _rectangle(center: np.ndarray, along: np.ndarray, length: float, width: float) -> np.ndarray:
    """Return the corners (4, 2) of a rectangle with its length along a unit vector."""
    u, v = along * length / 2, np.array([-along[1], along[0]]) * width / 2
    return np.stack([center - u - v, center + u - v, center + u + v, center - u + v])


def build_town(canvas: GroundCanvas, blocks: List[np.ndarray]) -> None:
    """Give every block a use: a park, large halls, or rows of houses in gardens."""
    rng = canvas.rng
    uses = [rng.choice(['park', 'halls', 'houses'], p=[0.12, 0.23, 0.65]) for _ in blocks]
    for use, spacing in (('park', 9), ('houses', 22)):
        ground: np.ndarray = np.zeros(canvas.mask.shape, np.uint8)
        for block in (b for b, u in zip(blocks, uses) if u == use):
            window, inside = canvas.fill(block)
            ground[window] |= inside & (canvas.mask[window] == BACKGROUND)
        ground = cv2.erode(ground, np.ones((13, 13), np.uint8))
        plant_trees(canvas, ground.astype(bool), spacing, (3.0, 5.5))
    for block, use in zip(blocks, uses):
        if use == 'houses':
            _build_rows(canvas, block, 37, (21, 31), _ROOFS, gable=True)
        elif use == 'halls':
            _build_rows(canvas, block, 64, (44, 58), _ROOFS[1:4], gable=False)


def build_estate(canvas: GroundCanvas, block: np.ndarray) -> None:
    """Build rows of new houses on a block (N, 2), where nothing is in the way."""
    _build_rows(canvas, block, 34, (21, 31), _ROOFS, gable=True)


def _build_rows(
    canvas: GroundCanvas,
    block: np.ndarray,
    lot: float,
    size: Tuple[float, float],
    roofs: Sequence[Color],
    gable: bool,
) -> None:
    """Build on a grid of lots aligned with the block; ``lot`` and ``size`` are in pixels."""
    rng = canvas.rng
    along = longest_edge(block)
    across = np.array([-along[1], along[0]])
    us, vs = (
        np.arange(np.min(block @ axis) + lot * 0.6, np.max(block @ axis) - lot * 0.4, lot)
        for axis in (along, across)
    )
    for u in us:
        for v in vs:
            if rng.rand() < 0.92:
                spot = along * (u + rng.randn()) + across * (v + rng.randn())
                length, width = rng.uniform(*size), rng.uniform(*size) * 0.8
                _build(canvas, _rectangle(spot, along, length, width), roofs, gable)


def build_farms(canvas: GroundCanvas, cuts: List[Segment], chance: float) -> None:
    """Build small groups of buildings along the older borders, where the tracks run."""
    rng = canvas.rng
    for start, end, depth in cuts:
        if depth > 2 or rng.rand() > chance:
            continue
        along = (end - start) / max(float(np.hypot(*(end - start))), 1.0)
        away = np.array([-along[1], along[0]]) * rng.choice([-1, 1])
        site = start + (end - start) * rng.uniform(0.15, 0.85) + away * 34
        for offset in np.arange(rng.randint(1, 4)) * 34.0:
            center = site + along * offset + away * rng.uniform(-3, 8)
            size = rng.uniform(20, 38), rng.uniform(15, 21)
            _build(canvas, _rectangle(center, along, *size), _ROOFS, gable=True)


def _build(canvas: GroundCanvas, corners: np.ndarray, roofs: Sequence[Color], gable: bool) -> None:
    """Build on ``corners`` (4, 2), unless on a road, in water, on a building or off the canvas."""
    rng = canvas.rng
    if corners.min() < 1 or corners.max() > canvas.side - 2:
        return
    window, inside = canvas.fill(corners)
    if np.isin(canvas.mask[window][inside], (ROAD, WATER, BUILDING)).any():
        return
    color = canvas.pick(roofs)
    canvas.albedo[window][inside] = color * (1 + 0.03 * rng.randn(int(inside.sum()), 1))
    canvas.mask[window][inside] = BUILDING
    canvas.height[window][inside] = rng.uniform(6, 11) if gable else rng.uniform(8, 16)
    ends = (corners[0] + corners[3]) / 2, (corners[1] + corners[2]) / 2
    if gable:
        # The half of the roof behind the ridge gets less light.
        half, shaded = canvas.fill(np.array([corners[0], corners[1], ends[1], ends[0]]))
        canvas.albedo[half][shaded] *= rng.uniform(0.62, 0.85)
    elif rng.rand() < 0.6:
        # Technical equipment stands on the flat roof.
        spot = corners.mean(0) + rng.uniform(-6, 6, 2)
        plant, box = canvas.fill(_rectangle(spot, np.array([1.0, 0.0]), 6, 4))
        canvas.albedo[plant][box] = 0.55
        canvas.height[plant][box] += 3
