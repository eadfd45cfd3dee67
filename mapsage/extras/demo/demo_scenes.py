"""Synthetic aerial scenes with LoveDA's seven classes, drawn from a seed.

A scene is painted in the order in which land is laid out: first parcels, then forest and water by
terrain, then roads along parcel borders, then buildings along roads. Crowns and roofs have
heights, so that a single sun shades them and casts their shadows. Colors overlap between classes
on purpose (plowed soil and barren land, gray roofs and asphalt, meadow and young crops, ponds and
shaded forest), so that a model has to use texture and shape.

Randomness comes from ``np.random.RandomState``, whose stream NumPy has frozen (NEP 19). NumPy 1.24,
1.26 and 2.4 with OpenCV 4.11 and 5.0 gave the same bytes on one x86-64 machine (2026-11-21). Float
kernels may still round differently on another processor or version, so that a few pixels differ by
a gray level, or by a class at a border.
"""

from __future__ import annotations

from typing import NamedTuple

import cv2
import numpy as np

from .ground_canvas import BACKGROUND, NO_DATA, GroundCanvas, largest, photograph
from .landscape import SceneKind, paint_forest, paint_parcels, paint_water, plant_hedges
from .settlement import build_farms, build_town, paint_roads

# Pixels by which a scene is painted larger on each side before it is cropped, so that shadows and
# crowns of objects outside reach into it.
MARGIN = 32

# Half of the kinds consist mostly of one class. Real scenes are like that: a model learns little
# from most of their tiles. The values are the fields of SceneKind, in order.
SCENE_KINDS = {
    'plain': SceneKind(0.03, 0.00, 0.00, False, 0.02, 0.97, 60_000, 0.2),
    'town': SceneKind(0.06, 0.00, 0.75, True, 0.30, 0.70, 30_000, 1.0),
    'forest': SceneKind(0.93, 0.02, 0.00, False, 0.20, 0.70, 50_000, 0.2),
    'village': SceneKind(0.12, 0.03, 0.30, False, 0.15, 0.70, 28_000, 1.0),
    'lake': SceneKind(0.08, 0.82, 0.00, False, 0.40, 0.70, 50_000, 0.2),
    'river': SceneKind(0.20, 0.00, 0.15, True, 0.25, 0.75, 40_000, 0.8),
    'wasteland': SceneKind(0.05, 0.02, 0.00, False, 0.92, 0.40, 60_000, 0.2),
    'farmland': SceneKind(0.08, 0.02, 0.00, False, 0.12, 0.72, 32_000, 0.9),
}


class DemoScene(NamedTuple):
    """One scene: ``image`` is (H, W, 3) uint8 RGB, ``mask`` (H, W) uint8 with 0 = no data, 1..7."""

    image: np.ndarray
    mask: np.ndarray


def paint_ground(seed: int, kind: str, side: int) -> GroundCanvas:
    """Paint a square of land, before light and shadow are added.

    Args:
        seed: Seed of the ground, 0 .. 2**32 - 1.
        kind: A key of ``SCENE_KINDS``.
        side: Side in pixels; crowns and shadows are whole :data:`MARGIN` pixels from its edge.

    Raises:
        ValueError: If ``kind`` is unknown.
    """
    if kind not in SCENE_KINDS:
        raise ValueError(f'kind={kind!r} is not a scene kind; choose one of {sorted(SCENE_KINDS)}')
    spec = SCENE_KINDS[kind]
    canvas = GroundCanvas.blank(seed, side, BACKGROUND)
    town = largest(canvas.noise(canvas.side * 0.8, 2), spec.town)
    cuts, streets, blocks = paint_parcels(canvas, spec, town)
    relief = canvas.noise(canvas.side * 0.4, 5) - 3.0 * town
    paint_forest(canvas, largest(relief, spec.forest))
    paint_water(canvas, spec, -relief - 6.0 * town)
    plant_hedges(canvas, cuts, 0.35 * spec.settled)
    paint_roads(canvas, cuts, streets, paved=canvas.rng.rand() < spec.settled)
    build_town(canvas, blocks)
    build_farms(canvas, cuts, 0.6 * spec.settled)
    return canvas


def draw_scene(seed: int, kind: str, size: int = 640, no_data: bool = False) -> DemoScene:
    """Paint one scene.

    Args:
        seed: Seed of the scene, 0 .. 2**32 - 1.
        kind: A key of ``SCENE_KINDS``.
        size: Side of the square scene in pixels, at least 64.
        no_data: Whether a corner lies outside the flight strip; image and mask are 0 there.

    Raises:
        ValueError: If ``kind`` is unknown or ``size`` is below 64.
    """
    if size < 64:
        raise ValueError(f'size={size} is too small to lay out a scene; give 64 pixels or more')
    canvas = paint_ground(seed, kind, size + 2 * MARGIN)
    picture = photograph(canvas)
    crop = slice(MARGIN, MARGIN + size)
    image, mask = picture[crop, crop].copy(), canvas.mask[crop, crop].copy()
    if no_data:
        _cut_corner(canvas.rng, image, mask)
    return DemoScene(image, mask)


def _cut_corner(rng: np.random.RandomState, image: np.ndarray, mask: np.ndarray) -> None:
    """Blank one corner in place, as at the edge of a flight strip."""
    size = len(mask)
    x, y = (rng.uniform(0.15, 0.4, 2) * size).astype(np.int32).tolist()
    outside = np.zeros_like(mask)
    cv2.fillPoly(outside, [np.array([[0, 0], [x, 0], [0, y]], np.int32)], 1)
    outside = np.rot90(outside, rng.randint(4)).astype(bool)
    image[outside] = 0
    mask[outside] = NO_DATA
