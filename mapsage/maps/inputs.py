"""The inputs of a prediction: images and scenes, read as the model's test pipeline reads them.

`find_inputs` turns the paths of the command line into files, `Scene` reads windows of one file, and
`choose_size` decides the size in which the model sees it. A picture (png, jpg, bmp) is decoded as a
whole by the decoder of the training, because GDAL and OpenCV give different colors for the same
JPEG. Everything else is read by windows through `mapsage.geo`. `Door` compares the inputs with the
passport of the model, before the first window.

Boxes are (column, row, width, height) in pixels of the file; pixels are (bands, height, width).
"""

from __future__ import annotations

import io
import os
from dataclasses import replace
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple, Union

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
    as_vsi,
    content_of,
    facts_of,
    files_of,
    is_gdal_name,
    is_remote,
    open_scene,
    output_name,
    pixel_sides,
    server_in,
    suffix_of,
    without_secrets,
)
from mapsage.geo.passport import Finding, compare
from mapsage.geo.places.dates import spread_evenly
from mapsage.geo.scene_facts import describe_reading, images_by_sensor, sample_quantiles

from .description import Bands
from .errors import BrokenInputError, PredictError

Box = Tuple[int, int, int, int]

# Text of `choose_size` for a scene that is not resized.
OWN_SIZE = 'its own size'

# EXIF tag; 1 is upright.
_ORIENTATION = 0x0112


def find_members(paths: Sequence[str], allow_remote: bool = False) -> List[str]:
    """Return the files of a mosaic: those that ``paths`` name, without repetition, in order.

    Raises:
        PredictError: In the cases of :func:`find_inputs`.
    """
    files = [file for path in paths for file in find_inputs([path], allow_remote).values()]
    return list({os.path.abspath(file): file for file in files}.values())


def find_inputs(paths: Sequence[str], allow_remote: bool = False) -> Dict[str, str]:
    """Return the files that ``paths`` name: output name -> path, in a fixed order.

    Args:
        paths: Files, folders and other names that GDAL opens. A folder stands for the images
            directly inside it; on a server it ends with a slash: ``s3://bucket/scenes/``.
        allow_remote: Whether a file of a folder, such as a mosaic (VRT), may make this process
            contact a server. Servers that ``paths`` name are contacted in any case.

    Raises:
        PredictError: If a path does not exist, a folder has no image, a file of a folder names a
            server, or two files would have outputs of the same name.
    """
    inputs: Dict[str, str] = {}
    for path in paths:
        if not (os.path.exists(path) or is_gdal_name(path)):
            raise PredictError(f'input {path} does not exist.')
        files = files_of(path, SCENE_SUFFIXES)
        # A folder on a server or in an archive that the user names, such as s3://bucket/scenes/.
        folder = as_vsi(path) if is_gdal_name(path) and path.endswith('/') else ''
        if not files:
            raise PredictError(
                f'the folder {path} holds no image: expected files that end in '
                f'{", ".join(SCENE_SUFFIXES)}. Folders below are not looked into.'
                + ' A server that refuses to list it looks the same: check its name and the '
                'credentials.' * is_remote(path)
            )
        for file in files:
            server = '' if allow_remote or files == [path] else server_in(file, folder)
            if server:
                raise PredictError(
                    f'{file} names {without_secrets(server)}, and no server is '
                    f'asked for what a file of a folder names. Add --allow-remote '
                    f'if you trust it, or name the file itself.'
                )
            name = output_name(file)
            if os.path.abspath(inputs.get(name, file)) != os.path.abspath(file):
                raise PredictError(
                    f'{inputs[name]} and {file} would both become {name}.tif. '
                    f'Rename one, or predict them into two folders.'
                )
            inputs[name] = file
    return inputs


class Scene:
    """An opened input whose windows are read in the model's order of bands.

    A picture (png, jpg, bmp) for a model trained through ``LoadImageFromFile`` is decoded as a
    whole by the same decoder. Everything else is read window by window.

    Args:
        path: File that GDAL can read.
        bands: Bands to read, in the order that the model takes.
        size: Height and width in pixels in which the model sees the scene; default: the size of
            the file.
        members: Files of a mosaic; ``path`` is then only the mosaic's name.
        open_place: Function that opens the place whose grid ``path`` has; None for single scenes.

    Attributes:
        path: Path of the file.
        raster: The opened file or mosaic.
        size: Height and width in pixels in which the model sees the scene.
        is_picture: Whether the file is decoded as a whole.
        dtypes: Types of pixels that are read as they are; others become float32, and so do
            interpolated pixels but uint8.

    Raises:
        PredictError: If the file cannot be opened, has another number of bands than the model
            takes, or has values of a type that the model was not trained on.
    """

    dtypes: Tuple[type, ...] = (np.uint8,)

    def __init__(
        self,
        path: str,
        bands: Bands,
        size: Optional[Tuple[int, int]] = None,
        members: Sequence[str] = (),
        open_place: Optional[Callable[[str], Raster]] = None,
    ) -> None:
        self.path = path
        try:
            self.raster = (
                open_place(path)
                if open_place is not None
                else Mosaic(members, bands.chosen, bands.names, bands.units, strict=True)
                if members
                else open_scene(path, bands.chosen, bands.names, bands.units, strict=True)
            )
        except GeoError as error:
            raise PredictError(str(error)) from error
        self._bands = bands
        self.size = size or (self.raster.height, self.raster.width)
        self.is_picture = (
            open_place is None
            and bands.like_opencv
            and bands.chosen is None
            and suffix_of(path) in PICTURE_SUFFIXES
        )
        self._picture: Union[None, np.ndarray, RasterBlockError] = None
        if self.is_picture:
            self._check_upright()
        else:
            self._check_bands()

    def read(
        self, column: int, row: int, window: Tuple[int, int]
    ) -> Tuple[np.ndarray, np.ndarray, List[str]]:
        """Read a window; pixels beyond the scene are mirrored, damaged blocks are 0.

        If the model sees the scene in another size than the file's, pixels are interpolated
        bilinearly between pixel centers, without smoothing, as OpenCV and the pipeline's ``Resize``
        do.

        Args:
            column, row: First pixel of the window, in the size in which the model sees the scene.
            window: Height and width of the window in pixels.

        Returns:
            Pixels ``(bands, height, width)``, see ``dtypes``; the mask of pixels with data,
            ``(h, w)`` bool, for the section of the window inside the scene; and at most one line
            about blocks that could not be read.

        Raises:
            BrokenInputError: If the file cannot be opened any more, or its server does not answer.
        """
        try:
            return self._read_resized(column, row, window)
        except (GeoError, OSError) as error:
            raise BrokenInputError(f'{self.path} cannot be read any more: {error}') from error

    def _read_resized(
        self, column: int, row: int, window: Tuple[int, int]
    ) -> Tuple[np.ndarray, np.ndarray, List[str]]:
        height, width = (
            min(side, length - first)
            for side, length, first in zip(window, self.size, (row, column))
        )
        if self.size == (self.raster.height, self.raster.width):
            values, valid, damage = self._read_box((column, row, width, height))
        else:
            y, x = (
                _AxisSamples(first, count, length, file_length)
                for first, count, length, file_length in zip(
                    (row, column),
                    (height, width),
                    self.size,
                    (self.raster.height, self.raster.width),
                )
            )
            values, valid, damage = self._read_box(
                (x.first, y.first, x.last + 1 - x.first, y.last + 1 - y.first)
            )
            values, valid = _interpolate(values, y, x), valid[y.nearest][:, x.nearest]
        if valid.shape != tuple(window):
            padding = (0, 0), (0, window[0] - height), (0, window[1] - width)
            values = np.pad(values, padding, mode='reflect')
        return values, valid, damage

    def _read_box(self, box: Box) -> Tuple[np.ndarray, np.ndarray, List[str]]:
        try:
            values, valid = self._read_picture(box) if self.is_picture else self._read_scene(box)
        except RasterBlockError as error:
            values, valid = self._read_around(box, error)
            shown = ', '.join(map(str, error.blocks[:4])) + ', ...' * (len(error.blocks) > 4)
            return (
                values,
                valid,
                [
                    f'window (column, row, width, height) = {box}: damaged block(s) '
                    f'{shown or "unknown"} ({error.reason})'
                ],
            )
        return values, valid, []

    def _check_upright(self) -> None:
        # With any other color type, the loader ignores the orientation in EXIF.
        if self._bands.color_type != 'color':
            return
        try:
            with Image.open(io.BytesIO(content_of(self.path))) as image:
                is_rotated = image.getexif().get(_ORIENTATION, 1) not in (0, 1)
        # A damaged file is reported when it is decoded.
        except OSError:
            return
        if is_rotated:
            raise PredictError(
                f'{self.path} is turned by its EXIF, and a map of it would lie '
                f'turned over the file. Write it upright first, or predict with '
                f"color_type='color_ignore_orientation'."
            )

    def _check_bands(self) -> None:
        chosen, expected = len(self.raster.bands), self._bands.count
        if chosen != expected:
            numbers = ' '.join(str(number) for number in range(1, expected + 1))
            hint = (
                '--bands 1 1 1 shows a gray image; convert one with a palette to RGB'
                if chosen == 1 and expected == 3
                else f'choose with --bands, for example --bands {numbers}'
                if chosen > expected
                else 'give a scene with more bands, or repeat some with --bands'
            )
            raise PredictError(
                f'{self.path}: {chosen} band(s) {list(self.raster.bands)} are '
                f'chosen, and the model takes {expected}: {hint}.'
            )
        if self._bands.like_opencv and self.raster.dtype != np.uint8:
            raise PredictError(
                f'{self.path} holds {self.raster.dtype}, and the model was trained on the 8 bits '
                f'of LoadImageFromFile. Convert it as the training images were (gdal_translate '
                f'-ot Byte -scale), or train on such scenes with GeoTiffDataset.'
            )

    def _read_scene(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        return self._in_order(*self.raster.read(*box))

    def _in_order(self, values: np.ndarray, valid: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
        if values.dtype not in self.dtypes:
            values = values.astype(np.float32)
        return values[::-1] if self._bands.like_opencv else values, valid

    def _read_picture(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        column, row, width, height = box
        if self._picture is None:
            self._picture = self._decode()
        if isinstance(self._picture, RasterBlockError):
            raise self._picture
        valid = (
            self.raster.read(*box)[1]
            if self.raster.may_have_gaps
            else np.ones((height, width), bool)
        )
        return self._picture[:, row : row + height, column : column + width], valid

    def _decode(self) -> Union[np.ndarray, RasterBlockError]:
        """Return the picture, ``(3, height, width)`` uint8, blue first, or the decoding error."""
        full_box = 0, 0, self.raster.width, self.raster.height
        image = _decode_picture(content_of(self.path), self._bands)
        if image is None:
            return RasterBlockError('', self.path, full_box, [], 'OpenCV cannot decode it')
        return image.transpose(2, 0, 1)

    def _read_around(self, box: Box, error: RasterBlockError) -> Tuple[np.ndarray, np.ndarray]:
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
                block = np.s_[first[1] - row : last[1] - row, first[0] - column : last[0] - column]
                values[(slice(None), *block)], valid[block] = self.raster.read(
                    *first, last[0] - first[0], last[1] - first[1]
                )
        return self._in_order(values, valid)


def _decode_picture(content: bytes, bands: Bands) -> Optional[np.ndarray]:
    """Decode a picture as LoadImageFromFile does; return ``(height, width, 3)`` uint8 or None.

    Raises:
        PredictError: If the training used a decoder that is not installed.
    """
    if bands.backend in (None, 'cv2'):
        orientation = 0 if bands.color_type == 'color' else cv2.IMREAD_IGNORE_ORIENTATION
        return cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR | orientation)
    try:
        import mmcv
    except ImportError as error:
        raise PredictError(
            f'the model was trained on pictures that {bands.backend} decodes, which '
            f'needs mmcv: pip install mmcv-lite ({error}).'
        ) from error
    return mmcv.imfrombytes(content, flag=bands.color_type, backend=bands.backend)


class _AxisSamples:
    """Positions in a file of consecutive pixels along one axis of the resized scene.

    Args:
        start: First pixel in the resized scene.
        count: Number of pixels.
        length: Length of the axis in the resized scene.
        file_length: Length of the axis in the file.

    Attributes:
        first, last: First and last pixel of the file that is needed.
        lower, upper: Neighboring file pixels of each position, counted from ``first``.
        fraction: Interpolation weight of ``upper``, float32.
        nearest: Nearest file pixel of each position, counted from ``first``.
    """

    def __init__(self, start: int, count: int, length: int, file_length: int) -> None:
        positions = np.clip(
            (np.arange(start, start + count) + 0.5) * file_length / length - 0.5, 0, file_length - 1
        )
        lower = np.floor(positions).astype(np.int64)
        upper = np.minimum(lower + 1, file_length - 1)
        self.first, self.last = int(lower[0]), int(upper[-1])
        self.lower, self.upper = lower - self.first, upper - self.first
        self.fraction = (positions - lower).astype(np.float32)
        self.nearest = np.floor(positions + 0.5).astype(np.int64) - self.first


def _interpolate(values: np.ndarray, y: _AxisSamples, x: _AxisSamples) -> np.ndarray:
    """Interpolate ``(bands, height, width)`` bilinearly, as uint8 or else float32."""
    rows = values[:, y.lower] + y.fraction[:, None] * (
        values[:, y.upper].astype(np.float32) - values[:, y.lower]
    )
    pixels = rows[:, :, x.lower] + x.fraction * (rows[:, :, x.upper] - rows[:, :, x.lower])
    return np.rint(pixels).astype(np.uint8) if values.dtype == np.uint8 else pixels


def choose_size(
    scene: Scene,
    resize: Optional[Mapping[str, Any]],
    scale: Optional[float] = None,
    gsd: Optional[float] = None,
) -> Tuple[Tuple[int, int], str]:
    """Return the height and width in which the model should see a scene, and their origin.

    Args:
        scene: The scene.
        resize: Arguments of the test pipeline's ``Resize``. A factor applies to every scene. A size
            applies to pictures only, because it does not tell the pixel size of a scene.
        scale: Factor of ``--scale``.
        gsd: Side in meters of the pixels that the model was trained on (``--gsd``). Pixels that
            are not square are scaled along both axes to this side.

    Returns:
        Height and width, and a text that tells which setting decided them.

    Raises:
        PredictError: If ``gsd`` is set and the pixels of the scene have no size in meters.
    """
    height, width = scene.raster.height, scene.raster.width
    factors, origin = (1.0, 1.0), OWN_SIZE
    resize = resize or {}
    factor, size = resize.get('scale_factor'), resize.get('scale')
    if gsd is not None:
        across, down = pixel_sides(scene.raster)
        if not across > 0:
            raise PredictError(
                f'--gsd {gsd:g} needs the size of a pixel in meters, and '
                f'{scene.path} has no CRS or no transform. Give --scale, or '
                f'georeference it.'
            )
        size_text = (
            f'{across:.4g} m'
            if across == down
            else (f'{across:.4g} x {down:.4g} m (width x height), which are made square')
        )
        factors = down / gsd, across / gsd
        origin = f'--gsd {gsd:g}, and its pixels have {size_text}'
    elif scale is not None:
        factors, origin = (scale, scale), f'--scale {scale:g}'
    elif factor is not None:
        across, down = factor if isinstance(factor, (tuple, list)) else (factor, factor)
        factors, origin = (down, across), f"scale_factor={factor} of the test pipeline's Resize"
    elif size is not None:
        across, down = size if isinstance(size, (tuple, list)) else (size, size)
        if not scene.is_picture:
            origin = (
                f"{OWN_SIZE}: scale={size} of the test pipeline's Resize is for whole "
                f"images; --scale or --gsd say the model's scale"
            )
        elif resize.get('keep_ratio'):
            factor = min(
                max(across, down) / max(height, width), min(across, down) / min(height, width)
            )
            factors, origin = (factor, factor), f"scale={size} of the test pipeline's Resize"
        else:
            return (int(down), int(across)), f"scale={size} of the test pipeline's Resize"
    size = max(1, int(height * factors[0] + 0.5)), max(1, int(width * factors[1] + 0.5))
    return size, origin


# Largest number of images of a sensor, or of a mosaic, that are examined.
_MOST = 32


class Door:
    """Examines inputs, and reports what does not fit the model's training.

    Args:
        passport: Passport of the model, None without one.
        trusted: Whether warnings are left out and other pixel sizes pass (``--trust-scenes``).
        say: Function that prints a line.

    Attributes:
        findings: Differences that were found and not reported yet, by kind.
    """

    def __init__(
        self, passport: Optional[Mapping[str, Any]], trusted: bool, say: Callable[[str], None]
    ) -> None:
        self._trusted, self._say = trusted, say
        self._parts: Mapping[str, Any] = passport['parts'] if passport else {}
        # What training had of single scenes.
        self._trained: Mapping[str, Any] = self._parts.get('', {})
        self.findings: Dict[str, List[Finding]] = {}

    def bands_of(
        self, bands: Bands, units: Optional[str] = None, chosen: Optional[Sequence[int]] = None
    ) -> Bands:
        """Return the bands of a model as a command line says, in the order of the training's names.

        Args:
            bands: Bands of the model.
            units: Unit of the command line; None for the unit of the training.
            chosen: Band numbers of the command line, whose order stays; None for those of the model.
        """
        bands = replace(bands, units=units or bands.units)
        if chosen:
            return replace(bands, chosen=tuple(chosen))
        names = tuple(self._trained.get('bands') or ())
        return replace(bands, names=names) if len(names) == bands.count else bands

    def gsd(self, gsd: Union[None, float, str]) -> Optional[float]:
        """Return the pixel size of ``--gsd``, for ``'auto'`` the size in the passport.

        Raises:
            PredictError: If the passport has none.
        """
        if gsd != 'auto':
            return None if gsd is None else float(gsd)
        if self._trained.get('pixel') is None:
            raise PredictError(
                '--gsd auto takes the pixel size of the training from the passport of the model, '
                'which has none. Give it in meters, such as --gsd 10.'
            )
        return float(self._trained['pixel'][1])

    def examine(self, scene: Scene, is_resized: bool = False) -> None:
        """Examine an opened input.

        Args:
            scene: The input.
            is_resized: Whether the model sees it in another size than the file's.
        """
        for sensor, images in images_by_sensor([scene.raster]).items():
            for text in describe_reading(images):
                self._say(text)
            if not self._parts:
                continue
            trained = self._parts.get(sensor)
            for image in spread_evenly(images, _MOST):
                text = f'{image.path} is of {sensor!r}, of which training had no image.'
                findings = (
                    [Finding('sensor', text)]
                    if trained is None
                    else compare(trained, facts_of(image), _quantiles(image), not is_resized)
                )
                for finding in findings:
                    self.findings.setdefault(finding.kind, []).append(finding)

    def report(self) -> None:
        """Tell the warnings of all inputs.

        Raises:
            PredictError: If an input certainly does not fit.
        """
        for kind, findings in self.findings.items():
            first = next((finding for finding in findings if finding.is_error), findings[0])
            more = f' (and {len(findings) - 1} more)' if len(findings) > 1 else ''
            if first.is_error and not (kind == 'pixel' and self._trusted):
                raise PredictError(f'{first.text}{more}')
            if not self._trusted:
                self._say(f'warning: {first.text}{more}')
        self.findings.clear()


def _quantiles(raster: Raster) -> Optional[np.ndarray]:
    """Return the quantiles of an image; None on a server, or if it is damaged."""
    if raster.is_remote:
        return None
    try:
        return sample_quantiles(raster)
    except (GeoError, RasterBlockError):
        # The map has a hole there, and says so.
        return None
