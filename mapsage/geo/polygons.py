"""Polygons of the regions of a class map, in memory that does not grow with the map."""
from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import pyogrio.raw
import rasterio
import rasterio.features
import shapely
from pyogrio.errors import DataLayerError, DataSourceError, FeatureError
from rasterio.windows import Window

from .cog import disk_message, temporary_beside
from .ellipsoid import EllipsoidArea
from .outlines import Rings, build_polygons, polygon_areas, rebuild, ring_areas, simplify, walk
from .raster import GeoError, open_file, to_map

LAYER = 'map'

_STRIP_PIXELS = 4 << 20  # pixels polygonized at once; GDAL keeps their polygons in memory

Piece = Tuple[int, Any]
"""Class index and shapely polygon, in pixels."""
Span = Tuple[int, int, int, int]
"""Part of the edge between two rows: first column, last column, class, number of the region."""


def write_polygons(class_map_path: Any, destination: Any, class_names: Sequence[str],
                   simplify: float = 1.0, min_area: float = 0,
                   background: Optional[int] = None) -> int:
    """Write the connected regions of a class map into a GeoPackage.

    The file has one layer, ``map``, with the fields ``class_id``, ``class_name``, ``area_m2`` and
    ``area_px``. Two pixels belong to one region if they share an edge; a common corner is not
    enough. Areas are those of the region's pixels before its outline is simplified: ``area_px``
    counts the pixels; ``area_m2`` is measured on the ellipsoid of the map's CRS, whatever its
    projection, and is null for a map without a CRS. Coordinates of such a map are in pixels,
    (column, row) from the upper left corner.

    Neighbors share their simplified border, without gaps. Regions about as thin as the tolerance
    keep their exact outline and may overlap a neighbor by that much.

    The map is read in strips, and a region is written once no strip below can add to it. Memory is
    therefore limited to one strip and the regions that cross its lower edge.

    Args:
        class_map_path: Path of a raster of uint8 class indices; no-data pixels give no polygon.
        destination: Path of the ``.gpkg`` file, replaced as a whole once the new one is complete.
        class_names: Names of the classes, in the order of their indices.
        simplify: Tolerance of the simplification in pixels; 0 keeps the pixels' outline.
        min_area: Area in pixels below which a region is left out.
        background: Index of a class to leave out.

    Returns:
        Number of polygons.

    Raises:
        GeoError: If the map holds a class without a name, or the file cannot be written.
    """
    destination = Path(destination)
    with open_file(class_map_path) as source, temporary_beside(destination) as folder:
        made = folder / destination.name
        layer = _Layer(made, source, class_names, simplify, min_area)
        try:
            for pieces, nodes in _regions(source, len(class_names), background):
                layer.append(pieces, nodes)
            layer.close()
            os.replace(made, destination)
        except (OSError, DataSourceError, DataLayerError, FeatureError) as error:
            raise GeoError(disk_message(destination, error)) from error
    return layer.count


def _regions(source: Any, num_classes: int, background: Optional[int]
             ) -> Iterator[Tuple[List[Piece], np.ndarray]]:
    """Yield the connected regions that each strip completes, with the nodes of the strips so far.

    Each node is a key, ``row * (width + 1) + column``; the keys are sorted.
    """
    growing, nodes = _Growing(), _Nodes(source.width)
    rows = max(1, _STRIP_PIXELS // source.width)
    for top in range(0, source.height, rows):
        bottom = min(top + rows, source.height)
        labels = _read_labels(source, top, bottom, num_classes, background)
        nodes.add(labels, top)
        yield growing.add(_pieces(labels[1:-1, 1:-1], top), top, bottom), nodes.keys
        nodes.forget_above(growing.top)
    yield growing.finish(), nodes.keys


def _read_labels(source: Any, top: int, bottom: int, num_classes: int,
                 background: Optional[int]) -> np.ndarray:
    """Return the classes with a border of one pixel, int16 (rows + 2, width + 2); -1 for none."""
    labels = np.full((bottom - top + 2, source.width + 2), -1, np.int16)
    first, last = max(top - 1, 0), min(bottom + 1, source.height)
    window = Window(0, first, source.width, last - first)
    classes = source.read(1, window=window)
    wanted = source.read_masks(1, window=window) != 0
    highest = int(classes[wanted].max()) if wanted.any() else 0
    if highest >= num_classes:
        raise GeoError(f'{source.name} holds class {highest} in the rows from {first} on, but '
                       f'{num_classes} class names were given; give a name for each.')
    if background is not None:
        wanted &= classes != background
    start = first - top + 1
    labels[start:start + last - first, 1:-1] = np.where(
        wanted, classes.astype(np.int16), np.int16(-1))
    return labels


def _pieces(labels: np.ndarray, top: int) -> List[Piece]:
    """Return the connected regions of a strip that begins at row ``top``."""
    found, rings, owner = [], [], []
    shapes = rasterio.features.shapes(labels, mask=labels >= 0, connectivity=4,
                                      transform=rasterio.Affine.translation(0, top))
    for number, (geometry, value) in enumerate(shapes):
        found.append(int(value))
        rings += [np.array(ring)[:-1] for ring in geometry['coordinates']]
        owner += [number] * len(geometry['coordinates'])
    if not found:
        return []
    ring = np.repeat(np.arange(len(rings)), [len(points) for points in rings])
    return list(zip(found, build_polygons(np.concatenate(rings), ring, np.array(owner))))


class _Nodes:
    """Pixel corners where three or more labels meet, or where two labels meet crosswise."""

    def __init__(self, width: int) -> None:
        self._stride = width + 1
        self.keys = np.empty(0, np.int64)

    def add(self, labels: np.ndarray, top: int) -> None:
        upper, lower = labels[:-1], labels[1:]
        borders = ((upper[:, 1:] != upper[:, :-1]).astype(np.int8)
                   + (lower[:, 1:] != lower[:, :-1])
                   + (upper[:, 1:] != lower[:, 1:]) + (upper[:, :-1] != lower[:, :-1]))
        rows, columns = np.nonzero(borders >= 3)
        keys = (rows + top) * self._stride + columns
        # The upper edge of a strip is the lower edge of the strip above and replaces its nodes.
        self.keys = np.concatenate([self.keys[self.keys < top * self._stride], keys])

    def forget_above(self, row: Optional[int]) -> None:
        if row is not None:
            self.keys = self.keys[np.searchsorted(self.keys, row * self._stride):]


class _Growing:
    """Incomplete regions: those that reach the lower edge of the strips so far."""

    def __init__(self) -> None:
        self._regions: Dict[int, List[Piece]] = {}  # parts by number of the region
        self._edge: List[Span] = []
        self._next = 0
        self.top: Optional[int] = None
        """Uppermost row that an incomplete region reaches."""

    def add(self, found: Sequence[Piece], top: int, bottom: int) -> List[Piece]:
        """Add the pieces of a strip and return the regions that are now complete."""
        parent = {number: number for number in self._regions}

        def root(number: int) -> int:
            while parent[number] != number:
                parent[number] = parent[parent[number]]
                number = parent[number]
            return number

        complete: List[Piece] = []
        upper: List[Span] = []
        lower: List[Span] = []
        bounds = shapely.bounds(np.array([polygon for _, polygon in found], object))
        for (label, polygon), (_, y_min, _, y_max) in zip(found, bounds.reshape(-1, 4)):
            if y_min > top and y_max < bottom:
                complete.append((label, polygon))
                continue
            number, self._next = self._next, self._next + 1
            self._regions[number], parent[number] = [(label, polygon)], number
            upper += [(*span, label, number) for span in _spans(polygon, top)]
            lower += [(*span, label, number) for span in _spans(polygon, bottom)]
        for above, below in _touching(self._edge, sorted(upper)):
            parent[root(above)] = root(below)
        joined: Dict[int, List[Piece]] = {}
        for number, parts in self._regions.items():
            joined.setdefault(root(number), []).extend(parts)
        self._edge = sorted((*span[:3], root(span[3])) for span in lower)
        reaching = {span[3] for span in self._edge}
        self._regions = {k: parts for k, parts in joined.items() if k in reaching}
        self.top = min((int(polygon.bounds[1]) for parts in self._regions.values()
                        for _, polygon in parts), default=bottom)
        return complete + [_join(parts) for k, parts in joined.items() if k not in reaching]

    def finish(self) -> List[Piece]:
        """Return the regions that reach the last row of the map."""
        return [_join(parts) for parts in self._regions.values()]


def _spans(polygon: Any, y: int) -> Iterator[Tuple[int, int]]:
    """Yield (first, last) columns where the polygon's outline runs along the row edge ``y``."""
    for ring in (polygon.exterior, *polygon.interiors):
        points = shapely.get_coordinates(ring)
        along = (points[:-1, 1] == y) & (points[1:, 1] == y)
        for start, end in zip(points[:-1, 0][along], points[1:, 0][along]):
            yield int(min(start, end)), int(max(start, end))


def _touching(above: Sequence[Span], below: Sequence[Span]) -> Iterator[Tuple[int, int]]:
    """Yield pairs of regions of the same class whose spans share at least one pixel edge."""
    i = j = 0
    while i < len(above) and j < len(below):
        (a_from, a_to, a_class, a), (b_from, b_to, b_class, b) = above[i], below[j]
        if a_class == b_class and min(a_to, b_to) > max(a_from, b_from):
            yield a, b
        if a_to <= b_to:
            i += 1
        else:
            j += 1


def _join(parts: Sequence[Piece]) -> Piece:
    if len(parts) == 1:
        return parts[0]
    rings = walk(np.array([polygon for _, polygon in parts]))
    # The union along common edges needs the same points on both sides. Elsewhere the corners
    # describe the outline completely.
    touching = np.isin(rings.points[:, 1], [edge for _, polygon in parts
                                            for edge in polygon.bounds[1::2]])
    return parts[0][0], shapely.coverage_union_all(rebuild(rings, rings.corner | touching))


class _Layer:
    """The layer of the GeoPackage, written in batches."""

    def __init__(self, path: Path, source: Any, class_names: Sequence[str], tolerance: float,
                 min_area: float) -> None:
        self.count = 0
        self._path, self._names = path, np.array(list(class_names), object)
        self._tolerance, self._min_area = tolerance, min_area
        self._transform, self._stride = source.transform, source.width + 1
        self._crs = source.crs.to_wkt() if source.crs else None
        self._area = EllipsoidArea(self._crs, source.transform, source.width, source.height)

    def append(self, pieces: Sequence[Piece], nodes: np.ndarray) -> None:
        """Write the regions that are large enough; ``nodes`` holds sorted keys."""
        area = shapely.area([polygon for _, polygon in pieces])
        pieces = [piece for piece, large in zip(pieces, area >= max(self._min_area, 1)) if large]
        if pieces:
            rings = walk(np.array([polygon for _, polygon in pieces]))
            self._write(np.array([label for label, _ in pieces], np.int32),
                        self._outlines(rings, nodes), rings)

    def close(self) -> None:
        """Write an empty layer if no region was written, and check that none is missing."""
        if not self.count:
            none = np.empty(0)
            self._write_batch(np.empty(0, np.int32), np.empty(0, object), none, none)
        found = pyogrio.read_info(str(self._path), layer=LAYER)['features']
        if found != self.count:
            raise OSError(f'{found} of {self.count} polygons are in the file')

    def _outlines(self, rings: Rings, nodes: np.ndarray) -> np.ndarray:
        if self._tolerance <= 0:
            return rebuild(rings, rings.corner)
        keys = rings.points[:, 1] * self._stride + rings.points[:, 0]
        place = np.searchsorted(nodes, keys)
        node = np.append(nodes, -1)[place] == keys
        return simplify(rings, node, self._tolerance)

    def _write(self, labels: np.ndarray, outlines: np.ndarray, rings: Rings) -> None:
        pixels = polygon_areas(ring_areas(rings.points[rings.corner], rings.ring[rings.corner]),
                               rings.polygon)
        outlines = shapely.transform(outlines, lambda points: to_map(self._transform, points))
        self._write_batch(labels, outlines, self._area.of(rings), pixels)

    def _write_batch(self, labels: np.ndarray, outlines: np.ndarray, square_meters: np.ndarray,
                     pixels: np.ndarray) -> None:
        fields = dict(class_id=labels, class_name=self._names[labels], area_m2=square_meters,
                      area_px=pixels.astype(np.int64))
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', "'crs' was not provided")  # map in pixels
            pyogrio.raw.write(
                str(self._path), shapely.to_wkb(outlines), list(fields.values()), list(fields),
                field_mask=[None, None, np.isnan(square_meters), None], layer=LAYER,
                driver='GPKG', geometry_type='Polygon', crs=self._crs, append=self.count > 0)
        self.count += len(labels)
