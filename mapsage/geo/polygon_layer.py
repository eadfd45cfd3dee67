"""The layer of a GeoPackage with the polygons of a class map: simplified, measured and written.

Two neighbors get the same simplified border because both keep the same nodes (see `outlines.py`).
Areas are measured before the outlines are simplified. `polygons.py` finds the regions.

Shapes:
    nodes            sorted int64 keys, row * (width + 1) + column of a pixel corner
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Dict, NamedTuple, Optional, Protocol, Sequence

import numpy as np
import rasterio
import shapely

from mapsage.base.files import xml_text

from .coordinates import to_map
from .ellipsoid import EllipsoidArea
from .outlines import Rings, polygon_areas, rebuild, ring_areas, simplify, walk

LAYER = 'map'

# Pixel corners on outlines that are simplified and written at a time.
_BATCH_POINTS = 1 << 20


class Piece(NamedTuple):
    """A region, or the section of a region in a strip or a tile.

    Attributes:
        label: Class index.
        polygon: Shapely polygon, in pixels.
        is_cut: Whether the region continues beyond the edge of a tile.
    """

    label: int
    polygon: shapely.Polygon
    is_cut: bool = False


class FieldValues(NamedTuple):
    """Values of a field, and which of them are null, bool; both ``(polygons,)``."""

    values: np.ndarray
    is_null: np.ndarray


class FieldSource(Protocol):
    """Further fields of polygons."""

    def of(self, pieces: Sequence[Piece]) -> Dict[str, FieldValues]:
        """Return the values of some polygons by the name of their field."""


class PolygonLayer:
    """The layer of the GeoPackage, written in batches.

    Args:
        path: Path of a new file.
        source: Open class map, for its transform, CRS and size.
        class_names: Names of the classes, in the order of their indices.
        tolerance: Tolerance of the simplification in pixels; 0 keeps the pixels' outline.
        min_area: Area in pixels below which a region is left out, unless it is cut.
        further: Source of further fields, or None.

    Attributes:
        count: Number of polygons written so far.
    """

    def __init__(
        self,
        path: Path,
        source: rasterio.DatasetReader,
        class_names: Sequence[str],
        tolerance: float,
        min_area: float,
        further: Optional[FieldSource] = None,
    ) -> None:
        self.count = 0
        self._further = further
        self._path, self._names = path, np.array(list(map(xml_text, class_names)), object)
        self._tolerance, self._min_area = tolerance, min_area
        self._transform, self._stride = source.transform, source.width + 1
        self._crs = source.crs.to_wkt() if source.crs else None
        self._area = EllipsoidArea(self._crs, source.transform, source.width, source.height)

    def append(self, pieces: Sequence[Piece], nodes: np.ndarray) -> None:
        """Write the regions that are large enough; ``nodes`` holds sorted keys."""
        polygons = np.array([piece.polygon for piece in pieces], object)
        is_cut = np.array([piece.is_cut for piece in pieces], bool)
        large = np.flatnonzero(is_cut | (shapely.area(polygons) >= self._min_area))
        # The length of an outline in pixels is the number of pixel corners on it.
        batch = np.cumsum(shapely.length(polygons[large])) // _BATCH_POINTS
        for numbers in np.split(large, 1 + np.flatnonzero(np.diff(batch))):
            if len(numbers):
                rings = walk(polygons[numbers])
                self._write(
                    [pieces[number] for number in numbers], self._outlines(rings, nodes), rings
                )

    def close(self) -> None:
        """Write an empty layer if no region was written, and check the number of polygons.

        Raises:
            OSError: If a polygon is missing from the file.
        """
        # pyogrio imports pandas, which takes longer than the rest of the package's imports.
        import pyogrio

        if not self.count:
            empty = np.empty(0)
            self._write_batch([], np.empty(0, object), empty, empty)
        stored = pyogrio.read_info(str(self._path), layer=LAYER)['features']
        if stored != self.count:
            raise OSError(f'{stored} of {self.count} polygons are in the file')

    def _outlines(self, rings: Rings, nodes: np.ndarray) -> np.ndarray:
        """Return the simplified polygons of exact outlines, in pixels."""
        if self._tolerance <= 0:
            return rebuild(rings, rings.corner)
        keys = rings.points[:, 1] * self._stride + rings.points[:, 0]
        # The key -1 stands behind the last node, where a larger key would be inserted.
        is_node = np.append(nodes, -1)[np.searchsorted(nodes, keys)] == keys
        return simplify(rings, is_node, self._tolerance)

    def _write(self, pieces: Sequence[Piece], outlines: np.ndarray, rings: Rings) -> None:
        pixels = polygon_areas(
            ring_areas(rings.points[rings.corner], rings.ring[rings.corner]), rings.polygon
        )
        outlines = shapely.transform(outlines, lambda points: to_map(self._transform, points))
        self._write_batch(pieces, outlines, self._area.of(rings), pixels)

    def _write_batch(
        self,
        pieces: Sequence[Piece],
        outlines: np.ndarray,
        square_meters: np.ndarray,
        pixels: np.ndarray,
    ) -> None:
        import pyogrio.raw

        labels = np.array([piece.label for piece in pieces], np.int32)
        is_cut = np.array([piece.is_cut for piece in pieces], bool)
        fields = dict(
            class_id=labels,
            class_name=self._names[labels],
            area_m2=square_meters,
            area_px=pixels.astype(np.int64),
            is_cut=is_cut,
        )
        nulls = [None, None, np.isnan(square_meters), None, None]
        if self._further is not None:
            for name, further in self._further.of(pieces).items():
                fields[name] = further.values
                nulls.append(further.is_null)
        with warnings.catch_warnings():
            # A map in pixels has no CRS.
            warnings.filterwarnings('ignore', "'crs' was not provided")
            # Version 1.2, because GDAL below 3.7, as in QGIS 3.22, supports later ones partly.
            pyogrio.raw.write(
                str(self._path),
                shapely.to_wkb(outlines),
                list(fields.values()),
                list(fields),
                field_mask=nulls,
                layer=LAYER,
                driver='GPKG',
                geometry_type='Polygon',
                crs=self._crs,
                append=self.count > 0,
                VERSION='1.2',
            )
        self.count += len(labels)
