"""The inputs of a prediction: images and scenes, read as the model's test pipeline reads them."""
from __future__ import annotations

import io
import os
from typing import Any, Dict, List, Optional, Sequence, Tuple, Union

import cv2
import numpy as np
from PIL import Image

from mapsage.geo import (
    PICTURE_SUFFIXES,
    SCENE_SUFFIXES,
    GeoError,
    Mosaic,
    Raster,
    RasterBlockError,
    content_of,
    files_of,
    is_gdal_name,
    output_name,
    pixel_side,
    server_in,
    suffix_of,
    without_secrets,
)

from .description import Bands
from .errors import PredictError

Box = Tuple[int, int, int, int]  # column, row, width, height in pixels

_ORIENTATION = 0x0112  # EXIF tag; 1 is upright


def find_members(paths: Sequence[str], allow_remote: bool = False) -> List[str]:
    """Return the files that ``paths`` mean, each once, in their order; for a mosaic of them.

    Raises:
        PredictError: As :func:`find_inputs` does.
    """
    files = [file for path in paths for file in find_inputs([path], allow_remote).values()]
    return list({os.path.abspath(file): file for file in files}.values())


def find_inputs(paths: Sequence[str], allow_remote: bool = False) -> Dict[str, str]:
    """Return the files that ``paths`` mean, by the name of their output, in a fixed order.

    Args:
        paths: Files, folders and other names that GDAL opens; of a folder the images that lie
            directly in it.
        allow_remote: Whether servers may be asked that a file of a folder names, such as a mosaic
            (VRT). What ``paths`` name themselves is asked for in any case.

    Raises:
        PredictError: If one does not exist, a folder holds no image, or names a server that may not
            be asked, or two files would have outputs of the same name.
    """
    found: Dict[str, str] = {}
    for path in paths:
        if not (os.path.exists(path) or is_gdal_name(path)):
            raise PredictError(f'input {path} does not exist.')
        files = files_of(path, SCENE_SUFFIXES)
        if not files:
            raise PredictError(f"the folder {path} holds no image: expected files that end in "
                               f"{', '.join(SCENE_SUFFIXES)}. Folders below are not looked into.")
        for file in files:
            server = '' if allow_remote or files == [path] else server_in(file)
            if server:
                raise PredictError(f'{file} names {without_secrets(server)}, and no server is '
                                   f'asked for what a file of a folder names. Add --allow-remote '
                                   f'if you trust it, or name the file itself.')
            name = output_name(file)
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
        size: Height and width in pixels that the model sees the scene in; default: its own.
        members: Files that the scene is a mosaic of; then ``path`` is only its name.

    Attributes:
        path: The file.
        raster: It, opened.
        size: Height and width in pixels that the model sees it in.
        is_picture: Whether it is decoded whole.

    Raises:
        PredictError: If it cannot be opened, its bands are not as many as the model's, or hold
            values that the model was not trained on.
    """

    def __init__(self, path: str, bands: Bands, size: Optional[Tuple[int, int]] = None,
                 members: Sequence[str] = ()) -> None:
        self.path = path
        try:
            self.raster = (Mosaic(members, bands.chosen) if members
                           else Raster(path, bands.chosen))
        except GeoError as error:
            raise PredictError(str(error)) from error
        self._bands = bands
        self.size = size or (self.raster.height, self.raster.width)
        self.is_picture = (bands.like_opencv and bands.chosen is None
                           and suffix_of(path) in PICTURE_SUFFIXES)
        self._picture: Union[None, np.ndarray, RasterBlockError] = None
        if self.is_picture:
            self._check_upright()
        else:
            self._check_bands()

    def read(self, column: int, row: int, window: Tuple[int, int]
             ) -> Tuple[np.ndarray, np.ndarray, List[str]]:
        """Read a window; beyond the scene its pixels are mirrored, damaged blocks are 0.

        In another size than its own, the scene is interpolated bilinearly between the centers of
        its pixels, without smoothing, as OpenCV and so the pipeline's ``Resize`` do.

        Args:
            column, row: Position of the window's first pixel, in the size of the scene here.
            window: Height and width of the window in pixels.

        Returns:
            ``(bands, height, width)`` uint8, of other types float32; the part in the scene
            ``(h, w)`` bool, True where there is data; and a line on what could not be read.
        """
        height, width = (min(side, whole - first) for side, whole, first in zip(
            window, self.size, (row, column)))
        if self.size == (self.raster.height, self.raster.width):
            values, valid, damage = self._read_box((column, row, width, height))
        else:
            y, x = (_Samples(first, count, here, there) for first, count, here, there in zip(
                (row, column), (height, width), self.size,
                (self.raster.height, self.raster.width)))
            values, valid, damage = self._read_box(
                (x.first, y.first, x.last + 1 - x.first, y.last + 1 - y.first))
            values, valid = _interpolate(values, y, x), valid[y.nearest][:, x.nearest]
        if valid.shape != tuple(window):
            missing = (0, 0), (0, window[0] - height), (0, window[1] - width)
            values = np.pad(values, missing, mode='reflect')
        return values, valid, damage

    def _read_box(self, box: Box) -> Tuple[np.ndarray, np.ndarray, List[str]]:
        try:
            values, valid = self._read_picture(box) if self.is_picture else self._read_scene(box)
        except RasterBlockError as error:
            values, valid = self._read_around(box, error)
            shown = ', '.join(map(str, error.blocks[:4])) + ', ...' * (len(error.blocks) > 4)
            return values, valid, [f'window (column, row, width, height) = {box}: damaged block(s) '
                                   f"{shown or 'unknown'} ({error.reason})"]
        return values, valid, []

    def _check_upright(self) -> None:
        if self._bands.color_type != 'color':
            return  # the loader does not turn it
        try:
            with Image.open(io.BytesIO(content_of(self.path))) as image:
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
        image = _decoded(content_of(self.path), self._bands)
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
        if self.is_picture or not damaged:
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


def _decoded(content: bytes, bands: Bands) -> Optional[np.ndarray]:
    """Return a picture as LoadImageFromFile has it, ``(height, width, 3)`` uint8, or None.

    Raises:
        PredictError: If the training had it decoded by a program that is not there.
    """
    if bands.backend in (None, 'cv2'):
        turned = 0 if bands.color_type == 'color' else cv2.IMREAD_IGNORE_ORIENTATION
        return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR | turned)
    try:
        import mmcv
    except ImportError as error:
        raise PredictError(f'the model was trained on pictures that {bands.backend} decodes, which '
                           f'needs mmcv: pip install mmcv-lite ({error}).') from error
    return mmcv.imfrombytes(content, flag=bands.color_type, backend=bands.backend)


class _Samples:
    """Places along a side of a scene that pixels of another size lie at.

    Attributes:
        first, last: First and last pixel of the scene that is needed.
        lower, upper: Pixels before and behind each place, counted from ``first``.
        share: Weight of ``upper``, float32.
        nearest: Nearest pixel of each place, counted from ``first``.
    """

    def __init__(self, start: int, count: int, here: int, there: int) -> None:
        places = np.clip((np.arange(start, start + count) + 0.5) * there / here - 0.5, 0, there - 1)
        lower = np.floor(places).astype(np.int64)
        upper = np.minimum(lower + 1, there - 1)
        self.first, self.last = int(lower[0]), int(upper[-1])
        self.lower, self.upper = lower - self.first, upper - self.first
        self.share = (places - lower).astype(np.float32)
        self.nearest = np.floor(places + 0.5).astype(np.int64) - self.first


def _interpolate(values: np.ndarray, y: _Samples, x: _Samples) -> np.ndarray:
    """Return ``(bands, height, width)`` values at the places of both sides, in their dtype."""
    rows = values[:, y.lower] + y.share[:, None] * (
        values[:, y.upper].astype(np.float32) - values[:, y.lower])
    found = rows[:, :, x.lower] + x.share * (rows[:, :, x.upper] - rows[:, :, x.lower])
    return (np.rint(found) if values.dtype == np.uint8 else found).astype(values.dtype)


def choose_size(scene: Scene, resize: Optional[Dict[str, Any]], scale: Optional[float] = None,
                gsd: Optional[float] = None) -> Tuple[Tuple[int, int], str]:
    """Return the height and width that the model should see a scene in, and where they are from.

    Args:
        scene: The scene.
        resize: Arguments of the test pipeline's ``Resize``. A factor applies to every scene. A size
            applies to pictures only: it says nothing of the pixels of a scene of any size.
        scale: Factor that is asked for.
        gsd: Side in meters of the pixels that the model was trained on, in place of a factor.

    Raises:
        PredictError: If ``gsd`` is asked for and the scene's pixels have no size in meters.
    """
    height, width = scene.raster.height, scene.raster.width
    factors, why = (1.0, 1.0), 'its own size'
    if gsd is not None:
        side = pixel_side(scene.raster)
        if not side > 0:
            raise PredictError(f'--gsd {gsd:g} needs the size of a pixel in meters, and '
                               f'{scene.path} has no CRS or no transform. Give --scale, or '
                               f'georeference it.')
        factors, why = (side / gsd,) * 2, f'--gsd {gsd:g}, and its pixels have {side:.4g} m'
    elif scale is not None:
        factors, why = (scale, scale), f'--scale {scale:g}'
    elif resize is not None and resize.get('scale_factor') is not None:
        factor = resize['scale_factor']
        across, down = factor if isinstance(factor, (tuple, list)) else (factor, factor)
        factors, why = (down, across), f"scale_factor={factor} of the test pipeline's Resize"
    elif resize is not None and resize.get('scale') is not None:
        size = resize['scale']
        across, down = size if isinstance(size, (tuple, list)) else (size, size)
        if not scene.is_picture:
            why = (f"its own size: scale={size} of the test pipeline's Resize is for whole images; "
                   f"--scale or --gsd say the model's scale")
        elif resize.get('keep_ratio'):
            factor = min(max(across, down) / max(height, width),
                         min(across, down) / min(height, width))
            factors, why = (factor, factor), f"scale={size} of the test pipeline's Resize"
        else:
            return (int(down), int(across)), f"scale={size} of the test pipeline's Resize"
    size = max(1, int(height * factors[0] + 0.5)), max(1, int(width * factors[1] + 0.5))
    return size, why
