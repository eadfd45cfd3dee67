"""The ground of the demo scenes: parcels, forest and trees, water.

The functions paint on a `GroundCanvas` in place and later ones paint over earlier ones, so
`demo_scenes.py` decides by the order of the calls what lies on top.
"""

from __future__ import annotations

import math
from typing import List, NamedTuple, Sequence, Tuple

import cv2
import numpy as np

from .ground_canvas import (
    AGRICULTURAL,
    BACKGROUND,
    BARREN,
    FOREST,
    WATER,
    Color,
    GroundCanvas,
    Segment,
    divide,
    largest,
    longest_edge,
)

_CROPS: Sequence[Color] = (
    (0.28, 0.38, 0.20),
    (0.17, 0.29, 0.17),
    (0.56, 0.50, 0.36),
    (0.40, 0.33, 0.27),
    (0.46, 0.44, 0.26),
    (0.31, 0.28, 0.26),
    (0.36, 0.38, 0.25),
)
MEADOWS: Sequence[Color] = ((0.31, 0.37, 0.23), (0.38, 0.40, 0.27), (0.24, 0.32, 0.19))
_BARREN: Sequence[Color] = (
    (0.54, 0.47, 0.38),
    (0.48, 0.41, 0.34),
    (0.44, 0.36, 0.30),
    (0.56, 0.53, 0.48),
)
_WATERS: Sequence[Color] = (
    (0.09, 0.15, 0.18),
    (0.15, 0.21, 0.18),
    (0.20, 0.25, 0.21),
    (0.27, 0.28, 0.23),
)
_YARDS: Sequence[Color] = ((0.45, 0.43, 0.40), (0.33, 0.37, 0.26), (0.39, 0.38, 0.32))


class SceneKind(NamedTuple):
    """Composition of a scene.

    Attributes:
        forest: Share of the area, 0..1.
        lake: Share of the area, 0..1.
        town: Share of the area, 0..1.
        river: Whether a river crosses the scene.
        barren: Share of the parcels outside town that are bare.
        crops: Share of the other parcels that are tilled; the rest is meadow.
        parcel_area: Typical area of a parcel in square pixels.
        settled: Probability (0..1) of a paved road; a farm at an old border is less probable.
    """

    forest: float
    lake: float
    town: float
    river: bool
    barren: float
    crops: float
    parcel_area: float
    settled: float


def paint_parcels(
    canvas: GroundCanvas, kind: SceneKind, town: np.ndarray
) -> Tuple[List[Segment], List[Segment], List[np.ndarray]]:
    """Cover the scene with fields, meadows, barren lots and town blocks.

    Args:
        canvas: Blank canvas.
        kind: Composition of the scene.
        town: Region in which parcels become town blocks, bool (H, W).

    Returns:
        The cuts between parcels, the streets, and the blocks (N, 2) left for buildings.
    """
    rng, side = canvas.rng, canvas.side
    square = np.array([[0, 0], [side, 0], [side, side], [0, side]], np.float64)
    cuts: List[Segment] = []
    streets: List[Segment] = []
    blocks: List[np.ndarray] = []
    mottle, fine = canvas.noise(90), canvas.noise(5, 2)
    angle = rng.uniform(0, math.pi)
    for parcel in divide(rng, square, kind.parcel_area, angle, cuts):
        x, y = parcel.mean(0).round().astype(int).clip(0, side - 1)
        if town[y, x]:
            for block in divide(rng, parcel, 11_000, angle, streets):
                blocks.append(block)
                _paint_parcel(canvas, block, BACKGROUND, _YARDS, mottle, fine)
            continue
        value, colors = BACKGROUND, MEADOWS
        draw = rng.rand()
        if draw < kind.barren:
            value, colors = BARREN, _BARREN
        elif draw < kind.barren + kind.crops * (1 - kind.barren):
            value, colors = AGRICULTURAL, _CROPS
        _paint_parcel(canvas, parcel, value, colors, mottle, fine)
    for start, end, depth in cuts:
        x, y = ((start + end) / 2).round().astype(int).clip(0, side - 1)
        if depth and town[y, x]:
            streets.append((start, end, 0))
    return cuts, streets, blocks


def _paint_parcel(
    canvas: GroundCanvas,
    polygon: np.ndarray,
    value: int,
    colors: Sequence[Color],
    mottle: np.ndarray,
    fine: np.ndarray,
) -> None:
    """Paint a parcel: color, patches, fine grain, and rows along its long side if tilled."""
    rng = canvas.rng
    window, inside = canvas.fill(polygon)
    patches = mottle[window] if rng.rand() < 0.5 else -mottle[window]
    rough = {AGRICULTURAL: 0.03, BACKGROUND: 0.08, BARREN: 0.10}[value]
    shade = 1 + rng.uniform(0.04, 0.10) * patches + rough * fine[window]
    if value == AGRICULTURAL:
        along = longest_edge(polygon)
        across = np.array([-along[1], along[0]])
        ys, xs = np.mgrid[window]
        distance = xs * across[0] + ys * across[1] + 0.6 * patches
        rows = np.sin(2 * math.pi / rng.uniform(3.2, 8.0) * distance)
        tramlines = np.cos(2 * math.pi / rng.uniform(24, 48) * distance) > 0.97
        shade += rng.uniform(0.04, 0.13) * rows - 0.10 * tramlines
    color = canvas.pick(colors) * shade[..., None]
    if value == BARREN:
        # Some spots are green: weeds.
        green = (patches + fine[window] > 1.6)[..., None]
        color = np.where(green, color * np.array([0.72, 0.85, 0.70]), color)
    canvas.mask[window][inside] = value
    canvas.albedo[window][inside] = color[inside]


def paint_forest(canvas: GroundCanvas, region: np.ndarray) -> None:
    """Paint dark undergrowth with a canopy of crowns on it."""
    canvas.mask[region] = FOREST
    canvas.albedo[region] = canvas.pick(((0.10, 0.15, 0.09), (0.16, 0.17, 0.11)))
    plant_trees(canvas, region, spacing=canvas.rng.uniform(8, 12), radius=(4.0, 8.0))


def plant_trees(
    canvas: GroundCanvas, region: np.ndarray, spacing: float, radius: Tuple[float, float]
) -> None:
    """Plant round crowns of class forest, centered inside ``region`` on a jittered grid.

    ``spacing`` and ``radius`` (smallest, largest) are in pixels.
    """
    rng, side = canvas.rng, canvas.side
    grid = np.mgrid[0:side:spacing, 0:side:spacing].reshape(2, -1)
    ys, xs = (grid + rng.uniform(0, spacing, grid.shape)).clip(0, side - 1).astype(int)
    chosen = region[ys, xs] & (rng.rand(len(ys)) < 0.9)
    ys, xs = ys[chosen], xs[chosen]
    if not len(ys):
        return
    seeds = np.ones((side, side), np.uint8)
    seeds[ys, xs] = 0
    distance, label = cv2.distanceTransformWithLabels(
        seeds, cv2.DIST_L2, 5, labelType=cv2.DIST_LABEL_PIXEL
    )
    count = int(label.max()) + 1
    reach = rng.uniform(*radius, count).astype(np.float32)[label]
    dome = reach**2 - (distance + 0.7 * canvas.noise(4, 1)) ** 2
    crown = dome > 0
    green = canvas.pick(((0.11, 0.22, 0.12), (0.16, 0.27, 0.14), (0.21, 0.29, 0.17)))
    tint = green * (1 + 0.16 * rng.randn(count, 1)) * (1 + 0.06 * rng.randn(count, 3))
    leaves = 1 + 0.12 * canvas.noise(3, 1)[crown][:, None]
    canvas.albedo[crown] = (tint[label[crown]] * leaves).clip(0.02, 0.9)
    canvas.height[crown] = np.sqrt(dome[crown]) + 2.0
    canvas.mask[crown] = FOREST


def plant_hedges(canvas: GroundCanvas, cuts: List[Segment], chance: float) -> None:
    """Plant single trees and short rows along parcel borders, none of them in water."""
    lines = np.zeros(canvas.mask.shape, np.uint8)
    for start, end, _ in cuts:
        first, last = np.sort(canvas.rng.rand(2))
        if canvas.rng.rand() < chance:
            hedge = np.array([start + (end - start) * t for t in (first, last)])
            lines |= canvas.stroke(hedge, 14).astype(np.uint8)
    plant_trees(canvas, lines.astype(bool) & (canvas.mask != WATER), 10, (2.5, 5.5))


def paint_water(canvas: GroundCanvas, kind: SceneKind, depth: np.ndarray) -> None:
    """Paint a lake where ``depth`` is largest and a river, with muddy or grassy banks."""
    rng, side = canvas.rng, canvas.side
    water = largest(depth, kind.lake)
    if kind.river:
        t = np.linspace(-0.1, 1.1, 60)
        bend = rng.uniform(0.03, 0.08) * np.sin(
            2 * math.pi * (rng.uniform(0.8, 1.6) * t + rng.rand())
        )
        course = np.stack(
            [t, rng.uniform(0.25, 0.75) + rng.uniform(-0.3, 0.3) * (t - 0.5) + bend], 1
        )
        course = (course if rng.rand() < 0.5 else course[:, ::-1]) * side
        distance = cv2.distanceTransform(
            (~canvas.stroke(course, 1)).astype(np.uint8), cv2.DIST_L2, 5
        )
        water |= distance < rng.uniform(14, 34) + 3 * canvas.noise(70)
    if not water.any():
        return
    bank = cv2.dilate(water.astype(np.uint8), np.ones((9, 9), np.uint8)).astype(bool) & ~water
    muddy = bank & (canvas.noise(120) > -0.2)
    for region, value, colors in (
        (bank, BACKGROUND, MEADOWS),
        (muddy, BARREN, _BARREN),
        (water, WATER, _WATERS),
    ):
        canvas.mask[region] = value
        canvas.height[region] = 0
        texture = 0.02 * canvas.noise(7, 2) + 0.06 * canvas.noise(250, 2)
        canvas.albedo[region] = canvas.pick(colors) * (1 + texture[region][:, None])


def fell(canvas: GroundCanvas, region: np.ndarray) -> None:
    """Fell the forest inside ``region``, bool (H, W): bare ground is left, with tracks in it."""
    cleared = region & (canvas.mask == FOREST)
    rows = np.sin(canvas.noise(60, 2) * 20)
    shade = 1 + 0.10 * canvas.noise(6, 3) + 0.06 * rows
    canvas.albedo[cleared] = (canvas.pick(_BARREN) * shade[..., None])[cleared].clip(0.02, 0.95)
    canvas.mask[cleared] = BARREN
    canvas.height[cleared] = 0


def flood(canvas: GroundCanvas, region: np.ndarray) -> None:
    """Flood the open land inside ``region``, bool (H, W); crowns and buildings stay dry."""
    wet = region & np.isin(canvas.mask, (BACKGROUND, BARREN, AGRICULTURAL)) & (canvas.height < 1)
    texture = 0.02 * canvas.noise(7, 2) + 0.06 * canvas.noise(250, 2)
    canvas.albedo[wet] = (canvas.pick(_WATERS) * (1 + texture[..., None]))[wet]
    canvas.mask[wet] = WATER
    canvas.height[wet] = 0


def change_season(canvas: GroundCanvas) -> None:
    """Give the tilled fields other colors, in wide patches; their class stays the same."""
    fields = canvas.mask == AGRICULTURAL
    brightness = 1 + 0.20 * canvas.noise(180, 2)
    for band in range(3):
        tint = (brightness + 0.08 * canvas.noise(180, 2)).clip(0.5, 1.6)
        canvas.albedo[..., band][fields] *= tint[fields]
    np.clip(canvas.albedo, 0.02, 0.95, out=canvas.albedo)
