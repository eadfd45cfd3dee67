"""Ground wider than one scene of the demo: sheets under one sun, with roads where they meet.

The sheets are painted one by one, because a canvas takes 150 bytes a pixel. A winding road along
their borders hides that the fields of two sheets do not continue in each other.

Shapes:
    bands      (4, H, W) float32 in 0..255: red, green, blue, near infrared
    mask       (H, W) uint8, classes 1..7 as in `DemoScene`
    ys, xs     (rows, 1) and (1, columns) pixel coordinates, which broadcast to a sheet
"""

from __future__ import annotations

import math
from typing import Iterator, List, NamedTuple, Sequence, Tuple

import numpy as np

from .demo_scenes import MARGIN, paint_ground
from .ground_canvas import ROAD, WATER, photograph

# Largest side of a sheet in pixels.
_SHEET = 2000
_KINDS = ('river', 'village', 'farmland', 'lake', 'river', 'town', 'forest')
# Pixels by which the border of two sheets, with its road, leaves the straight line.
_SWAY = 24
# Half the width in pixels of the road along a border.
_ROAD = 7
_ASPHALT = (104, 102, 101)


class WideGround(NamedTuple):
    """Ground: ``bands`` is (4, H, W) float32 in 0..255, red, green, blue, near infrared; ``mask``
    (H, W) uint8 with 1..7, as in ``DemoScene``."""

    bands: np.ndarray
    mask: np.ndarray


def draw_ground(seed: int, width: int, height: int) -> WideGround:
    """Paint ground of any size, at the 0.5 m a pixel of the demo's scenes.

    Args:
        seed: Seed of the ground, 0 .. 2**31 - 1.
        width: Width in pixels.
        height: Height in pixels.
    """
    image = np.zeros((height, width, 3), np.uint8)
    mask = np.zeros((height, width), np.uint8)
    rows, columns = _divide_side(height), _divide_side(width)
    side = math.ceil(max(height / len(rows), width / len(columns))) + 2 * (_SWAY + MARGIN)
    number = 0
    for top, bottom in rows:
        for left, right in columns:
            picture, classes = _draw_sheet(seed, number, max(side, 64 + 2 * MARGIN))
            number += 1
            y0, y1 = max(top - _SWAY, 0), min(bottom + _SWAY, height)
            x0, x1 = max(left - _SWAY, 0), min(right + _SWAY, width)
            ys, xs = np.arange(y0, y1)[:, None], np.arange(x0, x1)[None]
            to_border = np.minimum(
                *(
                    np.minimum(*_distances_to_borders(along, across, ends, total))
                    for along, across, ends, total in (
                        (ys, xs, (top, bottom), height),
                        (xs, ys, (left, right), width),
                    )
                )
            )
            inside = to_border > -_ROAD
            road = inside & (to_border < _ROAD)
            window = np.s_[y0:y1, x0:x1]
            image[window][inside] = picture[: y1 - y0, : x1 - x0][inside]
            mask[window][inside] = classes[: y1 - y0, : x1 - x0][inside]
            grain = (xs * 7919 + ys * 104729) % 13 - 6
            image[window][road] = (np.array(_ASPHALT) + grain[road][:, None]).astype(np.uint8)
            mask[window][road] = ROAD
    colors = image.transpose(2, 0, 1).astype(np.float32)
    return WideGround(np.concatenate([colors, _near_infrared(colors, mask)[None]]), mask)


def _divide_side(size: int) -> List[Tuple[int, int]]:
    """Return (start, end) in pixels of each sheet along a side, with the end excluded."""
    ends = np.linspace(0, size, math.ceil(size / _SHEET) + 1).round().astype(int).tolist()
    return list(zip(ends[:-1], ends[1:]))


def _draw_sheet(seed: int, number: int, side: int) -> Tuple[np.ndarray, np.ndarray]:
    """Return the picture of a sheet, uint8 (H, W, 3), and its classes, without the margin."""
    canvas = paint_ground((seed * 1009 + number) % 2**32, _KINDS[number % len(_KINDS)], side)
    # The same generator state for all sheets gives them the same sun and camera.
    canvas.rng = np.random.RandomState(seed % 2**32)
    crop = np.s_[MARGIN:-MARGIN, MARGIN:-MARGIN]
    return photograph(canvas)[crop], canvas.mask[crop]


def _distances_to_borders(
    along: np.ndarray, across: np.ndarray, ends: Sequence[int], total: int
) -> Iterator[np.ndarray]:
    """Yield the distance of each pixel to the first border of a sheet, then to the second one.

    The distance is in pixels, and positive inside the sheet. The edge of the ground does not count
    as a border: all pixels are ``total`` away from it.

    Args:
        along: Coordinates of the pixels in the direction from the first border to the second.
        across: Coordinates of the pixels in the other direction.
        ends: Positions of the two borders.
        total: Size of the ground in the direction of ``along``.
    """
    for end, sign in zip(ends, (1, -1)):
        line = end + (_SWAY - _ROAD) * np.sin(across / 140.0 + end)
        yield (
            sign * (along - line)
            if 0 < end < total
            else np.full(np.broadcast(along, across).shape, float(total))
        )


def _near_infrared(colors: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Return a near-infrared band: green plants reflect near infrared, and water absorbs it.

    Args:
        colors: Red, green and blue, float32 (3, H, W) in 0..255.
        mask: Classes, uint8 (H, W).
    """
    total = colors.sum(0) + 1
    green = (2 * colors[1] - colors[0] - colors[2]) / total
    band = total / 3 * (0.9 + 4 * green.clip(0, 0.3))
    band[mask == WATER] *= 0.3
    return band.clip(1, 255)
