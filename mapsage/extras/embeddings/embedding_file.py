"""Files of embeddings: written as Cloud Optimized GeoTIFFs, read from MapSage and from others.

A file has a band for each component (`A00`, `A01`, ...), int8, no data -128, as AlphaEarth
Foundations publishes them. The tag `MAPSAGE_EMBEDDING` says what the vectors are (`identity`), and
how to turn them into numbers. `EmbeddingFile` reads these files, AlphaEarth's own, and the GeoTIFFs
of GeoTessera, which are float32 without a value for no data. A file of another tool is refused,
because the bytes alone do not tell their scale.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

import affine
import numpy as np
import rasterio
import rasterio.shutil
from rasterio.crs import CRS
from rasterio.windows import Window

from mapsage.base.files import parse_json
from mapsage.geo import Raster
from mapsage.geo.cog import StripWriter, disk_errors, temporary_beside
from mapsage.geo.errors import PathName
from mapsage.geo.gdal_files import open_file

from .errors import EmbeddingError
from .vectors import NO_DATA, SCHEME, dequantize, halve, to_unit

TAG = 'MAPSAGE_EMBEDDING'
# Bytes of all bands of a tile, which whoever reads one pixel decodes.
_TILE_BYTES, _TILES = 16 << 20, (512, 256, 128, 64)
_ALPHA_EARTH, _TESSERA = 64, 'Tessera_Band_'


def band_names(dims: int) -> List[str]:
    """Return the names of the bands: ``A00``, ``A01``, ..., with as many digits as they need."""
    digits = max(2, len(str(dims - 1)))
    return [f'A{number:0{digits}d}' for number in range(dims)]


def tile_side(dims: int) -> int:
    """Return the side of a file's tiles in pixels: smaller, the more bands a tile has."""
    return next((side for side in _TILES if side * side * dims <= _TILE_BYTES), _TILES[-1])


class EmbeddingWriter(StripWriter):
    """Writer of an embedding, in any number of row strips, with its overviews.

    The strips go into working files, ``path`` and ``path.ovr`` and so on: GDAL takes the overviews
    from there, because no resampling of its own gives vectors of unit length.

    Args:
        path: Path of the working GeoTIFF, which is overwritten.
        width, height: Size of the embedding in pixels.
        dims: Number of bands.
        crs: Coordinate reference system, or None.
        transform: Affine map from (column, row) to coordinates, or None.
        facts: What the vectors are, JSON values for the tag of the file.

    Raises:
        GeoError: If the disk is full.
    """

    def __init__(
        self,
        path: PathName,
        width: int,
        height: int,
        dims: int,
        crs: Optional[CRS],
        transform: Optional[affine.Affine],
        facts: Mapping[str, Any],
    ) -> None:
        super().__init__(path)
        self._grid = dict(crs=crs, transform=transform)
        with disk_errors(self.path):
            self._file = self._create(self.path, width, height, dims)
            self._file.descriptions = tuple(band_names(dims))
            self._file.update_tags(**{TAG: json.dumps(facts)})

    def _create(self, path: str, width: int, height: int, dims: int, **grid: Any) -> Any:
        # In rows and without compression: strips are written once, and tiles read from any rows.
        return self._open(
            path,
            width=width,
            height=height,
            count=dims,
            dtype='int8',
            nodata=NO_DATA,
            interleave='band',
            photometric='minisblack',
            alpha='no',
            **{**self._grid, **grid},
        )

    def write(self, row: int, vectors: np.ndarray) -> None:
        """Write a strip of rows, int8 (dims, rows, width).

        Raises:
            GeoError: If the disk is full.
        """
        self._write(self._file, row, vectors)

    def close(self) -> None:
        """Close the file, read it back, and write the overviews beside it.

        Raises:
            GeoError: If the file differs from what was written.
        """
        super().close()
        path = self.path
        while self._write_overview(path):
            path += '.ovr'

    def _write_overview(self, path: str) -> bool:
        """Write the file ``path.ovr`` of half the size; return whether it was worthwhile."""
        with disk_errors(path), open_file(path) as source:
            tile = tile_side(source.count)
            if max(source.width, source.height) <= tile:
                return False
            width, height = -(-source.width // 2), -(-source.height // 2)
            with self._create(
                f'{path}.ovr', width, height, source.count, crs=None, transform=None
            ) as target:
                for row in range(0, source.height, tile):
                    rows = min(tile, source.height - row)
                    halved = halve(source.read(window=Window(0, row, source.width, rows)))
                    target.write(halved, window=Window(0, row // 2, width, halved.shape[1]))
        return True


def write_cog(working_path: PathName, destination: PathName) -> None:
    """Convert a working file with its overviews into a Cloud Optimized GeoTIFF.

    The file is written in a temporary folder next to ``destination``, compared, and then renamed.

    Raises:
        GeoError: If the disk has too little space, or the working file is damaged.
    """
    destination = Path(destination)
    with temporary_beside(destination) as folder:
        temporary = folder / destination.name
        with disk_errors(destination):
            with open_file(working_path) as source:
                tile = tile_side(source.count)
            rasterio.shutil.copy(
                str(working_path),
                str(temporary),
                driver='COG',
                compress='DEFLATE',
                blocksize=tile,
                overviews='AUTO',
                num_threads='ALL_CPUS',
                bigtiff='IF_SAFER',
            )
            with open_file(working_path) as source, open_file(temporary) as copy:
                for window in tiles(source.width, source.height, tile):
                    if not np.array_equal(source.read(window=window), copy.read(window=window)):
                        raise OSError(f'the pixels of {window} are not what was written')
            os.replace(temporary, destination)


def tiles(width: int, height: int, side: int) -> Iterator[Window]:
    """Yield the tiles of a raster, row by row."""
    for row in range(0, height, side):
        for column in range(0, width, side):
            yield Window(column, row, min(side, width - column), min(side, height - row))


class EmbeddingFile:
    """An embedding on disk.

    Args:
        path: GeoTIFF of mapsage embed, of AlphaEarth Foundations or of GeoTessera, or a name that
            GDAL opens.

    Attributes:
        path: The path.
        raster: The opened file.
        kind: ``mapsage``, ``alphaearth`` or ``tessera``.
        dims: Number of components.
        identity: What the vectors are: encoder, weights, layer, principal components; or dataset
            and version. Only vectors of one identity can be compared.
        facts: Content of the tag of a file of MapSage; empty for others.

    Raises:
        GeoError: If the file cannot be opened.
        EmbeddingError: If it is none of these files.
    """

    def __init__(self, path: PathName) -> None:
        self.path = str(path)
        # Each band is a component; a fourth one is no alpha.
        with Raster(self.path) as opened:
            total = max(opened.bands)
        self.raster = Raster(self.path, range(1, total + 1))
        self.dims = len(self.raster.bands)
        with open_file(self.path) as source:
            tags, names = source.tags(), [str(name) for name in source.descriptions]
        self.facts: Dict[str, Any] = {}
        if TAG in tags:
            self.kind, self.facts = 'mapsage', self._parse(tags[TAG])
            self.identity: Dict[str, Any] = self.facts['identity']
        elif all(name.startswith(_TESSERA) for name in names) and self.raster.dtype.kind == 'f':
            self.kind = 'tessera'
            version = tags.get('TESSERA_DATASET_VERSION') or tags.get('GEOTESSERA_VERSION', '?')
            self.identity = dict(
                dataset='TESSERA',
                version=version,
                variant=tags.get('TESSERA_DATASET_VARIANT', ''),
                bands=[name[len(_TESSERA) :] for name in names],
            )
        elif (self.raster.dtype, self.raster.nodata) == (np.int8, NO_DATA) and (
            names == band_names(_ALPHA_EARTH)
        ):
            self.kind, self.identity = 'alphaearth', dict(dataset='AlphaEarth Foundations')
        else:
            raise EmbeddingError(self._describe_stranger(names))

    def _parse(self, text: str) -> Dict[str, Any]:
        try:
            facts = parse_json(text)
        except ValueError:
            facts = None
        if (
            not isinstance(facts, dict)
            or not isinstance(facts.get('identity'), dict)
            or facts.get('dequantize') != SCHEME
            or self.raster.dtype != np.int8
        ):
            raise EmbeddingError(
                f'{self.path}: its tag {TAG} is {text[:60]!r}, expected the identity of the vectors '
                f'and dequantize={SCHEME!r}, in a file of int8. Make the file again with mapsage '
                f'embed.'
            )
        return facts

    def _describe_stranger(self, names: Sequence[str]) -> str:
        shown = ', '.join(names[:3]) + ', ...' * (len(names) > 3)
        return (
            f'{self.path} has {self.dims} band(s) of {self.raster.dtype} ({shown}), and nothing that '
            f'says how its values become vectors: it is no file of mapsage embed (tag {TAG}), of '
            f'AlphaEarth (int8, bands A00 to A63, no data -128) or of GeoTessera (float, bands '
            f'{_TESSERA}0, ...). Convert it with the tool that wrote it.'
        )

    def read_stored(
        self, column: int, row: int, width: int, height: int, factor: int = 1
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Return what :meth:`read` does, in the values that :meth:`decode` takes.

        Args:
            column, row, width, height: Window in pixels; inside the file for a factor above 1.
            factor: Number of pixels, in each direction, of which one is taken, from an overview if
                the file has a suitable one.
        """
        if factor == 1:
            values, valid = self.raster.read(column, row, width, height)
        else:
            shape = -(-height // factor), -(-width // factor)
            with open_file(self.path) as source:
                window = Window(column, row, width, height)
                values = source.read(window=window, out_shape=(self.dims, *shape))
            valid = np.ones(shape, bool)
        if self.kind != 'tessera':
            return values, valid & (values[0] != NO_DATA)
        # No value is reserved: ground without an embedding is zero or not a number.
        valid &= np.isfinite(values).all(0) & (values != 0).any(0)
        return np.where(valid, values, 0).astype(np.float32), valid

    def decode(self, values: np.ndarray) -> np.ndarray:
        """Return float32 vectors of stored values; those without data have no meaning."""
        return values if self.kind == 'tessera' else dequantize(values)

    def read(self, column: int, row: int, width: int, height: int) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window in pixels, which may reach beyond the file.

        Returns:
            ``(dims, height, width)`` float32, 0 without data; and ``(height, width)`` bool, where
            there is data.
        """
        values, valid = self.read_stored(column, row, width, height)
        return np.where(valid, self.decode(values), np.float32(0)), valid

    def read_unit(
        self, column: int, row: int, width: int, height: int
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Return what :meth:`read` does, with vectors of length 1 also after rounding."""
        vectors, valid = self.read(column, row, width, height)
        return to_unit(vectors), valid


def read_embeddings(
    path: PathName, window: Optional[Tuple[int, int, int, int]] = None
) -> np.ndarray:
    """Return the vectors of an embedding, NaN without data.

    Args:
        path: As for :class:`EmbeddingFile`.
        window: Column, row, width and height in pixels; default: the whole file.

    Returns:
        ``(dims, height, width)`` float32.

    Raises:
        GeoError, EmbeddingError: If the file cannot be read, or is no embedding.
    """
    file = EmbeddingFile(path)
    with file.raster:
        vectors, valid = file.read(*(window or (0, 0, file.raster.width, file.raster.height)))
    return np.where(valid, vectors, np.float32(np.nan))


def check_one_identity(files: Sequence[EmbeddingFile]) -> None:
    """Raise EmbeddingError unless the vectors of all files are of one encoder."""
    first = files[0]
    for file in files[1:]:
        different = [
            name
            for name in {**first.identity, **file.identity}
            if first.identity.get(name) != file.identity.get(name)
        ]
        if different:
            name = different[0]
            raise EmbeddingError(
                f'{first.path} and {file.path} hold vectors of two kinds, which cannot be '
                f'compared: {", ".join(different)} differ ({first.identity.get(name)} and '
                f'{file.identity.get(name)}). Classify them one by one, or embed the scenes again '
                f'with the same config, checkpoint, --layer and --pca.'
            )
