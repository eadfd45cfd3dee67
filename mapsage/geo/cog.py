"""Class maps as Cloud Optimized GeoTIFFs that a GIS opens with colors and class names."""
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
from typing import Any, Iterator, List, Optional, Sequence, Tuple
from xml.sax.saxutils import escape

import affine
import numpy as np
import rasterio
import rasterio.shutil
from rasterio.enums import ColorInterp
from rasterio.windows import Window

from mapsage.json_text import parse_json
from mapsage.xml_text import xml_text

from .raster import GeoError, open_file

CONFIDENCE_NODATA = 255
"""Value of a pixel without a prediction; confidence itself is in percent, uint8 0 to 100."""

_TILE = 512  # side in pixels, the COG driver's default
_TAG = 'MAPSAGE_CLASSES'


@dataclass
class MapInfo:
    """Description of a class map: classes, colors and georeference.

    Attributes:
        class_names: Names of the classes, in the order of their indices.
        palette: Red, green and blue (0 to 255) of each class.
        crs: Coordinate reference system (``rasterio.crs.CRS``), or None for a map in pixels.
        transform: Affine map from (column, row) to coordinates of ``crs``, or None for a map in
            pixels.
        nodata: Value of pixels without a prediction; they are drawn transparent.

    Raises:
        GeoError: If the number of classes does not fit ``nodata`` or the palette.
    """

    class_names: Sequence[str]
    palette: Sequence[Sequence[int]]
    crs: Optional[Any] = None
    transform: Optional[affine.Affine] = None
    nodata: int = 255

    def __post_init__(self) -> None:
        if not 0 < len(self.class_names) <= self.nodata <= 255:
            raise GeoError(f'{len(self.class_names)} classes and nodata={self.nodata}; a map has 1 '
                           'to 255 classes and marks no data with a value above them, up to 255.')
        if len(self.palette) != len(self.class_names):
            raise GeoError(f'{len(self.class_names)} class names and {len(self.palette)} colors; '
                           'metainfo needs one of each for every class.')


class ClassMapWriter:
    """Writer of a map, from any number of row strips, into plain tiled working files.

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

    def __init__(self, path: Any, width: int, height: int, info: MapInfo,
                 confidence: bool = False) -> None:
        self.path = str(path)
        self._classes: Any = None
        self._confidence: Any = None
        self._written: List[Tuple[Any, int, int, int]] = []  # handle, row, rows, checksum
        profile = dict(
            driver='GTiff', width=width, height=height, count=1, dtype='uint8', tiled=True,
            blockxsize=_TILE, blockysize=_TILE, compress='deflate', zlevel=1, crs=info.crs,
            transform=info.transform, bigtiff='IF_SAFER')
        with disk_errors(self.path):
            # rasterio 1.3 opens what is there, and fails at the cut file of a stopped run.
            Path(self.path).unlink(missing_ok=True)
            self._classes = open_file(self.path, 'w', nodata=info.nodata, **profile)
            self._classes.write_colormap(1, _color_table(info))
            self._classes.update_tags(**{_TAG: _classes_as_json(info)})
            if confidence:
                path = confidence_path(self.path)
                Path(path).unlink(missing_ok=True)
                self._confidence = open_file(path, 'w', nodata=CONFIDENCE_NODATA, **profile)
                self._confidence.set_band_description(1, 'confidence in percent')

    def write(self, row: int, classes: np.ndarray,
              confidence: Optional[np.ndarray] = None) -> None:
        """Write a strip of rows.

        Args:
            row: First row of the strip.
            classes: Class indices or ``info.nodata``, uint8 (rows, width).
            confidence: Percent or ``CONFIDENCE_NODATA``, uint8 (rows, width).

        Raises:
            GeoError: If the disk is full.
        """
        height, width = classes.shape
        window = Window(0, row, width, height)
        with disk_errors(self.path):
            for handle, values in ((self._classes, classes), (self._confidence, confidence)):
                if handle is not None and values is not None:
                    handle.write(values, 1, window=window)
                    self._written.append((handle, row, height, checksum(values)))

    def close(self) -> None:
        """Close the files and read them back.

        Raises:
            GeoError: If a file does not hold a strip as it was written. The check is necessary
                because GDAL reports no error when the disk fills up while it closes a file.
        """
        with disk_errors(self.path):
            self._close_files()
            for handle in filter(None, (self._classes, self._confidence)):
                with open_file(handle.name) as source:
                    for row, height, wanted in (w[1:] for w in self._written if w[0] is handle):
                        window = Window(0, row, source.width, height)
                        if checksum(source.read(1, window=window)) != wanted:
                            raise OSError(f'the rows from {row} on are not what was written')

    def _close_files(self) -> None:
        for handle in (self._classes, self._confidence):
            if handle is not None:
                handle.close()

    def __enter__(self) -> ClassMapWriter:
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._close_files()


def confidence_path(path: Any) -> str:
    """Return the path of the confidence file that belongs to a map: ``NAME_confidence.tif``."""
    path = Path(path)
    return str(path.with_name(f'{path.stem}_confidence{path.suffix}'))


def write_cog(working_path: Any, destination: Any) -> None:
    """Convert a working file into a Cloud Optimized GeoTIFF: tiled, deflated, with overviews.

    CRS, transform, no-data value and colors are kept. The overviews of a class map hold the most
    frequent class, those of confidence and probabilities the mean. Class names are stored in the
    file (tag ``MAPSAGE_CLASSES``, JSON) and, because the GeoTIFF format has no standard place for
    them, also in ``destination + '.aux.xml'``, where GDAL and QGIS look for them. Memory does not
    grow with the map.

    The file is written in a temporary folder beside ``destination``, read back, compared, and then
    moved into place, so that the final name always belongs to a complete file or to none.

    Args:
        working_path: Path of the working file, as ``ClassMapWriter`` writes it.
        destination: Path of the new file; a file of this name is replaced.

    Raises:
        GeoError: If the disk has too little space, or the working file is damaged.
    """
    destination = Path(destination)
    with temporary_beside(destination) as folder:
        made = folder / destination.name
        with disk_errors(destination):
            with open_file(working_path) as source:
                is_map = source.colorinterp[0] == ColorInterp.palette
                classes = source.tags().get(_TAG)
            rasterio.shutil.copy(
                str(working_path), str(made), driver='COG', compress='DEFLATE', predictor='NO',
                blocksize=_TILE, overview_resampling='MODE' if is_map else 'AVERAGE',
                num_threads='ALL_CPUS', bigtiff='IF_SAFER')
            _check_same(working_path, made)
            if classes:
                sidecar = Path(f'{made}.aux.xml')
                sidecar.write_text(_category_names(json.loads(classes)), encoding='utf-8')
                os.replace(sidecar, f'{destination}.aux.xml')
            os.replace(made, destination)


def read_classes(path: Any) -> List[dict]:
    """Return the classes of a map, ``[dict(value=, name=, color=), ...]``; [] if it names none.

    Raises:
        GeoError: If its tag holds something else.
    """
    with open_file(path) as source:
        text = source.tags().get(_TAG, '[]')
    try:
        classes = parse_json(text)
        is_list = isinstance(classes, list) and all(map(_is_class, classes))
    except ValueError:
        is_list = False
    if not is_list:
        raise GeoError(f'{path}: the tag {_TAG} holds {text[:60]!r}, expected a list of classes '
                       'with value, name and color. Make the map again, or move it elsewhere.')
    return classes


def _is_class(entry: Any) -> bool:
    """Return whether a value of JSON describes a class."""
    if not isinstance(entry, dict) or not {'value', 'name', 'color'} <= entry.keys():
        return False
    color = entry['color']
    numbers = [entry['value'], *color] if isinstance(color, list) and len(color) == 3 else []
    return (isinstance(entry['name'], str)
            and bool(numbers) and all(type(n) is int and 0 <= n <= 255 for n in numbers))


@contextmanager
def temporary_beside(destination: Path) -> Iterator[Path]:
    """Provide a temporary folder on the file system of ``destination``, and remove it afterward.

    A killed process leaves its folder behind; the next process on the same host that writes the
    same destination removes it.

    Raises:
        GeoError: If the folder cannot be made.
    """
    prefix = f'.{destination.name}.{platform.node()}.'
    try:
        _remove_abandoned(destination.parent, prefix)
        folder = Path(tempfile.mkdtemp(prefix=f'{prefix}{os.getpid()}.', dir=destination.parent))
    except OSError as error:
        raise GeoError(f'cannot write into {destination.parent} ({error}); make the folder, give '
                       'write permission or free space there.') from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path, prefix: str) -> None:
    """Remove the temporary folders of processes of this host that no longer run."""
    for folder in parent.iterdir():
        found = re.fullmatch(re.escape(prefix) + r'(\d{1,9})\.\w+', folder.name)
        if found and not _is_running(int(found.group(1))):
            shutil.rmtree(folder, ignore_errors=True)


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # the process of another user
        return True
    return True


@contextmanager
def disk_errors(path: Any) -> Iterator[None]:
    """Turn a failed write into an error that names the free space."""
    try:
        yield
    except Exception as error:
        # The errors of GDAL that rasterio.shutil.copy raises have no public base class.
        if not isinstance(error, OSError) and not type(error).__module__.startswith('rasterio.'):
            raise
        raise GeoError(disk_message(path, error)) from error


def disk_message(path: Any, error: Exception) -> str:
    """Return the message for a file that could not be written, with the free disk space."""
    folder = Path(path).parent
    if not folder.is_dir():
        return f'cannot write {path}: the folder {folder} does not exist; make it.'
    free = shutil.disk_usage(str(folder)).free / 1e6
    return (f'cannot write {path}: {error.__cause__ or error}. {free:.1f} MB are free in '
            f'{folder}, for this user perhaps less; free space there or write elsewhere. '
            'Nothing was left under the final name.')


def _check_same(working_path: Any, made: Path) -> None:
    """Read a new file back, for the reason given in ``ClassMapWriter.close``."""
    with open_file(working_path) as before, open_file(made) as after:
        for row in range(0, before.height, _TILE):
            window = Window(0, row, before.width, min(_TILE, before.height - row))
            for band in before.indexes:  # one by one: there may be many
                if not np.array_equal(before.read(band, window=window),
                                      after.read(band, window=window)):
                    raise OSError(f'the rows from {row} on are not what was written')


def checksum(values: np.ndarray) -> int:
    """Return the CRC-32 of an array's values."""
    return zlib.crc32(np.ascontiguousarray(values).tobytes())


def _color_table(info: MapInfo) -> dict:
    table = {value: (*map(int, color), 255) for value, color in enumerate(info.palette)}
    table[info.nodata] = (0, 0, 0, 0)
    return table


def _classes_as_json(info: MapInfo) -> str:
    return json.dumps([dict(value=value, name=str(name), color=[int(c) for c in color])
                       for value, (name, color) in enumerate(zip(info.class_names, info.palette))])


def _category_names(classes: Sequence[dict]) -> str:
    names = ''.join(f'      <Category>{escape(xml_text(entry["name"]))}</Category>\n'
                    for entry in classes)
    return ('<PAMDataset>\n  <PAMRasterBand band="1">\n    <CategoryNames>\n'
            f'{names}    </CategoryNames>\n  </PAMRasterBand>\n</PAMDataset>\n')
