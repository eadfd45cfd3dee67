"""Windows of raster scenes of any size: values, valid pixels, and errors that name a block.

`Raster` is the only reader of scenes in MapSage. It can be used in forked workers and threads,
because every process and thread opens a file handle when it first reads. Which pixels are valid is
decided in `pixel_validity.py`; `open_file` is the only call of `rasterio.open` for maps and labels.

Shapes:
    Box       (column, row, width, height) in pixels; may reach beyond the scene
    values    (bands, height, width) in the file's dtype, 0 where invalid
    valid     (height, width) bool
"""
from __future__ import annotations

import os
import re
import threading
import warnings
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import affine
import numpy as np
import rasterio
from rasterio.crs import CRS
from rasterio.enums import ColorInterp
from rasterio.errors import NotGeoreferencedWarning, RasterioError, RasterioIOError
from rasterio.session import DummySession
from rasterio.windows import Window

from mapsage.errors import UserError

from . import gdal_names, vsi
from .pixel_validity import PixelValidity

# GDAL caches decoded blocks, by default in up to 5 % of the machine's memory in every process. On a
# node with many ranks and workers the sum exceeds the memory. The limit here is in megabytes; a
# limit that the user has set takes precedence.
os.environ.setdefault('GDAL_CACHEMAX', '256')

# GDAL's pool of threads does not survive a fork: a worker would wait for ever for threads that only
# its parent has. Since GDAL 3.10, VRT mosaics use all cores by default.
_ONE_THREAD = dict(GDAL_NUM_THREADS=1, VRT_NUM_THREADS=1, GTI_NUM_THREADS=1)

# By default GDAL lists the whole folder of a file on a server, and looks for companion files one by
# one.
_NO_LISTING = 'GDAL_DISABLE_READDIR_ON_OPEN', 'EMPTY_DIR'

# Error texts that mean the bytes arrived but are damaged. rasterio 1.3 does not give the cause of a
# failed read; such an error counts as a fault of the server.
_DECODING = re.compile('decod|decompress|inflat', re.IGNORECASE)

PathName = Union[str, 'os.PathLike[str]']
"""Path of a file, or a name that GDAL opens."""

Box = Tuple[int, int, int, int]
"""A window in pixels: column, row, width, height."""


class GeoError(UserError, ValueError):
    """A scene, map or vector file cannot be used as requested; the message names the file."""


class RemoteReadError(GeoError):
    """A server did not deliver part of a scene; the message names both."""


class RasterBlockError(UserError, RuntimeError):
    """A window of a scene cannot be decoded, because the file is damaged.

    Attributes:
        path: Path of the file.
        window: Requested window: (column, row, width, height) in pixels.
        blocks: Damaged blocks, each (column, row, width, height) in pixels of the scene.
        reason: Error message of GDAL.
    """

    def __init__(self, message: str, path: str = '', window: Box = (0, 0, 0, 0),
                 blocks: Sequence[Box] = (), reason: str = '') -> None:
        super().__init__(message)
        self.path, self.window, self.blocks, self.reason = path, window, list(blocks), reason

    def __reduce__(self) -> Tuple[Any, ...]:
        return type(self), (str(self), self.path, self.window, self.blocks, self.reason)


class Raster:
    """A raster file that is read by windows, from any process and thread.

    A raster can be pickled and forked: each process and thread opens a separate file handle at its
    first read. ``close()`` closes the handles of the calling process.

    Args:
        path: Path of a file that GDAL reads, or any name that it opens (``gdal_names``).
        bands: Band numbers, counted from 1 as in GDAL, in the order in which ``read`` returns them;
            default: all but an alpha band. An alpha band in this list is read as data, because many
            programs tag the fourth of four bands as alpha although it is infrared.

    Attributes:
        width: Width in pixels.
        height: Height in pixels.
        bands: Band numbers that ``read`` returns, counted from 1.
        dtype: Data type of the values, the same for all bands.
        crs: Coordinate reference system (``rasterio.crs.CRS``), or None.
        transform: Affine map (``affine.Affine``) from (column, row) of a pixel's corner to
            coordinates of ``crs``.
        may_have_gaps: Whether a pixel may be invalid; False only if all are known to be valid.
        control_points: Number of ground control points. They do not count as a georeference.
        is_georeferenced: Whether the file has both a CRS and a transform. If False, positions in
            the scene are known in pixels only.
        nodata: Value that means "no data" in the first of ``bands``, or None.
        validity: What makes pixels invalid.
        descriptions: Description of each band, or None for a band without one.
        is_remote: Whether the pixels come from a server.

    Raises:
        GeoError: If the file cannot be opened, a band is missing, or a mosaic (VRT) refers to a
            missing file.
    """

    def __init__(self, path: PathName, bands: Optional[Sequence[int]] = None) -> None:
        self.path = str(path)
        self.is_remote = gdal_names.is_remote(self.path)
        # (process, thread) -> the open file.
        self._handles: Dict[Tuple[int, int], rasterio.DatasetReader] = {}
        with self._open() as source:
            if not source.count:
                raise GeoError(_list_subdatasets(source, self.path))
            if source.driver == 'VRT':
                _check_sources(source, self.path)
            self.bands = _choose_bands(source, self.path, bands)
            self.width, self.height = int(source.width), int(source.height)
            self.dtype = _common_dtype(source, self.path, self.bands)
            self.crs = source.crs or None
            self.control_points = len(source.gcps[0])
            self.transform: affine.Affine = source.transform
            self.nodata: Optional[float] = source.nodatavals[self.bands[0] - 1]
            self.descriptions = tuple(source.descriptions[band - 1] for band in self.bands)
            self.blocks: Tuple[int, int] = source.block_shapes[self.bands[0] - 1]
            self.validity = PixelValidity.of(source, self.bands, self.dtype)
        self.may_have_gaps = self.validity.may_hide
        self.is_georeferenced = self.crs is not None and self.transform != affine.identity

    @property
    def georeference_gap(self) -> str:
        """The rest of a sentence that begins with the path, such as 'has no georeference'."""
        if not self.control_points:
            return 'has no georeference' if self.crs is None else \
                'has no georeference (a CRS, and no transform)'
        return (f'has no georeference, but {self.control_points} ground control points (gdalwarp '
                f'-r bilinear IN OUT.tif makes a georeferenced scene of them)')

    def read(self, column: int, row: int, width: int, height: int
             ) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window, which may reach beyond the scene.

        A pixel is valid if it lies inside the scene and its :attr:`validity` does not hide it.

        Args:
            column: Left edge in pixels; may be negative.
            row: Upper edge in pixels; may be negative.
            width: Width in pixels.
            height: Height in pixels.

        Returns:
            Values (bands, height, width) in the file's dtype, 0 in all bands of an invalid pixel,
            and the valid pixels, bool (height, width).

        Raises:
            RasterBlockError: If part of the window cannot be decoded.
        """
        return self._read_window(column, row, width, height)

    def read_with_nodata(self, column: int, row: int, width: int, height: int
                         ) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window as :meth:`read` does, but treat the no-data value like any other value."""
        return self._read_window(column, row, width, height, by_value=False)

    def _read_window(self, column: int, row: int, width: int, height: int, by_value: bool = True
                     ) -> Tuple[np.ndarray, np.ndarray]:
        left, top = max(column, 0), max(row, 0)
        right, bottom = min(column + width, self.width), min(row + height, self.height)
        if (left, top, right, bottom) == (column, row, column + width, row + height):
            return self._read_inside(column, row, width, height, by_value=by_value)
        values = np.zeros((len(self.bands), height, width), self.dtype)
        valid = np.zeros((height, width), bool)
        if right > left and bottom > top:
            inside = np.s_[top - row:bottom - row, left - column:right - column]
            values[(slice(None), *inside)], valid[inside] = self._read_inside(
                left, top, right - left, bottom - top, by_value=by_value)
        return values, valid

    def read_reduced(self, factor: int, row: int = 0, height: Optional[int] = None
                     ) -> Tuple[np.ndarray, np.ndarray]:
        """Read rows of the scene at a lower resolution: every ``factor``-th pixel.

        GDAL takes the pixels from an overview if the file has a suitable one.

        Args:
            factor: Number of pixels, in each direction, that become one.
            row: First row.
            height: Number of rows; default: all rows from ``row`` on.

        Returns:
            Values and valid pixels as from ``read``, with ceil(height / factor) rows and
            ceil(width / factor) columns.
        """
        height = self.height - row if height is None else height
        shape = -(-height // factor), -(-self.width // factor)
        return self._read_inside(0, row, self.width, height, shape)

    def facts(self) -> Dict[str, Any]:
        """Return the grid of the scene and what makes its pixels invalid, as JSON values.

        Caches use the values in their keys in place of the companion files that may contain them
        (``.aux.xml``). Such a file also changes for other reasons: a GIS writes statistics into it.
        """
        return dict(grid=dict(crs=None if self.crs is None else self.crs.to_string(),
                              transform=list(self.transform)[:6]),
                    validity=self.validity.facts())

    def files(self) -> List[str]:
        """Return the paths of all files that the pixels come from, such as the sources of a VRT.

        Masks (``.msk``) and world files are included. ``.aux.xml`` and overviews are not: see
        :meth:`facts`.
        """
        # A dict is used as a set that keeps its order.
        paths: Dict[str, None] = {}
        waiting = [gdal_names.as_vsi(self.path)]
        first = waiting[0]
        while waiting:
            path = waiting.pop()
            if path in paths or path.endswith(('.aux.xml', '.ovr')):
                continue
            paths[path] = None
            if os.path.exists(f'{path}.msk'):
                waiting.append(f'{path}.msk')
            if path == first or path.lower().endswith('.vrt'):
                with open_file(path) as source, _environment(path):
                    waiting += source.files
        return list(paths)

    def close(self) -> None:
        """Close the handles of this process; a later read opens a new one."""
        handles, self._handles = self._handles, {}
        for (process, _), handle in handles.items():
            if process == os.getpid():
                handle.close()

    def __enter__(self) -> Raster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __getstate__(self) -> Dict[str, Any]:
        return dict(self.__dict__, _handles={})

    def _open(self) -> rasterio.DatasetReader:
        try:
            return open_file(self.path)
        # Before rasterio 1.4 the second class is not a subclass of the first.
        except (RasterioError, RasterioIOError) as error:
            raise GeoError(_open_message(self.path, error)) from error

    def _handle(self) -> rasterio.DatasetReader:
        """Return this thread's open file, and open it if necessary."""
        key = os.getpid(), threading.get_ident()
        handle = self._handles.get(key)
        if handle is None:
            # A forked process inherits the handles of its parent, and both would move the same
            # file position. The keys are copied first because other threads may add handles
            # during the loop.
            for inherited in list(self._handles):
                if inherited[0] != key[0]:
                    self._handles.pop(inherited, None)
            handle = self._handles[key] = self._open()
        return handle

    def _drop_handle(self) -> None:
        """Close this thread's handle after a read has failed.

        GDAL reports a mosaic's source that cannot be opened only once per handle; further reads of
        the same handle would return zeros.
        """
        handle = self._handles.pop((os.getpid(), threading.get_ident()), None)
        if handle is not None:
            handle.close()

    def _read_inside(self, column: int, row: int, width: int, height: int,
                     shape: Optional[Tuple[int, int]] = None, by_value: bool = True
                     ) -> Tuple[np.ndarray, np.ndarray]:
        shape = shape or (height, width)
        masked = self.bands if self.validity.mask == 'bands' else self.bands[:1]
        try:
            source, window = self._handle(), Window(column, row, width, height)
            with _environment(self.path, self.is_remote):
                values = source.read(self.bands, window=window,
                                     out_shape=(len(self.bands), *shape))
                valid = self.validity.apply(
                    values,
                    lambda: source.read(self.validity.alpha, window=window, out_shape=shape),
                    lambda: source.read_masks(masked, window=window,
                                              out_shape=(len(masked), *shape)), by_value)
        except RasterioIOError as error:
            self._drop_handle()
            raise self._block_error((column, row, width, height), error) from error
        return values, valid

    def _block_error(self, window: Box, error: Exception) -> Exception:
        """Return the error for a failed read: damaged blocks, or a server that did not deliver."""
        reason, cause = str(error.__cause__ or error), _first_cause(error)
        arrived = not self.is_remote or _DECODING.search(cause) is not None
        # If the server is at fault, reading block by block would wait for it again and again.
        damaged = self._damaged_blocks(window) if arrived else self._cut_blocks(window)
        if not (arrived or damaged):
            return RemoteReadError(
                f'{self.path}: the server did not deliver the window (column, row, width, height) '
                f'= {window} ({cause}). Try again; if it is slow, raise '
                f'GDAL_HTTP_LOW_SPEED_TIME={os.environ.get("GDAL_HTTP_LOW_SPEED_TIME")} and '
                f'GDAL_HTTP_TIMEOUT={os.environ.get("GDAL_HTTP_TIMEOUT")} seconds; if it is always '
                'the same window, the file may be damaged there: copy it here.')
        shown = ', '.join(map(str, damaged[:4])) + (' ...' if len(damaged) > 4 else '')
        return RasterBlockError(
            f'{self.path}: the window (column, row, width, height) = {window} cannot be decoded, '
            f'damaged are {len(damaged)} block(s): {shown or "none if read singly"} ({reason}). '
            'Copy the file again, or compare its checksum with the source.',
            self.path, window, damaged, reason)

    def _damaged_blocks(self, window: Box) -> List[Box]:
        """Return the blocks in a window that cannot be decoded, by reading each of them."""
        damaged = []
        for box in self._blocks_of(window):
            try:
                with _environment(self.path, self.is_remote):
                    self._handle().read(self.bands, window=Window(*box))
            except RasterioIOError:
                self._drop_handle()
                damaged.append(box)
        return damaged

    def _cut_blocks(self, window: Box) -> List[Box]:
        """Return the blocks of a TIFF on a server that would lie behind the end of the file.

        The file is cut off if its table of blocks refers to bytes that the server does not have.
        """
        size = vsi.size_in(vsi.headers(gdal_names.remote_file(self.path)))
        if size is None or gdal_names.is_packed(self.path):
            return []
        rows, columns = self.blocks
        cut = []
        for box in self._blocks_of(window):
            for band in self.bands:
                offset, length = (self._handle().get_tag_item(
                    f'BLOCK_{field}_{box[0] // columns}_{box[1] // rows}', 'TIFF', bidx=band)
                    for field in ('OFFSET', 'SIZE'))
                if offset and length and int(offset) + int(length) > size:
                    cut.append(box)
                    break
        return cut

    def _blocks_of(self, window: Box) -> Iterator[Box]:
        """Yield the blocks that a window meets."""
        column, row, width, height = window
        rows, columns = self.blocks
        for top in range(row // rows * rows, row + height, rows):
            for left in range(column // columns * columns, column + width, columns):
                yield left, top, min(columns, self.width - left), min(rows, self.height - top)


def open_file(path: PathName, mode: str = 'r', **profile: Any) -> Any:
    """Call ``rasterio.open``, without its warning about files that are not georeferenced.

    GDAL uses one thread for the file, whatever the value of ``GDAL_NUM_THREADS`` is.

    Raises:
        GeoError: If the name is not in UTF-8.
    """
    check_name(path)
    with _environment(str(path)), warnings.catch_warnings():
        warnings.simplefilter('ignore', NotGeoreferencedWarning)
        return rasterio.open(gdal_names.as_vsi(str(path)), mode, **profile)


def check_name(path: PathName) -> None:
    """Check that GDAL can open a file of this name.

    Raises:
        GeoError: If the name is not in UTF-8.
    """
    try:
        str(path).encode()
    except UnicodeEncodeError as error:
        raise GeoError(f'the name of {path} is not in UTF-8, the only encoding that GDAL takes. '
                       f'Rename it, for example with convmv -f gbk -t utf-8 --notest.') from error


def _environment(path: str, remote: Optional[bool] = None) -> rasterio.Env:
    """Return a context in which GDAL starts no threads, and lists no folders of a server.

    The dummy session keeps rasterio from looking for credentials. GDAL does that itself, in the
    environment and in the files of AWS and others, but only for file systems that need them.

    Args:
        path: Path of the file that is used in the context.
        remote: Whether the file is on a server; None to find out.
    """
    options: Dict[str, Any] = dict(_ONE_THREAD)
    if gdal_names.is_remote(path) if remote is None else remote:
        vsi.about_to_connect()
        options[_NO_LISTING[0]] = os.environ.get(*_NO_LISTING)
    return rasterio.Env(session=DummySession(), **options)


def _open_message(path: str, error: Exception) -> str:
    """Return the message for a file that cannot be opened, with the most likely cause."""
    driver = gdal_names.missing_driver(path)
    if driver:
        return (f'cannot open {path}: the GDAL of this rasterio ({rasterio.__gdal_version__}) has '
                f'no driver {driver} ({error}). Install rasterio where GDAL has it, for example '
                f'from conda-forge with libgdal-{driver.lower()}, or convert the file to GeoTIFF.')
    if gdal_names.is_remote(path):
        # The next attempt must ask the server again, because the file may exist then.
        vsi.forget(gdal_names.remote_file(path))
        hint = ('Copy the file here, or to a server that answers requests for parts of a file'
                if 'Range downloading not supported' in str(error) else
                'Check the address and your right to read it')
        return (f'cannot open {path}: the server does not deliver it ({error}). {hint}; '
                f'docs/datasets.md lists the names that work and the settings of timeouts and '
                f'access.')
    state = 'no raster that GDAL reads' if os.path.exists(path) else 'no such file'
    if gdal_names.local_file(path):
        state = 'no raster that GDAL reads in it'
    return (f'cannot open {path}: {state} ({error}); expected a GeoTIFF or another raster. Check '
            'the path, or copy the file again.')


def _list_subdatasets(source: rasterio.DatasetReader, path: str) -> str:
    """Return the message for a file that consists of several rasters."""
    names = list(source.subdatasets)
    shown = ', '.join(names[:6]) + f' and {len(names) - 6} more' * (len(names) > 6)
    return (f'{path} has no bands, but {len(names)} rasters: {shown or "none"}. '
            'Name one of them.')


def _check_sources(source: rasterio.DatasetReader, path: str) -> None:
    """Check that the local files of a mosaic, and of the mosaics in it, exist.

    Raises:
        GeoError: If a file is missing.
    """
    missing, seen, waiting = [], {path}, list(source.files)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if gdal_names.is_gdal_name(name):
            if not gdal_names.is_remote(name) and not gdal_names.local_file(name):
                missing.append(name)
        elif not os.path.exists(name):
            missing.append(name)
        elif name.lower().endswith('.vrt'):
            with open_file(name) as inner:
                waiting += inner.files
    if missing:
        shown = ', '.join(sorted(missing)[:4]) + (' ...' if len(missing) > 4 else '')
        raise GeoError(
            f'{path} is a mosaic of {len(seen) - 1} file(s), and {len(missing)} of them cannot be '
            f'found: {shown}. Copy them there, or rebuild the mosaic from the files that exist '
            f'(gdalbuildvrt); its gaps are then no data.')


def _first_cause(error: BaseException) -> str:
    """Return the text of the error at the beginning of the chain of causes."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error)


def to_map(transform: affine.Affine, pixels: np.ndarray) -> np.ndarray:
    """Return the map coordinates, float64 (N, 2), of positions (column, row) in pixels, (N, 2)."""
    a, b, c, d, e, f = transform[:6]
    x, y = pixels[:, 0], pixels[:, 1]
    return np.stack([a * x + b * y + c, d * x + e * y + f], 1)


def short_crs(crs: CRS) -> str:
    """Return the name of a CRS, shortened for a message."""
    return str(crs.to_string())[:60]


def _choose_bands(source: rasterio.DatasetReader, path: str, bands: Optional[Sequence[int]]
                  ) -> Tuple[int, ...]:
    """Return the bands to read: the requested ones, or all but alpha.

    Raises:
        GeoError: If the file lacks a requested band.
    """
    kinds = source.colorinterp
    if bands is None:
        return tuple(i for i in source.indexes
                     if kinds[i - 1] != ColorInterp.alpha) or tuple(source.indexes)
    chosen = tuple(int(band) for band in bands)
    missing = [band for band in chosen if band not in source.indexes]
    if missing or not chosen:
        existing = ', '.join(f'{i} ({source.descriptions[i - 1] or kinds[i - 1].name})'
                             for i in source.indexes)
        raise GeoError(f'{path} has no band {missing or "chosen"}, bands={list(chosen)} was asked '
                       f'for; it has {existing}. Count from 1 and name bands that it has.')
    return chosen


def _common_dtype(source: rasterio.DatasetReader, path: str, bands: Sequence[int]) -> np.dtype:
    names = sorted({source.dtypes[band - 1] for band in bands})
    if len(names) != 1 or np.dtype(names[0]).kind not in 'uif':
        raise GeoError(f'{path}: bands {list(bands)} hold {", ".join(names)}, expected one type of '
                       'real numbers for all; convert it, for example with gdal_translate -ot.')
    return np.dtype(names[0])
