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

_ROOFS: Sequence[Color] = ((.50, .28, .22), (.44, .44, .45), (.68, .66, .62), (.32, .41, .52),
                           (.40, .33, .29), (.25, .25, .27))
_ASPHALT: Sequence[Color] = ((.34, .34, .35), (.43, .42, .41), (.56, .54, .50))
_TRACKS: Sequence[Color] = ((.53, .45, .36), (.47, .41, .34))
_CARS: Sequence[Color] = ((.75, .75, .76), (.15, .15, .17), (.55, .16, .14), (.25, .30, .45))


def paint_roads(canvas: GroundCanvas, cuts: List[Segment], streets: List[Segment],
                paved: bool) -> None:
    """Paint grass strips and dirt tracks on parcel borders, streets in town, and a paved road.

    Paved roads exist only if ``paved`` is set. They cross water on a bridge; nothing else does.
    """
    rng, wear = canvas.rng, 1 + .05 * canvas.noise(12, 2)
    dry = canvas.mask != WATER
    open_land = dry & (canvas.mask != FOREST)
    for start, end, depth in cuts:
        line = np.array([start, end])
        if depth == 1 and rng.rand() < (.7 if paved else .2):
            _pave(canvas, line, rng.uniform(4, 6), ROAD, _TRACKS, wear, dry)
        elif depth > 1 and rng.rand() < (.3 if paved else .05):
            _pave(canvas, line, rng.uniform(2, 4), BACKGROUND, MEADOWS, wear, open_land)
    for start, end, depth in streets:
        _pave(canvas, np.array([start, end]), 9 if depth else 12, ROAD, _ASPHALT, wear, dry)
    for start, end, depth in cuts:
        if paved and (depth == 0 or (len(streets) > 8 and depth == 1)):
            line, width = np.array([start, end]), rng.uniform(10, 15)
            _pave(canvas, line, width, ROAD, _ASPHALT, wear, np.ones_like(dry))
            _add_traffic(canvas, line, width)


def _pave(canvas: GroundCanvas, line: np.ndarray, width: float, value: int, colors: Sequence[Color],
          wear: np.ndarray, where: np.ndarray) -> None:
    """Paint a straight strip through ``line`` (2, 2) on the pixels of ``where``."""
    strip = canvas.stroke(line, width) & where
    canvas.albedo[strip] = canvas.pick(colors) * wear[strip][:, None]
    canvas.mask[strip] = value
    canvas.height[strip] = 0


def _add_traffic(canvas: GroundCanvas, line: np.ndarray, width: float) -> None:
    """Add lane markings and cars to a road through ``line`` (2, 2); the class stays road."""
    rng = canvas.rng
    length = float(np.hypot(*(line[1] - line[0])))
    along = (line[1] - line[0]) / max(length, 1.)
    across = np.array([-along[1], along[0]])
    for dash in np.arange(0, length, 12):
        middle = line[0] + along * dash
        window, inside = canvas.fill(_rectangle(middle, along, 5, .6))
        canvas.albedo[window][inside] = .72
        if rng.rand() < .10:
            lane = across * (width / 4) * rng.choice([-1, 1])
            window, inside = canvas.fill(_rectangle(middle + lane, along, 8, 3.4))
            canvas.albedo[window][inside] = canvas.pick(_CARS)
            canvas.height[window][inside] = 2.


def _rectangle(center: np.ndarray, along: np.ndarray, length: float, width: float) -> np.ndarray:
    """Return the corners (4, 2) of a rectangle with its length along a unit vector."""
    u, v = along * length / 2, np.array([-along[1], along[0]]) * width / 2
    return np.stack([center - u - v, center + u - v, center + u + v, center - u + v])


def build_town(canvas: GroundCanvas, blocks: List[np.ndarray]) -> None:
    """Give every block a use: a park, large halls, or rows of houses in gardens."""
    rng = canvas.rng
    uses = [rng.choice(['park', 'halls', 'houses'], p=[.12, .23, .65]) for _ in blocks]
    for use, spacing in (('park', 9), ('houses', 22)):
        ground: np.ndarray = np.zeros(canvas.mask.shape, np.uint8)
        for block in (b for b, u in zip(blocks, uses) if u == use):
            window, inside = canvas.fill(block)
            ground[window] |= inside & (canvas.mask[window] == BACKGROUND)
        ground = cv2.erode(ground, np.ones((13, 13), np.uint8))
        plant_trees(canvas, ground.astype(bool), spacing, (3., 5.5))
    for block, use in zip(blocks, uses):
        if use == 'houses':
            _build_rows(canvas, block, 37, (21, 31), _ROOFS, gable=True)
        elif use == 'halls':
            _build_rows(canvas, block, 64, (44, 58), _ROOFS[1:4], gable=False)


def build_estate(canvas: GroundCanvas, block: np.ndarray) -> None:
    """Build rows of new houses on a block (N, 2), where nothing is in the way."""
    _build_rows(canvas, block, 34, (21, 31), _ROOFS, gable=True)


def _build_rows(canvas: GroundCanvas, block: np.ndarray, lot: float, size: Tuple[float, float],
                roofs: Sequence[Color], gable: bool) -> None:
    """Build on a grid of lots aligned with the block; ``lot`` and ``size`` are in pixels."""
    rng = canvas.rng
    along = longest_edge(block)
    across = np.array([-along[1], along[0]])
    us, vs = (np.arange(np.min(block @ axis) + lot * .6, np.max(block @ axis) - lot * .4, lot)
              for axis in (along, across))
    for u in us:
        for v in vs:
            if rng.rand() < .92:
                spot = along * (u + rng.randn()) + across * (v + rng.randn())
                length, width = rng.uniform(*size), rng.uniform(*size) * .8
                _build(canvas, _rectangle(spot, along, length, width), roofs, gable)


def build_farms(canvas: GroundCanvas, cuts: List[Segment], chance: float) -> None:
    """Build small groups of buildings along the older borders, where the tracks run."""
    rng = canvas.rng
    for start, end, depth in cuts:
        if depth > 2 or rng.rand() > chance:
            continue
        along = (end - start) / max(float(np.hypot(*(end - start))), 1.)
        away = np.array([-along[1], along[0]]) * rng.choice([-1, 1])
        site = start + (end - start) * rng.uniform(.15, .85) + away * 34
        for offset in np.arange(rng.randint(1, 4)) * 34.:
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
    canvas.albedo[window][inside] = color * (1 + .03 * rng.randn(int(inside.sum()), 1))
    canvas.mask[window][inside] = BUILDING
    canvas.height[window][inside] = rng.uniform(6, 11) if gable else rng.uniform(8, 16)
    ends = (corners[0] + corners[3]) / 2, (corners[1] + corners[2]) / 2
    if gable:
        # The half of the roof behind the ridge gets less light.
        half, shaded = canvas.fill(np.array([corners[0], corners[1], ends[1], ends[0]]))
        canvas.albedo[half][shaded] *= rng.uniform(.62, .85)
    elif rng.rand() < .6:
        # Technical equipment stands on the flat roof.
        spot = corners.mean(0) + rng.uniform(-6, 6, 2)
        plant, box = canvas.fill(_rectangle(spot, np.array([1., 0.]), 6, 4))
        canvas.albedo[plant][box] = .55
        canvas.height[plant][box] += 3
