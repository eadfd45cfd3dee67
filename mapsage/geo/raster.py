"""Windows of raster scenes of any size: values, valid pixels, and errors that name a block.

`Raster` is the only reader of scenes in MapSage. It can be used in forked workers and threads,
because every process and thread opens a file when it first reads (`file_handles.py`). Which pixels
are valid is decided in `pixel_validity.py`, what a failed read means in `read_failures.py`.

Shapes:
    Box       (column, row, width, height) in pixels; may reach beyond the scene
    values    (bands, height, width) in the file's dtype, 0 where invalid
    valid     (height, width) bool
"""

from __future__ import annotations

import copy
import os
from contextlib import nullcontext
from typing import (
    TYPE_CHECKING,
    Any,
    ContextManager,
    Dict,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
)

import affine
import numpy as np
import rasterio
from rasterio.crs import CRS
from rasterio.enums import ColorInterp
from rasterio.errors import RasterioIOError
from rasterio.windows import Window

from mapsage.base.console import shorten_list

from . import gdal_names
from .errors import Box, GeoError, PathName
from .file_handles import FileHandles, FileStates
from .gdal_files import check_sources, gdal_environment, open_file
from .pixel_validity import PixelValidity, nodata_values
from .read_failures import BlockGrid, FailedRead
from .reference_systems import check_proj_database, same_crs
from .vrt_gaps import SourceCover, find_cover

if TYPE_CHECKING:
    from .scene_facts import SceneFacts

# WKT -> the CRS that rasters with this WKT share.
_shared_crs: Dict[str, CRS] = {}
_MOST_SHARED = 256
# Suffixes of companion files, which GDAL reads with a file and which may appear later.
_COMPANIONS = ('.msk', '.ovr', '.aux.xml')


class Header(NamedTuple):
    """What a file states about all of its bands, alpha included, and its tags."""

    descriptions: Tuple[Optional[str], ...]
    colors: Tuple[str, ...]
    scales: Tuple[float, ...]
    offsets: Tuple[float, ...]
    tags: Dict[str, str]


class Unit(NamedTuple):
    """Scale and offset that turn values into others: values * scale + offset."""

    scale: float
    offset: float

    def __str__(self) -> str:
        return f'scale {self.scale:.6g} and offset {self.offset:.6g}'


class Conversion(NamedTuple):
    """How values of a file become those that are read.

    Attributes:
        units: Unit of each band, or one for all; the result is float32.
        keeps_type: Whether values keep their type, and do not fall below 0; scales are 1 then.
    """

    units: Tuple[Unit, ...]
    keeps_type: bool = False

    def apply(self, values: np.ndarray, valid: np.ndarray) -> np.ndarray:
        """Return converted values (bands, height, width), 0 where they are not valid."""
        scales, offsets = np.array(self.units, np.float32).T[..., None, None]
        if self.keeps_type:
            shifts = (-offsets).astype(values.dtype)
            return np.maximum(values, shifts) - shifts
        return np.where(valid, values * scales + offsets, 0).astype(np.float32, copy=False)

    def __str__(self) -> str:
        texts = (
            f'{-unit.offset:.6g} taken off' if self.keeps_type else str(unit) for unit in self.units
        )
        return ', '.join(dict.fromkeys(texts))


class Raster:
    """A raster file that is read by windows, from any process and thread.

    A raster can be pickled and forked: each process and thread opens a separate file handle at its
    first read. ``close()``, or leaving the raster's ``with`` block, closes the handles of the
    calling process.

    Args:
        path: Path of a file that GDAL reads, or any name that it opens (``gdal_names``).
        bands: Band numbers, counted from 1 as in GDAL, in the order in which ``read`` returns them;
            default: all but an alpha band. An alpha band in this list is read as data, because many
            programs tag the fourth of four bands as alpha although it is infrared.
        keep_open: Whether the file stays open for reads that follow. Opening it again takes about
            half a millisecond.
        conversion: Conversion of the values that are read (``scene_facts.open_scene``), or None.

    Attributes:
        width: Width in pixels.
        height: Height in pixels.
        bands: Band numbers that ``read`` returns, counted from 1.
        dtype: Data type of the values that are read, the same for all bands.
        header: What the file states about its bands.
        scene: Facts of the scene, if ``open_scene`` opened it.
        crs: Coordinate reference system (``rasterio.crs.CRS``), or None.
        transform: Affine map (``affine.Affine``) from (column, row) of a pixel's corner to
            coordinates of ``crs``.
        may_have_gaps: Whether a pixel may be invalid; False only if all are known to be valid.
        control_points: Number of ground control points. They do not count as a georeference.
        is_georeferenced: Whether the file has both a CRS and a transform. If False, positions in
            the scene are known in pixels only.
        nodata: Value that means "no data" in the first of ``bands``, or None.
        validity: What makes pixels invalid.
        is_remote: Whether the pixels come from a server.

    Raises:
        GeoError: If the file cannot be opened, a band is missing, or a mosaic (VRT) refers to a
            missing file.
    """

    scene: Optional[SceneFacts] = None

    def __init__(
        self,
        path: PathName,
        bands: Optional[Sequence[int]] = None,
        keep_open: bool = False,
        conversion: Optional[Conversion] = None,
    ) -> None:
        self.path = str(path)
        self.conversion = conversion
        self.is_remote = gdal_names.is_remote(self.path)
        self._handles = FileHandles(self.path)
        self._files: Optional[List[str]] = None
        # On a server there is nothing to look at without a request.
        local = '' if self.is_remote else gdal_names.local_file(self.path)
        companions = [local + suffix for suffix in _COMPANIONS] if local else []
        self._states = FileStates([local] if local else [], companions)
        self._is_pooled = False
        source = self._handles.get()
        try:
            if not source.count:
                raise GeoError(_list_subdatasets(source, self.path))
            if source.driver == 'VRT':
                sources = check_sources(source, self.path)
                self._states = FileStates([*([local] if local else []), *sources], companions)
            self.bands = _choose_bands(source, self.path, bands)
            self.width, self.height = int(source.width), int(source.height)
            self.dtype = _common_dtype(source, self.path, self.bands)
            if source.transform != affine.identity or source.gcps[0]:
                check_proj_database()
            self.crs = _share_crs(source.crs) if source.crs else None
            self.control_points = len(source.gcps[0])
            self.transform: affine.Affine = source.transform
            self.nodata: Optional[float] = nodata_values(source)[self.bands[0] - 1]
            self.blocks: Tuple[int, int] = source.block_shapes[self.bands[0] - 1]
            self.validity = PixelValidity.of(source, self.bands, self.dtype)
            self.header = Header(
                source.descriptions,
                tuple(kind.name for kind in source.colorinterp),
                source.scales,
                source.offsets,
                source.tags(),
            )
            # Where the sources of a mosaic show something; None without gaps.
            self._cover: Optional[List[SourceCover]] = find_cover(
                source, self.path, self.bands, self.validity.may_hide_in_file
            )
            # Reads of such a file, which is open, start no threads and open no further file, so
            # they need no environment, which costs as much as copying a decoded window.
            self._reads_plainly = (
                source.driver == 'GTiff' and not self.is_remote and self.validity.mask is None
            )
        finally:
            if not keep_open:
                self._handles.close()
        if conversion is not None and not conversion.keeps_type:
            self.dtype = np.dtype(np.float32)
        self.may_have_gaps = self.validity.may_hide or self._cover is not None
        self.is_georeferenced = self.crs is not None and self.transform != affine.identity

    @property
    def georeference_gap(self) -> str:
        """The rest of a sentence that begins with the path, such as 'has no georeference'."""
        if not self.control_points:
            return (
                'has no georeference'
                if self.crs is None
                else 'has no georeference (a CRS, and no transform)'
            )
        return (
            f'has no georeference, but {self.control_points} ground control points (gdalwarp '
            f'-r bilinear IN OUT.tif makes a georeferenced scene of them)'
        )

    def read(self, column: int, row: int, width: int, height: int) -> Tuple[np.ndarray, np.ndarray]:
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

    def read_with_nodata(
        self, column: int, row: int, width: int, height: int
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window as :meth:`read` does, but treat the no-data value like any other value."""
        return self._read_window(column, row, width, height, by_value=False)

    def _read_window(
        self, column: int, row: int, width: int, height: int, by_value: bool = True
    ) -> Tuple[np.ndarray, np.ndarray]:
        left, top = max(column, 0), max(row, 0)
        right, bottom = min(column + width, self.width), min(row + height, self.height)
        if (left, top, right, bottom) == (column, row, column + width, row + height):
            return self._read_inside(column, row, width, height, by_value=by_value)
        values = np.zeros((len(self.bands), height, width), self.dtype)
        valid = np.zeros((height, width), bool)
        if right > left and bottom > top:
            inside = np.s_[top - row : bottom - row, left - column : right - column]
            values[(slice(None), *inside)], valid[inside] = self._read_inside(
                left, top, right - left, bottom - top, by_value=by_value
            )
        return values, valid

    def read_reduced(
        self, factor: int, row: int = 0, height: Optional[int] = None
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
        return dict(
            grid=dict(
                crs=None if self.crs is None else self.crs.to_string(),
                transform=list(self.transform)[:6],
            ),
            validity=dict(
                self.validity.facts(), **(dict(gaps=True) if self._cover is not None else {})
            ),
            **({} if self.conversion is None else dict(conversion=self.conversion)),
            **(dict(bands=list(self.bands)) if self.scene and self.scene.reordered else {}),
        )

    def images(self) -> Iterator[Tuple[str, Raster]]:
        """Yield the images of which the raster consists, with the names of their sensors.

        A scene is its image, and its sensor is ``''``.
        """
        yield '', self

    def for_preview(self) -> Raster:
        """Return the raster that a picture shows: this one, or one image of several."""
        return self

    def files(self) -> List[str]:
        """Return the paths of all files that the pixels come from, such as the sources of a VRT.

        Masks (``.msk``) and world files are included. ``.aux.xml`` and overviews are not: see
        :meth:`facts`. The files are listed once, with the file handle that is open, if any.
        """
        if self._files is None:
            self._files = self._find_files()
        return list(self._files)

    def _find_files(self) -> List[str]:
        """Return the paths of all files that the pixels come from."""
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
            if path == first:
                waiting += self._listed_files()
            elif path.lower().endswith('.vrt'):
                with open_file(path) as source, gdal_environment(path):
                    waiting += source.files
        return list(paths)

    def pool(self) -> Raster:
        """Return this raster, which does not look for changes itself from now on."""
        self._is_pooled = True
        return self

    def refresh(self) -> None:
        """Read the header again if a file has changed since, and take it over."""
        if self._states.may_have_changed():
            # Only the handle of this thread: others may be reading from theirs.
            self._handles.drop()
            self.__dict__.update(
                Raster(self.path, self.bands, True, self.conversion).__dict__,
                _is_pooled=self._is_pooled,
            )

    def _read_changed(self) -> None:
        """Read the header of a file that has changed; the pixels are then read from the new file.

        Raises:
            GeoError: If it is another grid, type or CRS, on which the windows are no longer right.
        """
        before = copy.copy(self)
        self.refresh()
        changed = [
            name
            for name in ('width', 'height', 'dtype', 'transform')
            if getattr(before, name) != getattr(self, name)
        ]
        changed += [] if same_crs(before.crs, self.crs) else ['CRS']
        if changed:
            self.__dict__.update(before.__dict__)
            raise GeoError(
                f'{self.path} was written again since it was opened, with another '
                f'{" and ".join(changed)}; build the dataset, mosaic or map anew.'
            )

    def _listed_files(self) -> List[str]:
        """Return the files that GDAL counts as parts of this raster."""
        was_open = self._handles.is_open()
        try:
            with gdal_environment(self.path, self.is_remote):
                return list(self._handles.get().files)
        finally:
            if not was_open:
                self._handles.drop()

    def with_other_handles(self) -> Raster:
        """Return this raster with file handles apart from those of this object."""
        other = copy.copy(self)
        other._handles = FileHandles(self.path)
        return other

    def close(self) -> None:
        """Close the handles of this process; a later read opens a new one."""
        self._handles.close()
        for cover in self._cover or ():
            cover.close()

    def __enter__(self) -> Raster:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _read_inside(
        self,
        column: int,
        row: int,
        width: int,
        height: int,
        shape: Optional[Tuple[int, int]] = None,
        by_value: bool = True,
    ) -> Tuple[np.ndarray, np.ndarray]:
        # A reduced window may come from an overview in another file, which GDAL opens now.
        environment: ContextManager[object] = (
            nullcontext()
            if self._reads_plainly and shape is None
            else gdal_environment(self.path, self.is_remote)
        )
        if not self._is_pooled and self._states.may_have_changed():
            self._read_changed()
        shape = shape or (height, width)
        masked = self.bands if self.validity.mask == 'bands' else self.bands[:1]
        try:
            source, window = self._handles.get(), Window(column, row, width, height)
            with environment:
                values = source.read(self.bands, window=window, out_shape=(len(self.bands), *shape))
                valid = self.validity.apply(
                    values,
                    lambda: source.read(self.validity.alpha, window=window, out_shape=shape),
                    lambda: source.read_masks(
                        masked, window=window, out_shape=(len(masked), *shape)
                    ),
                    by_value,
                )
                if self._cover is not None:
                    self._hide_gaps(values, valid, (column, row, width, height))
        except RasterioIOError as error:
            self._handles.drop()
            raise FailedRead(
                self._handles,
                self.is_remote,
                self.bands,
                BlockGrid(self.width, self.height, *self.blocks),
                (column, row, width, height),
            ).explain(error) from error
        if self.conversion is not None:
            values = self.conversion.apply(values, valid)
        return values, valid

    def _hide_gaps(self, values: np.ndarray, valid: np.ndarray, window: Box) -> None:
        """Make the pixels of a window that no source of a mosaic shows invalid, and 0."""
        xs, ys = (
            first + (np.arange(count) + 0.5) * (length / count)
            for first, length, count in (
                (window[0], window[2], valid.shape[1]),
                (window[1], window[3], valid.shape[0]),
            )
        )
        covered = np.zeros(valid.shape, bool)
        for cover in self._cover or ():
            covered |= cover.covered(xs, ys)
        if not covered.all():
            valid &= covered
            np.copyto(values, 0, where=~covered)


def _list_subdatasets(source: rasterio.DatasetReader, path: str) -> str:
    """Return the message for a file that consists of several rasters."""
    names = list(source.subdatasets)
    shown = shorten_list(names, 6)
    return f'{path} has no bands, but {len(names)} rasters: {shown or "none"}. Name one of them.'


def _share_crs(crs: CRS) -> CRS:
    """Return the CRS of an earlier raster with the same WKT, which rasterio makes it from.

    A CRS consists of hundreds of small blocks of PROJ's memory. With one CRS for each of thousands
    of scenes, every further file would take longer to open, because the allocator searches the gaps
    between them.
    """
    if len(_shared_crs) >= _MOST_SHARED:
        _shared_crs.clear()
    return _shared_crs.setdefault(crs.to_wkt(), crs)


def _choose_bands(
    source: rasterio.DatasetReader, path: str, bands: Optional[Sequence[int]]
) -> Tuple[int, ...]:
    """Return the bands to read: the requested ones, or all but alpha.

    Raises:
        GeoError: If the file lacks a requested band.
    """
    kinds = source.colorinterp
    if bands is None:
        return tuple(i for i in source.indexes if kinds[i - 1] != ColorInterp.alpha) or tuple(
            source.indexes
        )
    chosen = tuple(int(band) for band in bands)
    missing = [band for band in chosen if band not in source.indexes]
    if missing or not chosen:
        existing = ', '.join(
            f'{i} ({source.descriptions[i - 1] or kinds[i - 1].name})' for i in source.indexes
        )
        raise GeoError(
            f'{path} has no band {missing or "chosen"}, bands={list(chosen)} was asked '
            f'for; it has {existing}. Count from 1 and name bands that it has.'
        )
    return chosen


def _common_dtype(source: rasterio.DatasetReader, path: str, bands: Sequence[int]) -> np.dtype:
    names = sorted({source.dtypes[band - 1] for band in bands})
    # NumPy has no type of GDAL's complex integers.
    if len(names) != 1 or not names[0].startswith(('uint', 'int', 'float')):
        raise GeoError(
            f'{path}: bands {list(bands)} hold {", ".join(names)}, expected one type of '
            'real numbers for all; convert it, for example with gdal_translate -ot.'
        )
    return np.dtype(names[0])
