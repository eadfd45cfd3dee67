"""Preview of a whole map: the scene on the left, the map on the right, and a legend with shares.

The scene is read in blocks and reduced by averaging, so memory does not grow with its size.
"""

from __future__ import annotations

from typing import Callable, Optional, Sequence, Tuple

import numpy as np

from mapsage.geo import Raster, RasterBlockError

from . import tiles
from .canvas import Canvas, Legend, save_png
from .preview import FULL_LEGEND

# All in pixels. _SIDE is the longer side of the two pictures, _READ the approximate side of a block
# that is read at a time.
_SIDE = 780
_READ = 1024
_MARGIN, _GAP, _HEADER = 28, 16, 92


def thumbnail(
    raster: Raster, factor: int, meets: Optional[Callable[..., bool]] = None
) -> np.ndarray:
    """Return a scene reduced by averaging, block by block. Unreadable blocks are NaN.

    A remote scene is read from its overviews instead, so that it is not downloaded a second time.
    Overviews may have been reduced with another method than averaging.

    Args:
        raster: Scene to reduce.
        factor: Number of scene pixels per pixel of the result, along each axis.
        meets: Function (column, row, width, height) -> whether a block is read; None for all
            blocks.

    Returns:
        Reduced scene, float32 ``(height, width, bands)``, sizes rounded up; NaN without data.
    """
    if raster.is_remote and meets is None:
        try:
            values, valid = raster.read_reduced(factor)
            return np.where(valid, values, np.nan).transpose(1, 2, 0).astype(np.float32)
        except RasterBlockError:
            # Read block by block below, without the blocks that cannot be read.
            pass
    # Smaller blocks follow the outline of an area more closely, so less outside of it is read.
    step = max(1, (_READ if meets is None else _READ // 4) // factor) * factor
    rows, columns = -(-raster.height // factor), -(-raster.width // factor)
    small = np.full((rows, columns, len(raster.bands)), np.nan, np.float32)
    for row in range(0, raster.height, step):
        for column in range(0, raster.width, step):
            width = min(step, -(-(raster.width - column) // factor) * factor)
            height = min(step, -(-(raster.height - row) // factor) * factor)
            if meets is not None and not meets(column, row, width, height):
                continue
            try:
                values, valid = raster.read(column, row, width, height)
            except RasterBlockError:
                continue
            small[
                row // factor : (row + height) // factor,
                column // factor : (column + width) // factor,
            ] = _average(values, valid, factor)
    return small


def shrink_labels(labels: np.ndarray, row: int, factor: int) -> np.ndarray:
    """Return every ``factor``-th pixel of a strip of labels that starts at ``row`` of its map."""
    return labels[-row % factor :: factor, ::factor]


def save_map_preview(
    path: str,
    raster: Raster,
    scene: np.ndarray,
    labels: np.ndarray,
    title: str,
    names: Sequence[str],
    palette: np.ndarray,
    shares: Sequence[float],
    no_data: int,
) -> None:
    """Draw the scene next to its map and write the picture to ``path`` atomically.

    Args:
        path: Path of the PNG file.
        raster: Scene of the map.
        scene: The scene, reduced by :func:`thumbnail`.
        labels: Map, reduced by :func:`shrink_labels` with the same factor.
        title: First line.
        names: Class names.
        palette: Colors of the classes, RGB uint8 ``(classes, 3)``.
        shares: Shares of the classes among the pixels with data, 0 to 1.
        no_data: Label of pixels without data.

    Raises:
        OSError: If the file cannot be written.
    """
    pictures = [_fit(_to_rgb(scene), False), tiles.color_labels(_fit(labels, True), palette)]
    entries = [
        (f'{name}  {100 * share:.1f} %', np.tile(palette[index], (18, 18, 1)))
        for index, (name, share) in enumerate(zip(names, shares))
        if share > 0 or len(names) <= FULL_LEGEND
    ]
    if (labels == no_data).any():
        entries.append(('no data', tiles.hatch(18, 18)))
    save_png(path, _draw(pictures, entries, title, _subtitle(raster)))


def _average(values: np.ndarray, valid: np.ndarray, factor: int) -> np.ndarray:
    bands, height, width = values.shape
    blocks = (height // factor, factor, width // factor, factor)
    # The last block may extend beyond the scene; valid is False there.
    count = valid.reshape(blocks).sum((1, 3), dtype=np.float32)
    total = np.stack(
        [np.where(valid, band, 0).reshape(blocks).sum((1, 3), dtype=np.float64) for band in values],
        axis=-1,
    )
    return np.where(count[..., None] > 0, total / np.maximum(count, 1)[..., None], np.nan).astype(
        np.float32
    )


def _to_rgb(scene: np.ndarray) -> np.ndarray:
    """Return a thumbnail as RGB uint8; values that fit into 8 bits are not stretched."""
    finite = scene[np.isfinite(scene)]
    is_bytes = finite.size == 0 or (finite.min() >= 0 and finite.max() <= 255 and finite.max() > 1)
    if is_bytes:
        scene = np.nan_to_num(scene).astype(np.uint8)
    return tiles.display_rgb(scene)


def _fit(array: np.ndarray, nearest: bool) -> np.ndarray:
    scale = _SIDE / max(array.shape[:2])
    height, width = (max(1, round(side * scale)) for side in array.shape[:2])
    return tiles.resize(array, height, width, nearest)


def _subtitle(raster: Raster) -> str:
    size = f'{raster.width} x {raster.height} pixels'
    if raster.crs is None or not raster.is_georeferenced:
        return f'{size}, without georeference'
    unit = 'degrees' if raster.crs.is_geographic else raster.crs.linear_units
    return f'{size} of {abs(raster.transform.a):.6g} {unit}, {raster.crs.to_string()[:60]}'


def _draw(
    pictures: Sequence[np.ndarray],
    entries: Sequence[Tuple[str, np.ndarray]],
    title: str,
    subtitle: str,
) -> np.ndarray:
    height, width = pictures[0].shape[:2]
    inner = max(2 * width + _GAP, 480)
    legend = Legend(entries, inner)
    bottom = _HEADER + height + _MARGIN
    canvas = Canvas(inner + 2 * _MARGIN, bottom + _MARGIN + legend.height)
    canvas.heading(_MARGIN, 34, title, subtitle)
    for number, (name, picture) in enumerate(zip(('Scene', 'Map'), pictures)):
        left = _MARGIN + number * (width + _GAP)
        canvas.text(left, _HEADER - 8, name, 11, 'bold')
        canvas.picture(left, _HEADER, picture)
    legend.draw(canvas, _MARGIN, bottom)
    return canvas.pixels()
