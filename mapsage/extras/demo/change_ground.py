"""Ground at two dates: houses are built, forest is felled, low land is flooded.

Both pictures show the same ground under another sun, another camera and other crops, which is no
change. The pictures lie exactly on each other.
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import numpy as np

from .demo_scenes import MARGIN, paint_ground
from .ground_canvas import FOREST, GroundCanvas, largest, photograph
from .landscape import change_season, fell, flood
from .settlement import build_estate

# Kinds of scenes in which something can be built, felled and flooded.
CHANGE_KINDS = ('village', 'forest', 'river', 'farmland', 'wasteland', 'lake')


class ChangedGround(NamedTuple):
    """Ground at two dates.

    Attributes:
        before, after: Pictures, (H, W, 3) uint8 RGB.
        mask_before, mask_after: Classes, (H, W) uint8, 1..7 as in ``DemoScene``.
    """

    before: np.ndarray
    after: np.ndarray
    mask_before: np.ndarray
    mask_after: np.ndarray


def draw_change(seed: int, kind: str, size: int = 640) -> ChangedGround:
    """Paint a scene at two dates.

    Args:
        seed: Seed of the scene, 0 .. 2**31 - 1.
        kind: One of :data:`CHANGE_KINDS`, or another key of ``SCENE_KINDS``.
        size: Side of the scene in pixels, at least 128.

    Raises:
        ValueError: If ``kind`` is unknown.
    """
    first = paint_ground(seed, kind, size + 2 * MARGIN)
    second = copy.deepcopy(first)
    second.rng = np.random.RandomState(seed + 2**31)
    change_season(second)
    _change(second)
    crop = np.s_[MARGIN : MARGIN + size, MARGIN : MARGIN + size]
    return ChangedGround(
        photograph(first)[crop], photograph(second)[crop], first.mask[crop], second.mask[crop]
    )


def _change(canvas: GroundCanvas) -> None:
    """Build, fell and flood at a few sites each; about a tenth of the land changes."""
    rng, side = canvas.rng, canvas.side
    # Felled sites have smooth borders; each is a hill of a field of noise.
    fell(
        canvas,
        largest(
            canvas.noise(side * 0.3, 2), 0.25 if (canvas.mask == FOREST).mean() < 0.5 else 0.12
        ),
    )
    flood(canvas, largest(canvas.noise(side * 0.5, 3), 0.10))
    for _ in range(rng.randint(2, 5)):
        center = rng.uniform(0.1, 0.9, 2) * side
        length, width = rng.uniform(80, 190, 2)
        angle = rng.uniform(0, np.pi)
        along = np.array([np.cos(angle), np.sin(angle)])
        across = np.array([-along[1], along[0]])
        build_estate(
            canvas,
            np.stack(
                [
                    center + u * length / 2 * along + v * width / 2 * across
                    for u, v in ((-1, -1), (1, -1), (1, 1), (-1, 1))
                ]
            ),
        )
