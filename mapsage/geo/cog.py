"""Class maps as Cloud Optimized GeoTIFFs that a GIS opens with colors and class names.

A map is written in two steps: `ClassMapWriter` writes strips into a plain working file, from which
a stopped prediction can continue, and `write_cog` converts the complete file. Both read the file
back, because GDAL reports no error if the disk fills up while a file is closed.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import tempfile
import zlib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterator, List, Optional, Sequence, Tuple, Type, TypeVar
from xml.sax.saxutils import escape

import affine
import numpy as np
import rasterio
import rasterio.shutil
from rasterio.crs import CRS
from rasterio.enums import ColorInterp
from rasterio.windows import Window

from mapsage.base.files import describe_room, parse_json, xml_text

from .errors import GeoError, PathName
from .gdal_files import open_file

CONFIDENCE_NODATA = 255
"""Value of a pixel without a prediction; confidence itself is in percent, uint8 0 to 100."""

# Side of a tile in pixels, the COG driver's default.
_TILE = 512
# Name of the tag in the file that holds the classes as JSON.
_TAG = 'MAPSAGE_CLASSES'
# Bands that are read back together, of a file with hundreds of them.
_BANDS_AT_A_TIME = 32


@dataclass
class MapInfo:
    """Description of a class map: classes, colors and georeference.

    Attributes:
        class_names: Names of the classes, in the order of their indices.
        palette: Red, green and blue (0 to 255) of each class.
        crs: Coordinate reference system (``rasterio.crs.CRS``), or None for a map in pixels.
        transform: Affine map from (column, row) to coordinates of ``crs``, or None for a map in
            pixels.
        nodata: Value of pixels without a prediction; a GIS shows them transparent.

    Raises:
        GeoError: If the number of classes does not fit ``nodata`` or the palette.
    """

    class_names: Sequence[str]
    palette: Sequence[Sequence[int]]
    crs: Optional[CRS] = None
    transform: Optional[affine.Affine] = None
    nodata: int = 255

    def __post_init__(self) -> None:
        if not 0 < len(self.class_names) <= self.nodata <= 255:
            raise GeoError(
                f'{len(self.class_names)} classes and nodata={self.nodata}; a map has 1 '
                'to 255 classes and marks no data with a value above them, up to 255.'
            )
        if len(self.palette) != len(self.class_names):
            raise GeoError(
                f'{len(self.class_names)} class names and {len(self.palette)} colors; '
                'metainfo needs a name and a color for every class.'
            )


_Writer = TypeVar('_Writer', bound='StripWriter')


class StripWriter:
    """Writer of working files in row strips, which reads them back when it closes them.

    As a context it closes them without reading if there was an error.

    Args:
        path: Path of the first file, for messages.
    """

    def __init__(self, path: PathName) -> None:
        self.path = str(path)
        self._files: List[Any] = []
        # Strips: open file, first row, number of rows, checksum of each band.
        self._written: List[Tuple[Any, int, int, List[int]]] = []

    def _open(self, path: str, **profile: Any) -> Any:
        # rasterio 1.3 opens an existing file first, and fails if a stopped run left it cut off.
        Path(path).unlink(missing_ok=True)
        file = open_file(path, 'w', driver='GTiff', bigtiff='IF_SAFER', **profile)
        self._files.append(file)
        return file

    def _write(self, file: Any, row: int, values: np.ndarray) -> None:
        height, width = values.shape[1:]
        with disk_errors(self.path):
            file.write(values, window=Window(0, row, width, height))
        self._written.append((file, row, height, [checksum(band) for band in values]))

    def close(self) -> None:
        """Close the files and read them back.

        Raises:
            GeoError: If a file differs from what was written. The check is necessary because GDAL
                reports no error if the disk fills up while it closes a file.
        """
        with disk_errors(self.path):
            self._close_files()
            for file in self._files:
                with open_file(file.name) as source:
                    strips = (strip[1:] for strip in self._written if strip[0] is file)
                    for row, height, expected in strips:
                        window = Window(0, row, source.width, height)
                        found = [
                            checksum(band)
                            # rasterio looks at all bands of the file in each read.
                            for first in range(0, source.count, _BANDS_AT_A_TIME)
                            for band in source.read(
                                list(source.indexes[first : first + _BANDS_AT_A_TIME]),
                                window=window,
                            )
                        ]
                        if found != expected:
                            raise OSError(f'the rows from {row} on are not what was written')

    def _close_files(self) -> None:
        for file in self._files:
            file.close()

    def __enter__(self: _Writer) -> _Writer:
        return self

    def __exit__(self, kind: Optional[Type[BaseException]], *error: object) -> None:
        if kind is None:
            self.close()
        else:
            self._close_files()


class ClassMapWriter(StripWriter):
    """Writer of a map, in any number of row strips, into plain tiled working files.

    Confidence, if requested, goes into a second file, ``confidence_path(path)``, because a color
    table applies to all bands of a GeoTIFF. ``write_cog`` turns each of the two files into its
    final form.

    Args:
        path: Path of the working GeoTIFF, which is overwritten.
        width: Width of the map in pixels.
        height: Height of the map in pixels.
        info: Classes, colors and georeference.
        confidence: Whether ``write`` is called with confidence.

    Raises:
        GeoError: If the folder does not exist or the disk is full.
    """

    def __init__(
        self, path: PathName, width: int, height: int, info: MapInfo, confidence: bool = False
    ) -> None:
        super().__init__(path)
        self._confidence: Any = None
        profile = dict(
            width=width,
            height=height,
            count=1,
            dtype='uint8',
            tiled=True,
            blockxsize=_TILE,
            blockysize=_TILE,
            compress='deflate',
            zlevel=1,
            crs=info.crs,
            transform=info.transform,
        )
        with disk_errors(self.path):
            self._classes = self._open(self.path, nodata=info.nodata, **profile)
            self._classes.write_colormap(1, _color_table(info))
            self._classes.update_tags(**{_TAG: _classes_as_json(info)})
            if confidence:
                path = confidence_path(self.path)
                self._confidence = self._open(path, nodata=CONFIDENCE_NODATA, **profile)
                self._confidence.set_band_description(1, 'confidence in percent')

    def write(self, row: int, classes: np.ndarray, confidence: Optional[np.ndarray] = None) -> None:
        """Write a strip of rows.

        Args:
            row: First row of the strip.
            classes: Class indices or ``info.nodata``, uint8 (rows, width).
            confidence: Percent or ``CONFIDENCE_NODATA``, uint8 (rows, width).

        Raises:
            GeoError: If the disk is full.
        """
        self._write(self._classes, row, classes[None])
        if self._confidence is not None and confidence is not None:
            self._write(self._confidence, row, confidence[None])


def confidence_path(path: PathName) -> str:
    """Return the path of the confidence file that belongs to a map: ``NAME_confidence.tif``."""
    path = Path(path)
    return str(path.with_name(f'{path.stem}_confidence{path.suffix}'))


def write_cog(working_path: PathName, destination: PathName) -> None:
    """Convert a working file into a Cloud Optimized GeoTIFF: tiled, deflated, with overviews.

    CRS, transform, no-data value and colors are copied. A pixel of an overview has the most
    frequent class of a class map, or the mean of confidence and probabilities. Class names are
    stored in the file (tag ``MAPSAGE_CLASSES``, JSON). Because the GeoTIFF format has no standard
    field for them, they are also written to ``destination + '.aux.xml'``, where GDAL and QGIS look
    for them. Memory does not grow with the map.

    The file is written in a temporary folder next to ``destination``, read back, compared, and then
    renamed. So a file with the final name is always complete.

    Args:
        working_path: Path of the working file, as ``ClassMapWriter`` writes it.
        destination: Path of the new file; a file of this name is replaced.

    Raises:
        GeoError: If the disk has too little space, or the working file is damaged.
    """
    destination = Path(destination)
    with temporary_beside(destination) as folder:
        temporary = folder / destination.name
        with disk_errors(destination):
            with open_file(working_path) as source:
                is_map = source.colorinterp[0] == ColorInterp.palette
                classes = source.tags().get(_TAG)
            rasterio.shutil.copy(
                str(working_path),
                str(temporary),
                driver='COG',
                compress='DEFLATE',
                predictor='NO',
                blocksize=_TILE,
                overview_resampling='MODE' if is_map else 'AVERAGE',
                num_threads='ALL_CPUS',
                bigtiff='IF_SAFER',
            )
            _check_same(working_path, temporary)
            if classes:
                sidecar = Path(f'{temporary}.aux.xml')
                sidecar.write_text(_category_names(json.loads(classes)), encoding='utf-8')
                os.replace(sidecar, f'{destination}.aux.xml')
            os.replace(temporary, destination)


def read_classes(path: PathName) -> List[dict]:
    """Return the classes of a map, ``[dict(value=, name=, color=), ...]``; [] without the tag.

    Raises:
        GeoError: If the tag is not a list of classes.
    """
    with open_file(path) as source:
        text = source.tags().get(_TAG, '[]')
    try:
        classes = parse_json(text)
        is_list = isinstance(classes, list) and all(map(_is_class, classes))
    except ValueError:
        is_list = False
    if not is_list:
        raise GeoError(
            f'{path}: the tag {_TAG} holds {text[:60]!r}, expected a list of classes '
            'with value, name and color. Make the map again, or move it elsewhere.'
        )
    return classes


def _is_class(entry: object) -> bool:
    """Return whether a JSON value describes a class."""
    if not isinstance(entry, dict) or not {'value', 'name', 'color'} <= entry.keys():
        return False
    color = entry['color']
    numbers = [entry['value'], *color] if isinstance(color, list) and len(color) == 3 else []
    return (
        isinstance(entry['name'], str)
        and bool(numbers)
        and all(type(n) is int and 0 <= n <= 255 for n in numbers)
    )


@contextmanager
def temporary_beside(destination: Path) -> Iterator[Path]:
    """Return a context with a temporary folder next to ``destination``, on the same file system.

    The folder is removed at the end of the context. A killed process leaves its folder; the next
    process on the same host that writes the same destination removes it.

    Raises:
        GeoError: If the folder cannot be created.
    """
    prefix = f'.{destination.name}.{platform.node()}.'
    try:
        _remove_abandoned(destination.parent, prefix)
        folder = Path(tempfile.mkdtemp(prefix=f'{prefix}{os.getpid()}.', dir=destination.parent))
    except OSError as error:
        raise GeoError(
            f'cannot write into {destination.parent} ({error}); make the folder, give '
            'write permission or free space there.'
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the temporary folders of processes of this host that no longer run."""
    for folder in parent.iterdir():
        owner = re.fullmatch(re.escape(prefix) + r'(\d{1,9})\.\w+', folder.name)
        if owner and not _is_running(int(owner.group(1))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    # The process of another user.
    except PermissionError:
        return True
    return True


@contextmanager
def disk_errors(path: PathName) -> Iterator[None]:
    """Turn a failed write into a ``GeoError`` that names the free space."""
    try:
        yield
    # The errors of GDAL that rasterio.shutil.copy raises have no public base class. Errors from
    # other modules are raised again unchanged.
    except Exception as error:
        if not isinstance(error, OSError) and not type(error).__module__.startswith('rasterio.'):
            raise
        raise GeoError(disk_message(path, error)) from error


def disk_message(path: PathName, error: Exception) -> str:
    """Return the message for a file that could not be written, with the free disk space."""
    folder = Path(path).parent
    if not folder.is_dir():
        return f'cannot write {path}: the folder {folder} does not exist; make it.'
    cause = error.__cause__ or error
    return (
        f'cannot write {path}: {cause}. Of the disk: {describe_room(folder, cause)}; free '
        'space there or write elsewhere. Nothing was left under the final name.'
    )


def _check_same(working_path: PathName, copy: Path) -> None:
    """Compare the pixels of a copy with the working file.

    The reason is given in ``ClassMapWriter.close``.

    Raises:
        OSError: If a pixel differs.
    """
    with open_file(working_path) as source, open_file(copy) as target:
        for row in range(0, source.height, _TILE):
            window = Window(0, row, source.width, min(_TILE, source.height - row))
            # Band by band, because there may be many.
            for band in source.indexes:
                if not np.array_equal(
                    source.read(band, window=window), target.read(band, window=window)
                ):
                    raise OSError(f'the rows from {row} on are not what was written')


def checksum(values: np.ndarray) -> int:
    """Return the CRC-32 of an array's values."""
    return zlib.crc32(np.ascontiguousarray(values).tobytes())


def _color_table(info: MapInfo) -> dict:
    table = {value: (*map(int, color), 255) for value, color in enumerate(info.palette)}
    table[info.nodata] = (0, 0, 0, 0)
    return table


def _classes_as_json(info: MapInfo) -> str:
    return json.dumps(
        [
            dict(value=value, name=str(name), color=[int(c) for c in color])
            for value, (name, color) in enumerate(zip(info.class_names, info.palette))
        ]
    )


def _category_names(classes: Sequence[dict]) -> str:
    """Return GDAL's ``.aux.xml`` with the names of the classes."""
    names = ''.join(
        f'      <Category>{escape(xml_text(entry["name"]))}</Category>\n' for entry in classes
    )
    return (
        '<PAMDataset>\n  <PAMRasterBand band="1">\n    <CategoryNames>\n'
        f'{names}    </CategoryNames>\n  </PAMRasterBand>\n</PAMDataset>\n'
    )
