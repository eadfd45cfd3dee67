"""A class map with its confidence and probabilities, read window by window.

The three files are those that `mapsage predict` writes: NAME.tif, NAME_confidence.tif and
NAME_probabilities.tif. Any other class map works too, without the last two. Areas are measured on
the ellipsoid, so a pixel of a map in degrees counts for less toward the poles, and one of a
conformal map for its scale there.

Shapes:
    classes         (rows, columns) int16 class index, -1 without data
    level           (rows, columns) uint8 confidence in percent, 0 without a confidence file
    probabilities   (K, rows, columns) float32
    pixel_area      (rows, columns) float64 area of each pixel, in `unit`; may be a read-only view
"""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, List, NamedTuple, Optional, Sequence

import numpy as np
import shapely

from mapsage.base.files import xml_text
from mapsage.geo import CONFIDENCE_NODATA, Raster, read_classes, same_crs, to_map
from mapsage.geo.ellipsoid import EllipsoidArea
from mapsage.geo.errors import Box
from mapsage.geo.gdal_files import open_file
from mapsage.geo.outlines import walk

from .errors import AssessError

# Side of a window in pixels, a multiple of the tiles of Cloud Optimized GeoTIFFs.
_SIDE = 1024
# Share by which areas along a row may differ and still count as equal.
_EVEN = 1e-5
# Share by which areas of the rows of a window may differ for a parabola to be exact enough.
_UNEVEN_ROWS = 0.01
LEVELS = 101
"""Number of levels of confidence: 0 to 100 percent."""


class MapWindow(NamedTuple):
    """A window of a map; see the shapes of the module."""

    box: Box
    classes: np.ndarray
    level: np.ndarray
    probabilities: Optional[np.ndarray]
    pixel_area: np.ndarray


class MapReader:
    """A class map and the files that belong to it.

    Args:
        path: Path of the class map, one band of uint8.
        confidence: Path of its confidence; None for no confidence.
        probabilities: Path of its probabilities; None for no probabilities.
        nodata: Values of the map that count as no data, in addition to what the file hides.

    Attributes:
        class_names: Names of the classes; a map without names has the values as names.
        has_names: Whether the file names its classes.
        unit: ``'m2'``, or ``'px'`` for a map without georeference.

    Raises:
        AssessError: If the map is no class map, or another file does not belong to it.
        GeoError: If a file cannot be opened.
    """

    def __init__(
        self,
        path: str,
        confidence: Optional[str] = None,
        probabilities: Optional[str] = None,
        nodata: Sequence[int] = (),
    ) -> None:
        self.path, self.raster = path, Raster(path)
        if len(self.raster.bands) != 1 or self.raster.dtype != np.uint8:
            raise AssessError(
                f'{path} has {len(self.raster.bands)} band(s) of {self.raster.dtype}, expected a '
                'class map: one band of uint8. Convert it, for example with gdal_translate -b 1 '
                '-ot Byte.'
            )
        self._confidence = None if confidence is None else self._companion(confidence)
        self._probabilities = None if probabilities is None else self._companion(probabilities)
        self._nodata = tuple(nodata)
        named = read_classes(path)
        values = [int(entry['value']) for entry in named] or list(range(256))
        self.has_names = bool(named)
        self.class_names = (
            _distinct([xml_text(entry['name']) for entry in named], values)
            if named
            else list(map(str, values))
        )
        # Class index of each value.
        self._index = np.full(256, -1, np.int16)
        self._index[values] = np.arange(len(values))
        if self._probabilities is not None:
            if len(self._probabilities.bands) != len(self.class_names):
                raise AssessError(
                    f'{probabilities} has {len(self._probabilities.bands)} band(s), {path} has '
                    f'{len(self.class_names)} classes: the probabilities do not belong to this '
                    'map. Name the file that mapsage predict --probabilities wrote with it.'
                )
            with open_file(self._probabilities.path) as file:
                self._scale = np.array(file.scales, np.float32)
        crs = (
            self.raster.crs.to_wkt()
            if (self.raster.crs is not None and self.raster.is_georeferenced)
            else None
        )
        self._area = EllipsoidArea(
            crs, self.raster.transform, self.raster.width, self.raster.height
        )
        self.unit = 'm2' if np.isfinite(self._row_area((0, 0, 1, 1))).all() else 'px'

    @property
    def crs(self) -> Optional[str]:
        """CRS of the map as WKT, or None."""
        return None if self.raster.crs is None else self.raster.crs.to_wkt()

    @property
    def has_probabilities(self) -> bool:
        """Whether the windows have probabilities."""
        return self._probabilities is not None

    @property
    def has_confidence(self) -> bool:
        """Whether the windows have levels of confidence."""
        return self._confidence is not None

    def boxes(self) -> List[Box]:
        """Return the windows of the map."""
        width, height = self.raster.width, self.raster.height
        return [
            (left, top, min(_SIDE, width - left), min(_SIDE, height - top))
            for top in range(0, height, _SIDE)
            for left in range(0, width, _SIDE)
        ]

    def windows(self, probabilities: bool = True) -> Iterator[MapWindow]:
        """Yield all windows, with their probabilities unless these are not needed.

        Raises:
            AssessError: If a pixel's value is no class, or lacks a confidence or probabilities.
            RasterBlockError: If a file is damaged.
        """
        for box in self.boxes():
            yield self.read(box, probabilities)

    def read(self, box: Box, probabilities: bool = True) -> MapWindow:
        """Return a window that lies within the map; errors as in :meth:`windows`."""
        values, valid = self.raster.read(*box)
        valid = valid & ~np.isin(values[0], self._nodata) if self._nodata else valid
        classes = np.where(valid, self._index[values[0]], np.int16(-1))
        if (classes[valid] < 0).any():
            value = int(values[0][valid & (classes < 0)][0])
            raise AssessError(
                f'{self.path} has the value {value}, which is no class of it '
                f'({", ".join(self.class_names)}). Name it with --nodata {value} if it marks '
                'pixels without data.'
            )
        level = np.zeros(classes.shape, np.uint8)
        if self._confidence is not None:
            level = self._confidence.read_with_nodata(*box)[0][0]
            self._check_cover(self._confidence, (level == CONFIDENCE_NODATA) & valid, box)
            level = np.minimum(level, LEVELS - 1)
        shares = None
        if probabilities and self._probabilities is not None:
            steps, known = self._probabilities.read(*box)
            self._check_cover(self._probabilities, ~known & valid, box)
            shares = steps * self._scale[:, None, None]
        return MapWindow(box, classes, level, shares, self._pixel_area(box))

    def grid_key(self) -> bytes:
        """Return bytes that change with the size, transform and CRS of the map."""
        raster = self.raster
        return repr(
            (
                raster.width,
                raster.height,
                tuple(raster.transform)[:6],
                None if raster.crs is None else raster.crs.to_string(),
            )
        ).encode()

    def keep_classes(self, numbers: np.ndarray) -> None:
        """Reduce the classes to those with these indices."""
        values = [int(np.flatnonzero(self._index == number)[0]) for number in numbers]
        self.class_names = [self.class_names[number] for number in numbers]
        self._index = np.full(256, -1, np.int16)
        self._index[values] = np.arange(len(values))

    def positions(self, columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the coordinates of the pixels' centers in the CRS of the map, ``(N, 2)``."""
        return to_map(self.raster.transform, np.stack([columns + 0.5, rows + 0.5], 1))

    def pixels_at(self, positions: np.ndarray) -> np.ndarray:
        """Return (column, row) of positions in the CRS of the map, float64 ``(N, 2)``."""
        return to_map(~self.raster.transform, positions)

    def _pixel_area(self, box: Box) -> np.ndarray:
        """Return the area of each pixel of a window in ``unit``, float64 ``(rows, columns)``.

        Where the area varies along a row, as in a polar or conformal projection, it is measured in
        9 x 9 pixels and interpolated by polynomials through Chebyshev points. With 1,024 pixels of
        4 km, areas of the geodesic are met to 1e-5, and with pixels of 1 km or less to 1e-8.
        """
        left, top, width, height = box
        if self.unit == 'px':
            return np.broadcast_to(1.0, (height, width))
        if width > 1 and not self._area.rows_are_parallels:
            coarse = self._measure(
                *(
                    first + np.array([0, side // 2, side - 1])
                    for first, side in ((left, width), (top, height))
                )
            )
            if (np.ptp(coarse, axis=1) > _EVEN * coarse.max()).any():
                columns, rows = _chebyshev_points(width), _chebyshev_points(height)
                areas = self._measure(left + columns, top + rows)
                # Not so where a corner of the window lies beside the globe.
                if np.isfinite(areas).all():
                    return _lagrange(height, rows) @ areas @ _lagrange(width, columns).T
        return np.broadcast_to(self._row_area(box)[:, None], (height, width))

    def _measure(self, columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return the areas of the pixels at these columns and rows in m2, ``(rows, columns)``."""
        x, y = (axis.ravel() for axis in np.meshgrid(columns, rows))
        return self._area.of(walk(shapely.box(x, y, x + 1, y + 1))).reshape(len(rows), -1)

    def _row_area(self, box: Box) -> np.ndarray:
        """Return the area of a pixel of each row of a window in square meters.

        Measured exactly in the first, middle and last row and interpolated by a parabola. If they
        differ by more than 1 %, as in a window of Mercator's map with pixels of 4 km, nine rows are
        measured. Exact to 1e-5.
        """
        left, top, width, height = box
        rows = np.array([0, height // 2, height - 1])

        def measure() -> np.ndarray:
            strips = shapely.box(left, top + rows, left + width, top + rows + 1)
            return self._area.of(walk(strips)) / width

        areas = measure()
        if height < 3:
            return areas[[0, -1]][:height]
        if np.ptp(areas) > _UNEVEN_ROWS * areas.max():
            rows = _chebyshev_points(height)
            areas = measure()
        along = np.arange(height)
        return sum(
            area * np.prod([(along - node) / (row - node) for node in rows if node != row], 0)
            for row, area in zip(rows, areas)
        )

    def _companion(self, path: str) -> Raster:
        raster = Raster(path)
        expected, actual = self.raster, raster
        same = (
            (expected.width, expected.height) == (actual.width, actual.height)
            and same_crs(expected.crs, actual.crs)
            and expected.transform.almost_equals(actual.transform, 1e-6 * abs(expected.transform.a))
        )
        if not same:
            raise AssessError(
                f'{path} ({actual.width} x {actual.height} pixels) does not lie on the grid of '
                f'{self.path} ({expected.width} x {expected.height} pixels), so it does not belong '
                'to this map. Name the file that mapsage predict wrote with the map.'
            )
        return raster

    def _check_cover(self, raster: Raster, missing: np.ndarray, box: Box) -> None:
        if missing.any():
            row, column = np.argwhere(missing)[0]
            raise AssessError(
                f'{raster.path} has no value at column {box[0] + column}, row {box[1] + row}, '
                f'where {self.path} has a class: it does not belong to this map. Name the file '
                'that mapsage predict wrote with the map.'
            )


def _chebyshev_points(side: int) -> np.ndarray:
    """Return the pixels of an axis that are nearest to nine Chebyshev points with both ends."""
    along = (1 - np.cos(np.linspace(0, np.pi, 9))) / 2
    return np.unique(np.rint(along * (side - 1)).astype(np.int64))


def _lagrange(side: int, nodes: np.ndarray) -> np.ndarray:
    """Return the weight of each node for each pixel of an axis, float64 (side, nodes)."""
    pixels = np.arange(side)
    return np.stack(
        [
            np.prod([(pixels - other) / (node - other) for other in nodes if other != node], 0)
            * np.ones(side)
            for node in nodes
        ],
        1,
    )


def _distinct(names: Sequence[str], values: Sequence[int]) -> List[str]:
    """Return names without outer spaces; a name that occurs twice gets its value."""
    stripped = [name.strip() for name in names]
    return [
        f'{name} ({value})' if stripped.count(name) > 1 else name
        for name, value in zip(stripped, values)
    ]


def default_companion(path: str, companion: str) -> Optional[str]:
    """Return a file that belongs to a map if it exists, else None."""
    return companion if Path(companion).is_file() and companion != path else None
