"""Cut large images and their colored labels into tiles, a strip of rows at a time.

Strips bound the memory: an image of 6000 x 6000 pixels is never in memory as a whole. A label's
colors are turned into class values here, by `ColorClasses`.

Shapes:
    strip     (rows, width, 3) uint8 RGB; only the last strip of an image may have fewer rows
    mask      (rows, width) uint8 class values
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Dict, Iterator, List, NamedTuple, Optional, Tuple

import cv2
import numpy as np
import rasterio
from rasterio.errors import NotGeoreferencedWarning, RasterioIOError
from rasterio.windows import Window

from .source_files import PrepareError

Color = Tuple[int, int, int]

# MB for each worker. GDAL's default is 5 % of the machine's memory, also for each worker.
_CACHE = 64


class Size(NamedTuple):
    """Size of an image in pixels."""

    width: int
    height: int


def starts(length: int, size: int, stride: int) -> List[int]:
    """Return the first pixels of windows of ``size`` that cover ``length`` pixels.

    The last window is moved so that it ends with the image. A length below ``size`` gives a single
    window at 0, which the caller has to pad.
    """
    regular = list(range(0, max(length - size, 0) + 1, stride))
    end = max(length - size, 0)
    return regular if regular[-1] == end else [*regular, end]


def image_size(path: Path, name: str) -> Size:
    """Return the size in the header of a file; an error calls the file ``name``."""
    with _opened(path, name) as image:
        return Size(image.width, image.height)


def read_strips(path: Path, name: str, height: int, stride: int) -> Iterator[np.ndarray]:
    """Yield strips at ``starts(image height, height, stride)``, uint8 RGB (rows, width, 3).

    Rows that two strips share are decoded once. Going back would be slow, because a PNG can only
    be decoded from its beginning. The band of a gray image is repeated, a color table is applied,
    and a fourth band (alpha) is dropped.

    Raises:
        PrepareError: If the file cannot be decoded, or is not 8-bit with 1, 3 or 4 bands.
    """
    with rasterio.Env(GDAL_CACHEMAX=_CACHE), _opened(path, name) as image:
        if image.count not in (1, 3, 4) or image.dtypes[0] != 'uint8':
            raise PrepareError(
                f'{name} has {image.count} band(s) of {image.dtypes[0]}, expected '
                '1, 3 or 4 of uint8; is it the file of the delivery?'
            )
        table = _color_table(image)
        bands = [1, 1, 1] if image.count == 1 else [1, 2, 3]
        done, strip = 0, np.zeros((0, image.width, 3), np.uint8)
        for top in starts(image.height, height, stride):
            bottom = min(top + height, image.height)
            try:
                rows = image.read(bands, window=Window(0, done, image.width, bottom - done))
            except RasterioIOError as error:
                raise PrepareError(
                    f'{name}: rows {done} to {bottom - 1} cannot be decoded '
                    f'({error}); the file is damaged, fetch it again'
                ) from error
            rows = rows.transpose(1, 2, 0)
            if table is not None:
                rows = table[rows[..., 0]]
            strip = np.concatenate([strip[len(strip) - (done - top) :], rows])
            done = bottom
            yield strip


class ColorClasses:
    """Lookup of the class values of label colors.

    Args:
        values: Mask value of each RGB color.
        other: Mask value of any other color. If it is negative, any other color is an error.
    """

    def __init__(self, values: Dict[Color, int], other: int = -1) -> None:
        codes = {(r << 16) + (g << 8) + b: value for (r, g, b), value in values.items()}
        self._codes = np.array(sorted(codes), np.uint32)
        self._values = np.array([codes[c] for c in sorted(codes)], np.uint8)
        self._other = other
        self._known = values

    def read(self, colors: np.ndarray, name: str, top: int) -> Tuple[np.ndarray, np.ndarray]:
        """Return the classes of label colors.

        Args:
            colors: RGB colors, uint8 (H, W, 3).
            name: Name of the file, for an error.
            top: Row of the image at which ``colors`` begins, for an error.

        Returns:
            Classes, uint8 (H, W), and which pixels have an unknown color, bool (H, W).

        Raises:
            PrepareError: If a color is unknown and ``other`` is negative; the message gives file,
                pixel and color.
        """
        code = colors.astype(np.uint32) @ np.array([1 << 16, 1 << 8, 1], np.uint32)
        index = np.searchsorted(self._codes, code).clip(0, len(self._codes) - 1)
        mask, unknown = self._values[index], self._codes[index] != code
        if not unknown.any():
            return mask, unknown
        if self._other < 0:
            row, column = np.argwhere(unknown)[0].tolist()
            raise PrepareError(
                f'{name}: pixel (column {column}, row {top + row}) has the color '
                f'{tuple(colors[row, column].tolist())} (R, G, B), which is no class '
                f'({int(unknown.sum())} such pixels in rows {top} to {top + len(mask) - 1}); '
                f'expected one of {sorted(self._known)}. Correct the file, or ignore such pixels '
                'with --ignore-other-colors'
            )
        mask[unknown] = self._other
        return mask, unknown


def encode_png(pixels: np.ndarray, side: int, padding: int) -> bytes:
    """Encode a tile, uint8 (H, W) or RGB (H, W, 3), padded right and below to ``side`` pixels."""
    below, right = side - pixels.shape[0], side - pixels.shape[1]
    if below or right:
        widths = ((0, below), (0, right), (0, 0))[: pixels.ndim]
        pixels = np.pad(pixels, widths, constant_values=padding)
    bgr = pixels[..., ::-1] if pixels.ndim == 3 else pixels
    return bytes(cv2.imencode('.png', np.ascontiguousarray(bgr))[1])


def _opened(path: Path, name: str) -> rasterio.DatasetReader:
    with warnings.catch_warnings():
        # Tiles have no coordinates, so the image need not have any.
        warnings.simplefilter('ignore', NotGeoreferencedWarning)
        try:
            return rasterio.open(str(path))
        except RasterioIOError as error:
            raise PrepareError(
                f'{name} cannot be decoded ({error}); the file is damaged, fetch it again'
            ) from error


def _color_table(image: rasterio.DatasetReader) -> Optional[np.ndarray]:
    """Return the colors of a palette image, uint8 (256, 3); None for other images."""
    try:
        entries = image.colormap(1)
    # The way in which rasterio reports that there is no color table.
    except ValueError:
        return None
    table = np.zeros((256, 3), np.uint8)
    for value, color in entries.items():
        table[value] = color[:3]
    return table
