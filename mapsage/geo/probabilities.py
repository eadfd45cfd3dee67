"""Maps of the probabilities of all classes, with a band for each class.

A probability is stored as uint8 in equal steps, and the band's scale lets a GIS show the
probability. The writer makes a working file; `write_cog` in `cog.py` gives it its final form.
"""

from __future__ import annotations

from pathlib import Path
from typing import Optional, Sequence

import affine
import numpy as np
from rasterio.crs import CRS

from mapsage.base.files import xml_text

from .cog import StripWriter, disk_errors
from .errors import PathName

PROBABILITY_NODATA = 255
"""Value of a pixel without a prediction; smaller values are steps."""


class ProbabilityWriter(StripWriter):
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
        super().__init__(path)
        with disk_errors(self.path):
            # Without `minisblack`, GDAL would tag three bands as red, green and blue, and a fourth
            # band as alpha.
            self._file = self._open(
                self.path,
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
            )
            self._file.descriptions = tuple(map(xml_text, names))
            self._file.scales, self._file.offsets = [1 / steps] * len(names), [0.0] * len(names)

    def write(self, row: int, values: np.ndarray) -> None:
        """Write a strip of rows, uint8 (classes, rows, width).

        Raises:
            GeoError: If the disk is full.
        """
        self._write(self._file, row, values)


def probabilities_path(path: PathName) -> str:
    """Return the path of the probabilities that belong to a map: ``NAME_probabilities.tif``."""
    path = Path(path)
    return str(path.with_name(f'{path.stem}_probabilities{path.suffix}'))
