"""Maps of the probabilities of all classes, with a band for each class.

A probability is stored as uint8 in equal steps, and the band's scale lets a GIS show the
probability. The writer makes a working file; `write_cog` in `cog.py` gives it its final form.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import List, Optional, Sequence, Tuple, Type

import affine
import numpy as np
from rasterio.crs import CRS
from rasterio.windows import Window

from mapsage.base.files import xml_text

from .cog import checksum, disk_errors
from .errors import PathName
from .gdal_files import open_file

PROBABILITY_NODATA = 255
"""Value of a pixel without a prediction; smaller values are steps."""


class ProbabilityWriter:
    """Writer of a working file of probabilities, in any number of row strips.

    Each band has the name of its class as description, and a scale that converts its values to
    probabilities.

    Args:
        path: Path of the working GeoTIFF, which is overwritten.
        width: Width of the map in pixels.
        height: Height of the map in pixels.
        names: Names of the classes.
        steps: Value that stands for probability 1, at most 254.
        crs: Coordinate reference system (``rasterio.crs.CRS``), or None.
        transform: Affine map from (column, row) to coordinates, or None.

    Raises:
        GeoError: If the folder does not exist or the disk is full.
    """

    def __init__(
        self,
        path: PathName,
        width: int,
        height: int,
        names: Sequence[str],
        steps: int,
        crs: Optional[CRS] = None,
        transform: Optional[affine.Affine] = None,
    ) -> None:
        self._path = str(path)
        # Strips: first row, number of rows, checksum of each band.
        self._written: List[Tuple[int, int, List[int]]] = []
        with disk_errors(self._path):
            # rasterio 1.3 opens an existing file first, and fails if a stopped run left it cut off.
            Path(self._path).unlink(missing_ok=True)
            # Without `minisblack`, GDAL would tag three bands as red, green and blue, and a fourth
            # band as alpha.
            self._file = open_file(
                self._path,
                'w',
                driver='GTiff',
                width=width,
                height=height,
                count=len(names),
                dtype='uint8',
                nodata=PROBABILITY_NODATA,
                crs=crs,
                transform=transform,
                tiled=True,
                blockxsize=512,
                blockysize=512,
                compress='deflate',
                zlevel=1,
                interleave='band',
                photometric='minisblack',
                alpha='no',
                bigtiff='IF_SAFER',
            )
            self._file.descriptions = tuple(map(xml_text, names))
            self._file.scales, self._file.offsets = [1 / steps] * len(names), [0.0] * len(names)

    def write(self, row: int, values: np.ndarray) -> None:
        """Write a strip of rows, uint8 (classes, rows, width).

        Raises:
            GeoError: If the disk is full.
        """
        with disk_errors(self._path):
            self._file.write(values, window=Window(0, row, values.shape[2], values.shape[1]))
        self._written.append((row, values.shape[1], [checksum(plane) for plane in values]))

    def close(self) -> None:
        """Close the file and read it back, for the reason given in ``ClassMapWriter.close``.

        Raises:
            GeoError: If the file differs from what was written.
        """
        with disk_errors(self._path):
            self._file.close()
            with open_file(self._path) as source:
                for row, height, sums in self._written:
                    window = Window(0, row, source.width, height)
                    if [
                        checksum(source.read(band, window=window)) for band in source.indexes
                    ] != sums:
                        raise OSError(f'the rows from {row} on are not what was written')

    def __enter__(self) -> ProbabilityWriter:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def probabilities_path(path: PathName) -> str:
    """Return the path of the probabilities that belong to a map: ``NAME_probabilities.tif``."""
    path = Path(path)
    return str(path.with_name(f'{path.stem}_probabilities{path.suffix}'))
