"""A contact sheet: pairs of an image and the same image overlaid with its labels.

Two pairs stand in a row, with a common legend below. Images keep their aspect ratio, so the
heights of rows differ.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Optional, Sequence

import numpy as np

from . import tiles
from .preview import Tile, display, draw_tiles, legend_of, shorten, tile_size

# Samples in a row; a sample has two tiles.
_COLUMNS = 2
# In pixels.
_HEADER = 70


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
    rows = [sum(pairs[start : start + _COLUMNS], []) for start in range(0, len(pairs), _COLUMNS)]
    labels = [sample.labels for sample in samples if sample.labels is not None]
    entries, note = legend_of(labels, classes, colors) if labels else ([], '')
    return draw_tiles(rows, entries, title, (subtitle, note), _HEADER)


def _pair(sample: LabeledImage, palette: np.ndarray) -> List[Optional[Tile]]:
    """Return the tiles of a sample, of one size: the image, and the labels over it or None."""
    height, width = tile_size(sample.image.shape)
    image = display(sample.image, height, width)
    first = Tile(image, shorten(sample.name, 100))
    if sample.labels is None:
        return [first, None]
    if sample.labels.ndim != 2:
        raise ValueError(
            f'the labels of {sample.name or "a sample"} have shape '
            f'{sample.labels.shape}, expected (H, W)'
        )
    labels = tiles.resize(sample.labels, height, width, nearest=True)
    return [first, Tile(tiles.overlay(image, labels, palette))]
