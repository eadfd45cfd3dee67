"""A picture of label maps that were drawn from a model, with the reward of each.

A row is a tile: its image, its true labels, the model's most likely labels, and some drawn maps in
the order of their rewards. It shows what a reward prefers, which its mean does not.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence

import numpy as np

from mapsage.pictures import tiles
from mapsage.pictures.canvas import FAINT, Canvas, Legend
from mapsage.pictures.preview import legend_of, shorten

# In pixels.
_SIDE, _MARGIN, _GAP, _HEADER, _LINE = 192, 28, 14, 70, 15
_HEADINGS = ('image', 'truth', 'most likely')


@dataclass(frozen=True)
class RewardedTile:
    """A tile with label maps that were drawn for it.

    Attributes:
        image: Image, ``(H, W, B)`` of any numeric dtype, with bands in RGB order.
        truth: True labels, integers ``(H, W)``.
        likely: Most likely labels, integers ``(H, W)``.
        maps: Drawn label maps, integers ``(G, H, W)``.
        rewards: Reward of each drawn map and function, ``(G, K)``.
        totals: Weighted sum of the rewards of each drawn map, ``(G,)``.
        batch: Number of the scored batch that the tile belongs to, from 1.
        name: Caption.
    """

    image: np.ndarray
    truth: np.ndarray
    likely: np.ndarray
    maps: np.ndarray
    rewards: np.ndarray
    totals: np.ndarray
    batch: int
    name: str = ''


def render_reward_sheet(
    rewarded: Sequence[RewardedTile],
    reward_names: Sequence[str],
    classes: Sequence[str],
    palette: Optional[Sequence[Sequence[int]]] = None,
) -> np.ndarray:
    """Draw tiles, one per row, with their drawn maps from the smallest reward to the largest.

    Args:
        rewarded: Tiles with equally many drawn maps.
        reward_names: Names of the K reward functions.
        classes: Class names in the order of the labels.
        palette: RGB triples of 0..255 in the order of the labels; missing colors are added.

    Returns:
        Picture, RGB uint8 ``(H, W, 3)``.

    Raises:
        ValueError: If there is no tile.
    """
    if not rewarded:
        raise ValueError('a sheet of 0 tiles was requested, expected at least one')
    colors = tiles.class_palette(max(len(classes), 1), palette)
    label_maps = [
        label_map for tile in rewarded for label_map in (tile.truth, tile.likely, tile.maps)
    ]
    entries, note = legend_of(label_maps, classes, colors)
    columns = len(_HEADINGS) + len(rewarded[0].maps)
    width = columns * (_SIDE + _GAP) - _GAP
    row = _SIDE + _LINE * (len(reward_names) + 2) + _GAP
    legend = Legend(entries, width)
    bottom = _HEADER + row * len(rewarded)
    canvas = Canvas(width + 2 * _MARGIN, bottom + legend.height + _MARGIN)
    order = 'from the smallest reward of a tile to the largest; the model moves toward the right'
    canvas.heading(
        _MARGIN,
        30,
        'Label maps drawn from the model, by their reward',
        f'{order}   {note}' if note else order,
    )
    for number, tile in enumerate(rewarded):
        _draw_row(canvas, _HEADER + number * row, tile, reward_names, colors)
    legend.draw(canvas, _MARGIN, bottom)
    return canvas.pixels()


def _draw_row(
    canvas: Canvas, top: int, tile: RewardedTile, reward_names: Sequence[str], colors: np.ndarray
) -> None:
    image = tiles.resize(tiles.display_rgb(tile.image), _SIDE, _SIDE, nearest=False)
    order = np.argsort(tile.totals, kind='stable')
    label_maps: List[np.ndarray] = [tile.truth, tile.likely, *tile.maps[order]]
    pictures = [image] + [
        tiles.overlay(image, tiles.resize(labels, _SIDE, _SIDE, nearest=True), colors)
        for labels in label_maps
    ]
    for column, picture in enumerate(pictures):
        left = _MARGIN + column * (_SIDE + _GAP)
        canvas.picture(left, top, picture)
        drawn = column - len(_HEADINGS)
        heading = _HEADINGS[column] if drawn < 0 else f'reward {tile.totals[order[drawn]]:.3f}'
        canvas.text(left, top + _SIDE + _LINE, heading, 10)
        if drawn >= 0:
            for line, (name, value) in enumerate(zip(reward_names, tile.rewards[order[drawn]])):
                canvas.text(
                    left,
                    top + _SIDE + _LINE * (line + 2),
                    f'{shorten(name, 18)} {value:.3f}',
                    9,
                    color=FAINT,
                )
    caption = shorten(f'batch {tile.batch}  {tile.name}', 80)
    canvas.text(_MARGIN, top + _SIDE + 2 * _LINE, caption, 9, color=FAINT)
