"""Copies of rasters that a training reads several times faster than the originals.

A random window of a scene in LZW strips, or in large deflated tiles, costs far more processor time
than the same window of a GeoTIFF with ZSTD in tiles of 256 pixels. `write_fast_copy` makes such a
copy with everything that `Raster` looks at. Which copies exist, and who makes them, is decided in
`mapsage/datasets/geotiff/fast_copies.py`.
"""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import numpy as np
import rasterio
from rasterio.enums import ColorInterp
from rasterio.errors import NotGeoreferencedWarning, RasterioIOError
from rasterio.io import MemoryFile
from rasterio.windows import Window

from . import gdal_names
from .cog import checksum, disk_errors
from .errors import Box, GeoError
from .file_handles import FileHandles
from .gdal_files import gdal_environment, open_file
from .pixel_validity import PixelValidity, nodata_values
from .read_failures import BlockGrid, FailedRead
from .vrt_gaps import find_cover

# Side of a tile in pixels. A window at a random place needs more tiles of 256 than of 512, but
# fewer pixels that it does not use.
_TILE = 256
# Level 9 takes three times as long to write and saves 4 % at most (docs/benchmarks.md).
_LEVEL = 3
# Largest number of bytes that are copied at a time.
_CHUNK_BYTES = 128 << 20
# Tiles of a raster that are compressed to estimate the size of its copy.
_SAMPLED_TILES = 4
# Factor for the error of the estimate.
_MARGIN = 1.05


class NotCopiedError(GeoError):
    """A raster has a property that a GeoTIFF cannot store, so the original must be read."""


def write_fast_copy(
    path: str, destination: Path, on_copied: Callable[[int], None] = lambda decoded_bytes: None
) -> None:
    """Copy a raster into a GeoTIFF with ZSTD in tiles of 256 pixels, and read the copy back.

    The copy has the same values, no-data value, mask, alpha band, georeference, color table, and
    for each band the description, scale, offset, unit and color interpretation. It has no
    overviews.

    Args:
        path: Path of a raster, or a name that GDAL opens.
        destination: Path of the new file. After an error it is incomplete, and the caller removes
            it.
        on_copied: Function that is called with the number of decoded bytes of each copied part.

    Raises:
        NotCopiedError: If a GeoTIFF cannot store the raster.
        RasterBlockError: If the raster is damaged.
        GeoError: If the disk is full, or the copy differs from the raster.
    """
    source = _Source(path)
    boxes = list(_chunks(source.file))
    checksums: List[Tuple[int, int]] = []
    try:
        with disk_errors(destination):
            # The mask becomes a part of the file; GDAL's default is a file next to it.
            with rasterio.Env(GDAL_TIFF_INTERNAL_MASK=True), open_file(
                destination, 'w', **source.profile()
            ) as copy:
                _copy_metadata(source.file, copy)
                for box in boxes:
                    values, mask = source.read(box)
                    copy.write(values, window=Window(*box))
                    if mask is not None:
                        copy.write_mask(mask, window=Window(*box))
                    checksums.append(_checksums(values, mask))
                    on_copied(values.nbytes)
            _check_copy(source, destination, boxes, checksums)
    finally:
        source.close()


def decoded_bytes(path: str) -> int:
    """Return the size of a raster's values in memory, in bytes."""
    with open_file(path) as file:
        return int(file.width * file.height * sum(np.dtype(name).itemsize for name in file.dtypes))


def estimate_copy_bytes(path: str) -> int:
    """Return about how many bytes a copy will have, from a few tiles of the raster.

    Raises:
        NotCopiedError: If a GeoTIFF cannot store the raster.
        RasterBlockError: If one of these tiles is damaged.
    """
    source = _Source(path)
    try:
        file, sampled, written = source.file, 0, 0
        random = np.random.RandomState(0)
        for _ in range(_SAMPLED_TILES):
            box = _random_box(file, _TILE, random)
            values, mask = source.read(box)
            with _copy_in_memory(source, values) as memory:
                written += len(memory.getbuffer())
            # A mask has one bit for each pixel.
            written += 0 if mask is None else mask.size // 8
            sampled += box[2] * box[3]
        return int(_MARGIN * written / sampled * file.width * file.height)
    finally:
        source.close()


@dataclass(frozen=True)
class ReadTimes:
    """Time of reading a random window of a raster, and of its fast copy.

    Attributes:
        original: Seconds for a window of the raster: processor time, or elapsed time for a raster
        on a
            server.
        copy: Processor seconds for the same window of a fast copy.
        is_remote: Whether the raster is on a server.
    """

    original: float
    copy: float
    is_remote: bool


def measure_read_times(path: str, side: int, seconds: float = 1.0) -> ReadTimes:
    """Read a few windows at random places from a raster and from copies of these places in memory.

    Args:
        path: Path of a raster, or a name that GDAL opens.
        side: Side of a window in pixels.
        seconds: Time after which no further window is read.

    Raises:
        NotCopiedError: If a GeoTIFF cannot store the raster.
        RasterBlockError: If one of the windows is damaged.
    """
    source = _Source(path)
    clock = time.perf_counter if source.is_remote else time.process_time
    times: List[Tuple[float, float]] = []
    random, end = np.random.RandomState(0), time.monotonic() + seconds
    try:
        while len(times) < 8 and (not times or time.monotonic() < end):
            column, row, width, height = box = _random_box(source.file, side, random)
            # GDAL forgets the blocks that it has decoded when it closes a file.
            source.reopen()
            start = clock()
            source.read(box)
            original = clock() - start
            # The place with all tiles of a copy that the window meets.
            left, top = column // _TILE * _TILE, row // _TILE * _TILE
            right = min(-(-(column + width) // _TILE) * _TILE, source.file.width)
            bottom = min(-(-(row + height) // _TILE) * _TILE, source.file.height)
            values, _ = source.read((left, top, right - left, bottom - top))
            with _copy_in_memory(source, values) as memory, open_file(memory.name) as copy:
                start = time.process_time()
                copy.read(window=Window(column - left, row - top, width, height))
                times.append((original, time.process_time() - start))
    finally:
        source.close()
    original, copied = np.median(np.array(times), axis=0)
    return ReadTimes(float(original), float(copied), source.is_remote)


class _Source:
    """A raster that is read as it is stored, with all bands and without hiding invalid pixels.

    Attributes:
        file: Open file.
        is_remote: Whether the pixels come from a server.

    Raises:
        NotCopiedError: If a GeoTIFF cannot store the raster.
        GeoError: If the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.is_remote = gdal_names.is_remote(path)
        self._handles = FileHandles(path)
        self.file = self._handles.get()
        kinds = set(self.file.dtypes)
        if len(kinds) != 1 or not next(iter(kinds)).startswith(('uint', 'int', 'float')):
            self._refuse(f'its bands hold {", ".join(sorted(kinds))}')
        nodata = nodata_values(self.file)
        if len({str(value) for value in nodata}) > 1:
            self._refuse(f'its bands have different no-data values, {nodata}')
        if isinstance(nodata[0], int) and int(float(nodata[0])) != nodata[0]:
            # rasterio takes a no-data value as a float.
            self._refuse(f'its no-data value {nodata[0]} has more digits than a float')
        self._nodata, self._dtype = nodata[0], np.dtype(self.file.dtypes[0])
        self.has_mask = any(validity.mask for validity in _validities(self.file))
        if any(validity.mask == 'bands' for validity in _validities(self.file)):
            self._refuse('each of its bands has its own mask')
        if any(find_cover(self.file, path, [band], True) is not None for band in self.file.indexes):
            self._refuse('its sources leave gaps')

    def profile(self) -> Dict[str, Any]:
        """Return the arguments of ``open_file`` for a copy."""
        file = self.file
        colors = file.colorinterp[:3]
        is_rgb = colors == (ColorInterp.red, ColorInterp.green, ColorInterp.blue)
        # A no-data value that no pixel can equal cannot be stored and hides nothing.
        has_nodata = PixelValidity.of(file, file.indexes, self._dtype).nodata is not None
        profile = dict(
            driver='GTiff',
            width=file.width,
            height=file.height,
            count=file.count,
            dtype=file.dtypes[0],
            tiled=True,
            blockxsize=_TILE,
            blockysize=_TILE,
            compress='ZSTD',
            zstd_level=_LEVEL,
            interleave='band',
            bigtiff='IF_SAFER',
            crs=file.crs or None,
            nodata=self._nodata if has_nodata else None,
        )
        if file.transform != rasterio.Affine.identity():
            profile['transform'] = file.transform
        if is_rgb and self._dtype in (np.uint8, np.uint16):
            profile['photometric'] = 'RGB'
        return profile

    def read(self, box: Box) -> Tuple[np.ndarray, Optional[np.ndarray]]:
        """Return a window's values (bands, height, width), and its mask (height, width) or None.

        A pixel of the mask is 0 where the raster's mask hides it, else 255.

        Raises:
            RasterBlockError: If the window is damaged.
        """
        try:
            with gdal_environment(self.path, self.is_remote):
                values = self.file.read(window=Window(*box))
                mask = self.file.read_masks(1, window=Window(*box)) if self.has_mask else None
        except RasterioIOError as error:
            grid = BlockGrid(self.file.width, self.file.height, *self.file.block_shapes[0])
            bands = list(self.file.indexes)
            self._handles.drop()
            raise FailedRead(self._handles, self.is_remote, bands, grid, box).explain(
                error
            ) from error
        return values, None if mask is None else np.where(mask != 0, 255, 0).astype(np.uint8)

    def reopen(self) -> None:
        """Close the file and open it again."""
        self._handles.close()
        self.file = self._handles.get()

    def close(self) -> None:
        """Close the file."""
        self._handles.close()

    def _refuse(self, reason: str) -> None:
        self.close()
        raise NotCopiedError(
            f'{self.path}: {reason}, which a GeoTIFF cannot store; the original is read.'
        )


def _validities(file: rasterio.DatasetReader) -> List[PixelValidity]:
    """Return what hides pixels of each band, so that it is known for any choice of bands."""
    return [
        PixelValidity.of(file, [band], np.dtype(file.dtypes[band - 1])) for band in file.indexes
    ]


def _chunks(file: rasterio.DatasetReader) -> Iterator[Box]:
    """Yield windows that cover a file in whole tiles of a copy.

    A window has whole rows, and whole blocks of the file, where these are not too large: then every
    block is decoded once.
    """
    pixel = sum(np.dtype(name).itemsize for name in file.dtypes)
    columns = max(_TILE, min(file.width, _CHUNK_BYTES // (pixel * _TILE)) // _TILE * _TILE)
    columns = file.width if columns + _TILE > file.width else columns
    block_rows = -(-file.block_shapes[0][0] // _TILE) * _TILE
    rows = block_rows if block_rows * columns * pixel <= _CHUNK_BYTES else _TILE
    for row in range(0, file.height, rows):
        for column in range(0, file.width, columns):
            yield column, row, min(columns, file.width - column), min(rows, file.height - row)


def _random_box(file: rasterio.DatasetReader, side: int, random: np.random.RandomState) -> Box:
    width, height = min(side, file.width), min(side, file.height)
    column = int(random.randint(file.width - width + 1))
    return column, int(random.randint(file.height - height + 1)), width, height


def _copy_metadata(source: rasterio.DatasetReader, copy: Any) -> None:
    """Set everything but pixels and profile; it must be done before the first pixel is written."""
    if source.colorinterp[0] == ColorInterp.palette:
        copy.write_colormap(1, source.colormap(1))
    copy.colorinterp = source.colorinterp
    copy.scales, copy.offsets, copy.units = source.scales, source.offsets, source.units
    points, crs = source.gcps
    if points and source.transform == rasterio.Affine.identity():
        copy.gcps = points, crs
    for band, description in zip(source.indexes, source.descriptions):
        if description:
            copy.set_band_description(band, description)


def _checksums(values: np.ndarray, mask: Optional[np.ndarray]) -> Tuple[int, int]:
    return checksum(values), 0 if mask is None else checksum(mask)


def _check_copy(
    source: _Source, path: Path, boxes: List[Box], checksums: List[Tuple[int, int]]
) -> None:
    """Compare a copy with the raster.

    Raises:
        OSError: If the pixels are not what was written: GDAL reports no error if the disk fills up
            while it closes a file.
        NotCopiedError: If the copy would hide other pixels.
    """
    copy = _Source(str(path))
    try:
        for box, expected in zip(boxes, checksums):
            if _checksums(*copy.read(box)) != expected:
                raise OSError(f'the window {box} is not what was written')
        expected_facts, facts = (
            [validity.facts() for validity in _validities(file)]
            for file in (source.file, copy.file)
        )
        if facts != expected_facts:
            raise NotCopiedError(
                f'{source.path}: what hides its pixels, {expected_facts}, would '
                f'be {facts} in a copy; the original is read.'
            )
    finally:
        copy.close()


def _copy_in_memory(source: _Source, values: np.ndarray) -> MemoryFile:
    """Return a fast copy of some values of a raster, a file in memory that the caller closes."""
    memory = MemoryFile()
    _, height, width = values.shape
    profile = dict(source.profile(), height=height, width=width)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore', NotGeoreferencedWarning)
        with memory.open(**profile) as copy:
            copy.write(values)
    return memory
