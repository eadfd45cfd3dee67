"""The inputs of a prediction: images and scenes, read as the model's test pipeline reads them."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, List, Sequence, Tuple, Union

import mmcv
import numpy as np
from PIL import Image

from mapsage.geo import GeoError, Raster, RasterBlockError

from .errors import PredictError
from .model import Bands

Box = Tuple[int, int, int, int]  # column, row, width, height in pixels

_PICTURES = ('.png', '.jpg', '.jpeg', '.bmp')
# What is taken from a folder. A file that is named is opened whatever its name ends in.
SUFFIXES = _PICTURES + ('.tif', '.tiff', '.jp2', '.vrt')
_ORIENTATION = 0x0112  # EXIF tag; 1 is upright


def find_inputs(paths: Sequence[str]) -> Dict[str, str]:
    """Return the files that ``paths`` mean, by the name of their output, in a fixed order.

    Args:
        paths: Files and folders; of a folder the images that lie directly in it.

    Raises:
        PredictError: If one does not exist, a folder holds no image, or two files would have
            outputs of the same name.
    """
    found: Dict[str, str] = {}
    for path in paths:
        if not os.path.exists(path):
            raise PredictError(f'input {path} does not exist.')
        files = [path]
        if os.path.isdir(path):
            files = sorted(str(file) for file in Path(path).iterdir()
                           if file.suffix.lower() in SUFFIXES and file.is_file())
            if not files:
                raise PredictError(f"the folder {path} holds no image: expected files that end in "
                                   f"{', '.join(SUFFIXES)}. Folders below are not looked into.")
        for file in files:
            name = Path(file).stem
            if os.path.abspath(found.get(name, file)) != os.path.abspath(file):
                raise PredictError(f'{found[name]} and {file} would both become {name}.tif. '
                                   f'Rename one, or predict them into two folders.')
            found[name] = file
    return found


class Scene:
    """An input, whose windows are read in the model's order of bands.

    A picture (png, jpg, bmp) for a model trained through ``LoadImageFromFile`` is decoded whole, as
    that does: GDAL and OpenCV give different colors for the same JPEG. Everything else is read
    window by window.

    Args:
        path: File that GDAL can read.
        bands: Bands that are read, and how the model sees them.

    Attributes:
        path: The file.
        raster: It, opened.

    Raises:
        PredictError: If it cannot be opened, its bands are not as many as the model's, or hold
            values that the model was not trained on.
    """

    def __init__(self, path: str, bands: Bands) -> None:
        self.path = path
        try:
            self.raster = Raster(path, bands.chosen)
        except GeoError as error:
            raise PredictError(str(error)) from error
        self._bands = bands
        self._is_picture = (bands.like_opencv and bands.chosen is None
                            and Path(path).suffix.lower() in _PICTURES)
        self._picture: Union[None, np.ndarray, RasterBlockError] = None
        if self._is_picture:
            self._check_upright()
        else:
            self._check_bands()

    def read(self, column: int, row: int, window: Tuple[int, int]
             ) -> Tuple[np.ndarray, np.ndarray, List[str]]:
        """Read a window; beyond the scene its pixels are mirrored, damaged blocks are 0.

        Args:
            column, row: Position of the window's first pixel in the scene.
            window: Height and width of the window in pixels.

        Returns:
            ``(bands, height, width)`` uint8, of other types float32; the part in the scene
            ``(h, w)`` bool, True where there is data; and a line on what could not be read.
        """
        box = (column, row, min(window[1], self.raster.width - column),
               min(window[0], self.raster.height - row))
        damage: List[str] = []
        try:
            values, valid = self._read_picture(box) if self._is_picture else self._read_scene(box)
        except RasterBlockError as error:
            values, valid = self._read_around(box, error)
            shown = ', '.join(map(str, error.blocks[:4])) + ', ...' * (len(error.blocks) > 4)
            damage.append(f'window (column, row, width, height) = {box}: damaged block(s) '
                          f"{shown or 'unknown'} ({error.reason})")
        if valid.shape != tuple(window):
            missing = (0, 0), (0, window[0] - box[3]), (0, window[1] - box[2])
            values = np.pad(values, missing, mode='reflect')
        return values, valid, damage

    def _check_upright(self) -> None:
        if self._bands.color_type != 'color':
            return  # the loader does not turn it
        try:
            with Image.open(self.path) as image:
                turned = image.getexif().get(_ORIENTATION, 1) not in (0, 1)
        except OSError:  # is damaged, which decoding tells
            return
        if turned:
            raise PredictError(f'{self.path} is turned by its EXIF, and a map of it would lie '
                               f'turned over the file. Write it upright first, or predict with '
                               f"color_type='color_ignore_orientation'.")

    def _check_bands(self) -> None:
        held, wanted = len(self.raster.bands), self._bands.count
        if held != wanted:
            numbers = ' '.join(str(number) for number in range(1, wanted + 1))
            hint = ('--bands 1 1 1 shows a gray image; convert one with a palette to RGB'
                    if held == 1 and wanted == 3 else f'choose with --bands, for example '
                    f'--bands {numbers}' if held > wanted else
                    'give a scene with more bands, or repeat some with --bands')
            raise PredictError(f'{self.path}: {held} band(s) {list(self.raster.bands)} are chosen, '
                               f'and the model takes {wanted}: {hint}.')
        if self._bands.like_opencv and self.raster.dtype != np.uint8:
            raise PredictError(
                f'{self.path} holds {self.raster.dtype}, and the model was trained on the 8 bits '
                f'of LoadImageFromFile. Convert it as the training images were (gdal_translate '
                f'-ot Byte -scale), or train on such scenes with GeoTiffDataset.')

    def _read_scene(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        return self._in_order(*self.raster.read(*box))

    def _in_order(self, values: np.ndarray, valid: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        if values.dtype != np.uint8:
            values = values.astype(np.float32)
        return values[::-1] if self._bands.like_opencv else values, valid

    def _read_picture(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        column, row, width, height = box
        if self._picture is None:
            self._picture = self._decode()
        if isinstance(self._picture, RasterBlockError):
            raise self._picture
        part = np.s_[:, row:row + height, column:column + width]
        valid = (self.raster.read(*box)[1] if self.raster.may_have_gaps
                 else np.ones((height, width), bool))
        return self._picture[part], valid

    def _decode(self) -> Union[np.ndarray, RasterBlockError]:
        """Return the picture, ``(3, height, width)`` uint8, blue first, or the decoding error."""
        whole = 0, 0, self.raster.width, self.raster.height
        image = mmcv.imfrombytes(Path(self.path).read_bytes(), flag=self._bands.color_type,
                                 backend=self._bands.backend)
        if image is None:
            return RasterBlockError('', self.path, whole, [], 'OpenCV cannot decode it')
        return image.transpose(2, 0, 1)

    def _read_around(self, box: Box,
                     error: RasterBlockError) -> Tuple[np.ndarray, np.ndarray]:
        """Read the window block by block, without the damaged ones."""
        column, row, width, height = box
        values = np.zeros((self._bands.count, height, width), self.raster.dtype)
        valid = np.zeros((height, width), bool)
        rows, columns = self.raster.blocks
        damaged = {(left, top) for left, top, _, _ in error.blocks}
        if self._is_picture or not damaged:
            return self._in_order(values, valid)
        for top in range(row // rows * rows, row + height, rows):
            for left in range(column // columns * columns, column + width, columns):
                if (left, top) in damaged:
                    continue
                first = max(left, column), max(top, row)
                last = min(left + columns, column + width), min(top + rows, row + height)
                part = np.s_[first[1] - row:last[1] - row, first[0] - column:last[0] - column]
                values[(slice(None), *part)], valid[part] = self.raster.read(
                    *first, last[0] - first[0], last[1] - first[1])
        return self._in_order(values, valid)
