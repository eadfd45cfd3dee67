"""The canvas of the demo scenes: planes, noise, land division and sunlight.

Coordinates are in pixels, points are (x, y). One pixel stands for about 0.5 m. All randomness comes
from the canvas's generator, so the order of the calls determines the picture.

Shapes:
    mask           (H, W) uint8, class values as LoveDA stores them
    albedo         (H, W, 3) float32, reflectance in RGB, 0..1
    height         (H, W) float32, pixels above ground
    polygon        (N, 2) corners x, y
    photograph     (H, W, 3) uint8 RGB
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import List, Sequence, Tuple

import cv2
import numpy as np

# Mask values as LoveDA stores them; reduce_zero_label turns them into 255, 0..6.
NO_DATA, BACKGROUND, BUILDING, ROAD, WATER, BARREN, FOREST, AGRICULTURAL = range(8)

Color = Tuple[float, float, float]
"""Reflectance, RGB in 0..1."""

Segment = Tuple[np.ndarray, np.ndarray, int]
"""A cut between parcels: both ends, and its depth in the recursion of `divide` (0 is oldest)."""


@dataclass
class GroundCanvas:
    """A scene that is being painted.

    Attributes:
        rng: Generator of all random numbers of the scene.
        mask: Class values, uint8 (H, W).
        albedo: Reflectance, float32 (H, W, 3), RGB in 0..1.
        height: Height above ground in pixels, float32 (H, W).
    """

    rng: np.random.RandomState
    mask: np.ndarray
    albedo: np.ndarray
    height: np.ndarray

    @classmethod
    def blank(cls, seed: int, side: int, value: int) -> GroundCanvas:
        """Return a square canvas with one class everywhere."""
        return cls(
            rng=np.random.RandomState(seed),
            mask=np.full((side, side), value, np.uint8),
            albedo=np.zeros((side, side, 3), np.float32),
            height=np.zeros((side, side), np.float32),
        )

    @property
    def side(self) -> int:
        """Height and width in pixels."""
        return self.mask.shape[0]

    def pick(self, colors: Sequence[Color], spread: float = 0.05) -> np.ndarray:
        """Return one of the colors, with small changes of brightness and hue, float32 (3,)."""
        color = np.array(colors[self.rng.randint(len(colors))])
        color = color * (1 + spread * self.rng.randn()) + 0.3 * spread * self.rng.randn(3)
        return color.clip(0.02, 0.95).astype(np.float32)

    def noise(self, cell: float, octaves: int = 3) -> np.ndarray:
        """Return smooth noise, float32 (H, W), mean 0, variance 1, features up to ``cell`` wide."""
        total = np.zeros((self.side, self.side), np.float32)
        for octave in range(octaves):
            nodes = max(3, math.ceil(self.side * 2**octave / cell) + 1)
            grid = self.rng.randn(nodes, nodes).astype(np.float32)
            shape = (self.side, self.side)
            total += cv2.resize(grid, shape, interpolation=cv2.INTER_CUBIC) * np.float32(
                0.5**octave
            )
        return (total - total.mean()) / max(float(total.std()), 1e-6)

    def fill(self, polygon: np.ndarray) -> Tuple[Tuple[slice, slice], np.ndarray]:
        """Return the bounding window of a polygon (N, 2) and the bool mask within the window."""
        points = np.round(polygon).astype(np.int32)
        low = points.min(0).clip(0, self.side - 1)
        high = points.max(0).clip(0, self.side - 1) + 1
        inside = np.zeros((high[1] - low[1], high[0] - low[0]), np.uint8)
        cv2.fillPoly(inside, [points - low], 1)
        return (slice(low[1], high[1]), slice(low[0], high[0])), inside.astype(bool)

    def stroke(self, points: np.ndarray, width: float) -> np.ndarray:
        """Return the pixels of a line through points (N, 2), bool (H, W)."""
        line = np.zeros(self.mask.shape, np.uint8)
        cv2.polylines(line, [np.round(points).astype(np.int32)], False, 1, max(1, round(width)))
        return line.astype(bool)


def largest(field: np.ndarray, share: float) -> np.ndarray:
    """Return the ``share`` (0..1) of pixels where the field is largest, bool (H, W)."""
    if share <= 0:
        return np.zeros(field.shape, bool)
    return field > np.quantile(field, 1 - share)


def longest_edge(polygon: np.ndarray) -> np.ndarray:
    """Return the unit vector (2,) along the longest edge of a polygon (N, 2)."""
    edges = np.roll(polygon, -1, 0) - polygon
    along = edges[np.argmax((edges**2).sum(1))]
    return along / np.hypot(*along)


def _cut_polygon(
    polygon: np.ndarray, normal: np.ndarray, offset: float
) -> Tuple[List[np.ndarray], List[np.ndarray]]:
    """Cut a convex polygon (N, 2) along ``p @ normal == offset``; return both point lists."""
    side = polygon @ normal - offset
    halves: Tuple[List[np.ndarray], List[np.ndarray]] = ([], [])
    for i, j in zip(range(len(polygon)), [*range(1, len(polygon)), 0]):
        halves[int(side[i] < 0)].append(polygon[i])
        if (side[i] < 0) != (side[j] < 0):
            crossing = polygon[i] + (polygon[j] - polygon[i]) * side[i] / (side[i] - side[j])
            halves[0].append(crossing)
            halves[1].append(crossing)
    return halves


def divide(
    rng: np.random.RandomState,
    polygon: np.ndarray,
    area: float,
    angle: float,
    cuts: List[Segment],
    depth: int = 0,
) -> List[np.ndarray]:
    """Halve a convex polygon (N, 2) across its longer side until the pieces are about ``area``.

    Inheritance and streets divide land in this way: the borders are nearly parallel, and younger
    ones end at older ones. ``angle`` (radians) is the direction of the borders. The cuts are
    appended to ``cuts``, oldest first.
    """
    if cv2.contourArea(polygon.astype(np.float32)) < area * rng.uniform(0.7, 1.9):
        return [polygon]
    axes = np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    lengths = np.ptp(polygon @ axes.T, axis=0)
    direction = angle + (math.pi / 2 if lengths[0] > lengths[1] else 0.0) + 0.04 * rng.randn()
    normal = np.array([-math.sin(direction), math.cos(direction)])
    offsets = polygon @ normal
    offset = offsets.min() + np.ptp(offsets) * rng.uniform(0.36, 0.64)
    halves = _cut_polygon(polygon, normal, offset)
    ends = [p for p in halves[0] if abs(p @ normal - offset) < 1e-6]
    if len(ends) < 2 or min(map(len, halves)) < 3:
        return [polygon]
    cuts.append((ends[0], ends[-1], depth))
    return [
        leaf
        for half in halves
        for leaf in divide(rng, np.array(half), area, angle, cuts, depth + 1)
    ]


def _shadows(height: np.ndarray, sun: np.ndarray, slope: float) -> np.ndarray:
    """Return how much of the sunlight an object blocks at each pixel, float32 (H, W) in 0..1.

    Args:
        height: Height above ground in pixels, (H, W).
        sun: Unit vector (x, y) toward the sun.
        slope: Tangent of the sun's elevation.
    """
    shadow = np.zeros(height.shape, np.float32)
    for step in range(1, math.ceil(float(height.max()) / slope) + 1):
        shift = np.round(-sun * step).astype(int)
        blocker = np.roll(height, (shift[1], shift[0]), (0, 1)) - step * slope
        np.maximum(shadow, blocker > height + 0.3, out=shadow)
    return cv2.GaussianBlur(shadow, (0, 0), 0.7)


def photograph(canvas: GroundCanvas) -> np.ndarray:
    """Light the canvas and return its picture, RGB uint8 (H, W, 3).

    A single sun shades slopes and casts shadows, which bluish skylight fills. Uneven illumination,
    haze, the camera's color cast, optical blur and sensor noise are added.
    """
    rng = canvas.rng
    azimuth, slope = rng.uniform(0, 2 * math.pi), rng.uniform(0.8, 1.5)
    sun = np.array([math.cos(azimuth), math.sin(azimuth)])
    smooth = cv2.GaussianBlur(canvas.height, (0, 0), 0.8)
    gradient_y, gradient_x = np.gradient(smooth)
    facing = 1 - 0.35 * (gradient_x * sun[0] + gradient_y * sun[1])
    facing = facing.clip(0.45, 1.5).astype(np.float32)
    direct = facing * (1 - _shadows(canvas.height, sun, slope))
    sky = np.array([0.26, 0.30, 0.36], np.float32)
    light = direct[..., None] * np.array([0.86, 0.82, 0.74], np.float32) + sky
    light *= (1 + 0.07 * canvas.noise(400, 2))[..., None]
    camera = rng.uniform(0.85, 1.25) * rng.uniform(0.94, 1.06, 3)
    haze = rng.uniform(0.0, 0.10)
    picture = canvas.albedo * light * (camera * (1 - haze)).astype(np.float32)
    picture += haze * np.array([0.62, 0.66, 0.72], np.float32)
    picture = cv2.GaussianBlur(picture, (0, 0), rng.uniform(0.5, 0.8))
    grain = rng.randn(*picture.shape).astype(np.float32)
    # Noise that all bands share.
    grain += rng.randn(*picture.shape[:2], 1).astype(np.float32)
    picture += np.float32(rng.uniform(0.008, 0.016)) * grain
    # The value 0 is reserved for no data.
    return (picture * 255).round().clip(1, 255).astype(np.uint8)
