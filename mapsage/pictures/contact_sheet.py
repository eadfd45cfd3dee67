"""A contact sheet: pairs of an image and the same image overlaid with its labels.

Two pairs stand in a row, with a common legend below. Images keep their aspect ratio, so the
heights of rows differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence, Set, Tuple

import numpy as np

from . import tiles
from .canvas import FAINT, Canvas
from .preview import MAX_STORED_SIDE, TILE_WIDTH, legend_column, legend_of, shorten, tile_size

# Samples in a row; a sample has two tiles.
_COLUMNS = 2
# In pixels.
_MARGIN, _GAP, _CAPTION, _HEADER, _LEGEND_LINE = 28, 14, 26, 70, 26


@dataclass(frozen=True)
class LabeledImage:
    """One sample of a sheet.

    Attributes:
        image: Image, ``(H, W)`` or ``(H, W, B)`` of any numeric dtype, with bands in RGB order.
        labels: Labels, integers ``(H, W)``; None without labels. Labels that are not a class, such
            as the ignore index, are hatched.
        name: Caption.
    """

    image: np.ndarray
    labels: Optional[np.ndarray] = None
    name: str = ''


def render_contact_sheet(
    samples: Sequence[LabeledImage],
    classes: Sequence[str],
    palette: Optional[Sequence[Sequence[int]]] = None,
    title: str = '',
    subtitle: str = '',
) -> np.ndarray:
    """Draw samples, two per row, with a legend of their classes.

    Args:
        samples: Samples; their sizes may differ.
        classes: Class names in the order of the labels; may be empty if no sample has labels.
        palette: RGB triples of 0..255 in the order of the labels; missing colors are added.
        title: First line.
        subtitle: Second line.

    Returns:
        Picture, RGB uint8 ``(H, W, 3)``.

    Raises:
        ValueError: If there is no sample, or an array has a wrong shape.
    """
    if not samples:
        raise ValueError('a sheet of 0 samples was requested, expected at least one')
    colors = tiles.class_palette(len(classes), palette)
    pairs = [_pair(sample, colors) for sample in samples]
    rows = [pairs[start : start + _COLUMNS] for start in range(0, len(pairs), _COLUMNS)]
    labels: Set[int] = set()
    for sample in samples:
        if sample.labels is not None:
            labels.update(np.unique(sample.labels).tolist())
    entries, note = legend_of(labels, classes, colors) if labels else ([], '')
    columns = min(_COLUMNS, len(samples)) * 2
    width = 2 * _MARGIN + columns * TILE_WIDTH + (columns - 1) * _GAP
    per_line = max(1, (width - 2 * _MARGIN) // legend_column(entries)) if entries else 1
    heights = [max(pair[0].shape[0] for pair in row) + _CAPTION for row in rows]
    legend = -(-len(entries) // per_line) * _LEGEND_LINE
    canvas = Canvas(width, _HEADER + sum(heights) + legend + _MARGIN + _MARGIN // 2)
    canvas.text(_MARGIN, 30, title, size=15, weight='bold')
    canvas.text(_MARGIN, 54, '   '.join(filter(None, (subtitle, note))), size=11, color=FAINT)
    top = _HEADER
    for number, (row, height) in enumerate(zip(rows, heights)):
        for column, pair in enumerate(row):
            left = _MARGIN + 2 * column * (TILE_WIDTH + _GAP)
            for index, tile in enumerate(pair):
                canvas.picture(left + index * (TILE_WIDTH + _GAP), top, tile)
            name = samples[number * _COLUMNS + column].name
            canvas.text(left, top + pair[0].shape[0] + 16, shorten(name, 100), 9, color=FAINT)
        top += height
    if entries:
        canvas.legend(
            _MARGIN, top + _MARGIN // 2, entries, per_line, legend_column(entries), _LEGEND_LINE
        )
    return canvas.pixels()


def _pair(sample: LabeledImage, palette: np.ndarray) -> Tuple[np.ndarray, ...]:
    """Return the tiles of a sample, of one size: the image, and the labels over it."""
    height, width = tile_size(sample.image.shape)
    image = tiles.resize(
        tiles.display_rgb(tiles.shrink(sample.image, MAX_STORED_SIDE, False)),
        height,
        width,
        nearest=False,
    )
    pair: List[np.ndarray] = [image]
    if sample.labels is not None:
        if sample.labels.ndim != 2:
            raise ValueError(
                f'the labels of {sample.name or "a sample"} have shape '
                f'{sample.labels.shape}, expected (H, W)'
            )
        pair.append(
            tiles.overlay(image, tiles.resize(sample.labels, height, width, nearest=True), palette)
        )
    return tuple(pair)
