"""Cut large images and their colored labels into tiles, a strip of rows at a time."""
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

_CACHE = 64  # MB; GDAL's own default is 5 % of the machine's memory, for each worker


class Size(NamedTuple):
    """Of an image, in pixels."""

    width: int
    height: int


def starts(length: int, size: int, stride: int) -> List[int]:
    """Where windows of ``size`` begin along ``length`` pixels; the last one is moved inside.

    A length below ``size`` gives the one window at 0, which is then padded.
    """
    regular = list(range(0, max(length - size, 0) + 1, stride))
    end = max(length - size, 0)
    return regular if regular[-1] == end else [*regular, end]


def image_size(path: Path, name: str) -> Size:
    """Width and height from the header; ``name`` is what an error calls the file."""
    with _opened(path, name) as image:
        return Size(image.width, image.height)


def read_strips(path: Path, name: str, height: int, stride: int) -> Iterator[np.ndarray]:
    """Strips of rows, at ``starts(image height, height, stride)``, uint8 RGB (rows, width, 3).

    Rows that two strips share are decoded once: a PNG cannot be entered in the middle. One band is
    repeated (gray images), a color table is applied, a fourth band (alpha) is dropped.

    Raises:
        PrepareError: If the file cannot be decoded, or is not 8-bit with 1, 3 or 4 bands.
    """
    with rasterio.Env(GDAL_CACHEMAX=_CACHE), _opened(path, name) as image:
        if image.count not in (1, 3, 4) or image.dtypes[0] != 'uint8':
            raise PrepareError(f'{name} has {image.count} band(s) of {image.dtypes[0]}, expected '
                               '1, 3 or 4 of uint8; is it the file of the delivery?')
        table = _color_table(image)
        bands = [1, 1, 1] if image.count == 1 else [1, 2, 3]
        done, kept = 0, np.zeros((0, image.width, 3), np.uint8)
        for top in starts(image.height, height, stride):
            bottom = min(top + height, image.height)
            try:
                rows = image.read(bands, window=Window(0, done, image.width, bottom - done))
            except RasterioIOError as error:
                raise PrepareError(f'{name}: rows {done} to {bottom - 1} cannot be decoded '
                                   f'({error}); the file is damaged, fetch it again') from error
            rows = rows.transpose(1, 2, 0)
            if table is not None:
                rows = table[rows[..., 0]]
            kept = np.concatenate([kept[len(kept) - (done - top):], rows])
            done = bottom
            yield kept


class ColorClasses:
    """Class values of label colors.

    Args:
        values: RGB color to mask value.
        other: The value of any other color, or None: another color is an error.
    """

    def __init__(self, values: Dict[Color, int], other: int = -1) -> None:
        codes = {(r << 16) + (g << 8) + b: value for (r, g, b), value in values.items()}
        self._codes = np.array(sorted(codes), np.uint32)
        self._values = np.array([codes[c] for c in sorted(codes)], np.uint8)
        self._other = other
        self._known = values

    def read(self, colors: np.ndarray, name: str, top: int) -> Tuple[np.ndarray, np.ndarray]:
        """Classes (H, W) uint8 of RGB colors (H, W, 3), and where the color was another, bool.

        ``top`` is the row of the image at which ``colors`` begins, ``name`` the file's name.

        Raises:
            PrepareError: With file, pixel and color, if another color is an error.
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
                'with --ignore-other-colors')
        mask[unknown] = self._other
        return mask, unknown


def encode_png(pixels: np.ndarray, side: int, padding: int) -> bytes:
    """PNG of a tile, uint8 (H, W) or RGB (H, W, 3), padded right and below to ``side`` pixels."""
    below, right = side - pixels.shape[0], side - pixels.shape[1]
    if below or right:
        widths = ((0, below), (0, right), (0, 0))[:pixels.ndim]
        pixels = np.pad(pixels, widths, constant_values=padding)
    bgr = pixels[..., ::-1] if pixels.ndim == 3 else pixels
    return bytes(cv2.imencode('.png', np.ascontiguousarray(bgr))[1])


def _opened(path: Path, name: str) -> rasterio.DatasetReader:
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', NotGeoreferencedWarning)  # nor are the tiles
        try:
            return rasterio.open(str(path))
        except RasterioIOError as error:
            raise PrepareError(f'{name} cannot be decoded ({error}); the file is damaged, fetch it '
                               'again') from error


def _color_table(image: rasterio.DatasetReader) -> Optional[np.ndarray]:
    """Colors of a palette image, uint8 (256, 3); None for others."""
    try:
        entries = image.colormap(1)
    except ValueError:  # rasterio's word for none
        return None
    table = np.zeros((256, 3), np.uint8)
    for value, color in entries.items():
        table[value] = color[:3]
    return table
