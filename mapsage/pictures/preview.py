"""The preview picture: rows of image, truth, prediction and disagreement, with a legend.

Samples of two dates have two images, before and after.

:func:`render_preview` is pure (arrays in, one uint8 RGB array out); :func:`save_preview` writes
the picture atomically, so no reader sees an incomplete file. Label maps are resized once, by
selecting pixels, so that the picture shows no label that the model did not predict.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Iterable, List, Optional, Sequence, Tuple

import numpy as np

from . import tiles
from .canvas import FAINT, Canvas, Legend, save_png

# In pixels. Four columns of tiles are about 1900 wide, which fits the screen of a laptop.
TILE_WIDTH = 450
MAX_TILE_HEIGHT = 600
MAX_STORED_SIDE = 1024
_MARGIN, _GAP, _CAPTION, _HEADER = 28, 14, 26, 84
# With more classes, the legend lists only the classes in the picture.
FULL_LEGEND = 24


@dataclass(frozen=True)
class PreviewSample:
    """One row of the preview.

    Attributes:
        image: Image, ``(H, W)`` or ``(H, W, B)`` of any numeric dtype, with bands in RGB order.
        prediction: Predicted labels, integers ``(H', W')``.
        truth: True labels, integers ``(H', W')``; None for a test set without labels. Labels that
            are not a class, such as the ignore index, are drawn as no data.
        name: Caption, usually the file name of the image.
        after: Image of the second date, as ``image``; None for samples of one date. The samples of
            a picture have all one date or all two.
    """

    image: np.ndarray
    prediction: np.ndarray
    truth: Optional[np.ndarray] = None
    name: str = ''
    after: Optional[np.ndarray] = None


@dataclass(frozen=True)
class Tile:
    """A picture, RGB uint8 ``(H, W, 3)``, with a text below it."""

    pixels: np.ndarray
    caption: str = ''


def render_preview(
    samples: Sequence[PreviewSample],
    classes: Sequence[str],
    palette: Optional[Sequence[Sequence[int]]] = None,
    title: str = '',
    subtitle: str = '',
    labels: str = 'Prediction',
) -> np.ndarray:
    """Draw the preview.

    Args:
        samples: Samples, one per row; their sizes may differ.
        classes: Class names in the order of the labels, any number.
        palette: RGB triples of 0..255 in the order of the labels; missing colors are added, always
            the same ones.
        title: First line, such as the name of the experiment.
        subtitle: Second line, such as iteration and mIoU.
        labels: Title of the column of ``prediction``, which may show other labels.

    Returns:
        Picture, RGB uint8 ``(H, W, 3)``.

    Raises:
        ValueError: If there is no sample, a class list is empty, an array has a wrong shape, or
            some samples have one date and others two.
    """
    if not samples:
        raise ValueError('a preview of 0 samples was requested, expected at least one')
    if not classes:
        raise ValueError('a preview needs class names, got none; set METAINFO of the dataset')
    colors = tiles.class_palette(len(classes), palette)
    with_truth = any(sample.truth is not None for sample in samples)
    dates = {1 if sample.after is None else 2 for sample in samples}
    if len(dates) > 1:
        raise ValueError(
            'some samples of a preview have one date and others two, expected the '
            'same number; draw them as two pictures'
        )
    rows = [_row(sample, colors, with_truth) for sample in samples]
    entries, note = _legend_entries(samples, classes, colors)
    columns = ['Before', 'After'] if dates == {2} else ['Image']
    columns += ['Truth', labels, 'Disagreement'] if with_truth else [labels]
    return draw_tiles(rows, entries, title, (subtitle, note), _HEADER, columns)


def save_preview(
    path: str,
    samples: Sequence[PreviewSample],
    classes: Sequence[str],
    palette: Optional[Sequence[Sequence[int]]] = None,
    title: str = '',
    subtitle: str = '',
    labels: str = 'Prediction',
) -> None:
    """Draw the preview and write it to ``path`` atomically, replacing the previous one.

    Args:
        path: Path of the PNG file; its folder is created.
        samples, classes, palette, title, subtitle, labels: Arguments of :func:`render_preview`.

    Raises:
        ValueError: As in :func:`render_preview`.
        OSError: If the folder cannot be written.
    """
    save_png(path, render_preview(samples, classes, palette, title, subtitle, labels))


def _row(sample: PreviewSample, palette: np.ndarray, with_truth: bool) -> List[Tile]:
    """Return the tiles of one sample; all have the same size."""
    if sample.prediction.ndim != 2 or sample.prediction.size == 0:
        raise ValueError(
            f'the prediction of {sample.name or "a sample"} has shape '
            f'{sample.prediction.shape}, expected (H, W) labels'
        )
    height, width = tile_size(sample.prediction.shape)
    images = [
        display(image, height, width) for image in (sample.image, sample.after) if image is not None
    ]
    prediction = tiles.resize(sample.prediction, height, width, nearest=True)
    pictures = [
        Tile(image, shorten(sample.name) if number == 0 else '')
        for number, image in enumerate(images)
    ]
    labels = Tile(tiles.color_labels(prediction, palette))
    if not with_truth:
        return [*pictures, labels]
    if sample.truth is None:
        blank = np.full_like(images[0], 238)
        return [*pictures, Tile(blank, 'no truth'), labels, Tile(blank)]
    if sample.truth.ndim != 2:
        raise ValueError(
            f'the truth of {sample.name or "a sample"} has shape '
            f'{sample.truth.shape}, expected (H, W) labels'
        )
    truth = tiles.resize(sample.truth, height, width, nearest=True)
    wrong = tiles.disagreement(images[-1], truth, prediction, len(palette))
    return [
        *pictures,
        Tile(tiles.color_labels(truth, palette)),
        labels,
        Tile(wrong, _accuracy(sample, len(palette))),
    ]


def tile_size(shape: Tuple[int, ...]) -> Tuple[int, int]:
    """Return height and width in pixels of the tile for an image of this shape."""
    height, width = shape[:2]
    scale = min(TILE_WIDTH / width, MAX_TILE_HEIGHT / height)
    return max(1, round(height * scale)), max(1, round(width * scale))


def display(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return an image, ``(H, W)`` or ``(H, W, B)`` of any numeric dtype, as a tile of this size."""
    small = tiles.shrink(image, MAX_STORED_SIDE, False)
    return tiles.resize(tiles.display_rgb(small), height, width, nearest=False)


def _accuracy(sample: PreviewSample, num_classes: int) -> str:
    assert sample.truth is not None
    height, width = sample.prediction.shape
    truth = tiles.resize(sample.truth, height, width, nearest=True)
    labeled = tiles.is_class(truth, num_classes)
    if not labeled.any():
        return 'no labeled pixel'
    accuracy = float((truth == sample.prediction)[labeled].mean())
    return f'{100 * accuracy:.1f} % of labeled pixels right'


def _legend_entries(
    samples: Sequence[PreviewSample], classes: Sequence[str], palette: np.ndarray
) -> Tuple[List[Tuple[str, np.ndarray]], str]:
    """Return (name, 18x18 swatch) pairs, and a note if the list was shortened."""
    label_maps = [
        label_map
        for sample in samples
        for label_map in (sample.truth, sample.prediction)
        if label_map is not None
    ]
    entries, note = legend_of(label_maps, classes, palette)
    if any(sample.truth is not None for sample in samples):
        entries.append(('wrong pixel', np.full((18, 18, 3), tiles.WRONG, dtype=np.uint8)))
    return entries, note


def legend_of(
    label_maps: Iterable[np.ndarray], classes: Sequence[str], palette: np.ndarray
) -> Tuple[List[Tuple[str, np.ndarray]], str]:
    """Return (name, 18x18 swatch) pairs for label maps, and a note if the list was shortened.

    Args:
        label_maps: Labels in the picture, integers of any shape.
        classes: Class names in the order of the labels.
        palette: Colors of the classes, RGB uint8 ``(num_classes, 3)``.
    """
    labels = {int(label) for label_map in label_maps for label in np.unique(label_map)}
    shown = [
        index for index in range(len(classes)) if len(classes) <= FULL_LEGEND or index in labels
    ]
    entries = [(str(classes[index]), np.tile(palette[index], (18, 18, 1))) for index in shown]
    outside = sorted(label for label in labels if not 0 <= label < len(classes))
    if outside:
        values = ', '.join(str(label) for label in outside[:4])
        entries.append(
            (f'no data ({values}{", ..." if len(outside) > 4 else ""})', tiles.hatch(18, 18))
        )
    note = (
        ''
        if len(shown) == len(classes)
        else f'{len(shown)} of {len(classes)} classes in this picture'
    )
    return entries, note


def draw_tiles(
    rows: Sequence[Sequence[Optional[Tile]]],
    entries: Sequence[Tuple[str, np.ndarray]],
    title: str,
    subtitles: Iterable[str],
    header: int,
    column_titles: Sequence[str] = (),
) -> np.ndarray:
    """Draw tiles in rows, with a legend below them.

    The tiles are not resampled: label maps were resized once already.

    Args:
        rows: Tiles from left to right, ``TILE_WIDTH`` wide; None leaves the column empty.
        entries: Names and swatches of the legend.
        title: First line.
        subtitles: Phrases of the second line.
        header: Rows above the tiles, in pixels.
        column_titles: Titles of the columns.
    """
    columns = max(map(len, rows))
    width = columns * (TILE_WIDTH + _GAP) - _GAP
    legend = Legend(entries, width)
    heights = [max(tile.pixels.shape[0] for tile in row if tile) + _CAPTION for row in rows]
    bottom = header + sum(heights) + _MARGIN // 2
    canvas = Canvas(width + 2 * _MARGIN, bottom + legend.height + _MARGIN)
    canvas.heading(_MARGIN, 30, title, '   '.join(filter(None, subtitles)))
    lefts = [_MARGIN + column * (TILE_WIDTH + _GAP) for column in range(columns)]
    for left, name in zip(lefts, column_titles):
        canvas.text(left, header - 6, name, 11, 'bold')
    top = header
    for row, height in zip(rows, heights):
        for left, tile in zip(lefts, row):
            if tile is not None:
                canvas.picture(left, top, tile.pixels)
                canvas.text(left, top + tile.pixels.shape[0] + 16, tile.caption, 9, color=FAINT)
        top += height
    legend.draw(canvas, _MARGIN, bottom)
    return canvas.pixels()


def shorten(name: str, limit: int = 58) -> str:
    """Return the end of a long caption, because file names usually differ there."""
    return name if len(name) <= limit else '...' + name[3 - limit :]
