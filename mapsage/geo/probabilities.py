"""Maps of the probabilities of all classes: a band a class, in steps that a GIS scales back."""
from __future__ import annotations

from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

import affine
import numpy as np
from rasterio.windows import Window

from mapsage.xml_text import xml_text

from .cog import checksum, disk_errors
from .raster import open_file

PROBABILITY_NODATA = 255
"""Value of a pixel without a prediction; the others are steps."""


class ProbabilityWriter:
    """Writer of a working file of probabilities, from any number of row strips.

    Each band has the name of its class as description, and the scale that turns its values into
    probabilities. ``write_cog`` gives the file its final form.

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

    def __init__(self, path: Any, width: int, height: int, names: Sequence[str], steps: int,
                 crs: Any = None, transform: Optional[affine.Affine] = None) -> None:
        self._path = str(path)
        self._written: List[Tuple[int, int, List[int]]] = []  # row, rows, checksum of each band
        with disk_errors(self._path):
            Path(self._path).unlink(missing_ok=True)  # see cog.py
            # Black is zero, or three bands would be red, green and blue, and a fourth alpha.
            self._file = open_file(
                self._path, 'w', driver='GTiff', width=width, height=height, count=len(names),
                dtype='uint8', nodata=PROBABILITY_NODATA, crs=crs, transform=transform, tiled=True,
                blockxsize=512, blockysize=512, compress='deflate', zlevel=1, interleave='band',
                photometric='minisblack', alpha='no', bigtiff='IF_SAFER')
            self._file.descriptions = tuple(map(xml_text, names))
            self._file.scales, self._file.offsets = [1 / steps] * len(names), [0.] * len(names)

    def write(self, row: int, values: np.ndarray) -> None:
        """Write a strip of rows, uint8 (classes, rows, width).

        Raises:
            GeoError: If the disk is full.
        """
        with disk_errors(self._path):
            self._file.write(values, window=Window(0, row, values.shape[2], values.shape[1]))
        self._written.append((row, values.shape[1], [checksum(plane) for plane in values]))

    def close(self) -> None:
        """Close the file and read it back, as ``ClassMapWriter.close`` does and why.

        Raises:
            GeoError: If it does not hold a strip as it was written.
        """
        with disk_errors(self._path):
            self._file.close()
            with open_file(self._path) as source:
                for row, height, sums in self._written:
                    window = Window(0, row, source.width, height)
                    if [checksum(source.read(band, window=window))
                            for band in source.indexes] != sums:
                        raise OSError(f'the rows from {row} on are not what was written')

    def __enter__(self) -> ProbabilityWriter:
        return self

    def __exit__(self, kind: Any, *exception: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()


def probabilities_path(path: Any) -> str:
    """Return the path of the probabilities that belong to a map: ``NAME_probabilities.tif``."""
    path = Path(path)
    return str(path.with_name(f'{path.stem}_probabilities{path.suffix}'))
