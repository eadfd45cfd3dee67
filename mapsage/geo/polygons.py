"""Polygons of the regions of a class map, in memory that does not grow with its height."""
from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import pyogrio.raw
import rasterio
import rasterio.features
import shapely
from pyogrio.errors import DataLayerError, DataSourceError, FeatureError
from rasterio.windows import Window

from mapsage.xml_text import xml_text

from .cog import disk_message, temporary_beside
from .ellipsoid import EllipsoidArea
from .outlines import Rings, build_polygons, polygon_areas, rebuild, ring_areas, simplify, walk
from .qgis_style import add_polygon_style
from .raster import GeoError, open_file, to_map

LAYER = 'map'

TILE = 1024
"""Side in pixels of the tiles at whose edges a region is cut if it is wider or higher than that."""

_STRIP_PIXELS = 2 << 20  # pixels of a strip; the pieces of their regions are in memory at a time
_BATCH_POINTS = 1 << 20  # pixel corners on the outlines that are simplified and written at a time


class Piece(NamedTuple):
    """A region, or a part of one.

    Attributes:
        label: Class index.
        polygon: Shapely polygon, in pixels.
        is_cut: Whether the region goes on beyond the edge of a tile.
    """

    label: int
    polygon: Any
    is_cut: bool = False


Span = Tuple[int, int, int, int]
"""Part of a line between two rows or columns: first and last pixel corner, class, number of the
region."""


def write_polygons(class_map_path: Any, destination: Any, class_names: Sequence[str],
                   simplify: float = 1.0, min_area: float = 0,
                   background: Union[None, int, Sequence[int]] = None,
                   palette: Optional[Sequence[Sequence[int]]] = None) -> int:
    """Write the connected regions of a class map into a GeoPackage.

    The file has one layer, ``map``, with the fields ``class_id``, ``class_name``, ``area_m2``,
    ``area_px`` and ``is_cut``. Two pixels belong to one region if they share an edge; a common
    corner is not enough. Areas are those of the region's pixels before its outline is simplified:
    ``area_px`` counts the pixels; ``area_m2`` is measured on the ellipsoid of the map's CRS,
    whatever its projection, and is null for a map without a CRS. Coordinates of such a map are in
    pixels, (column, row) from the upper left corner.

    Neighbors share their simplified border, without gaps. Regions about as thin as the tolerance
    keep their exact outline and may overlap a neighbor by that much.

    A region that is wider or higher than ``TILE`` pixels is cut at the lines between the tiles of
    a grid; each polygon of it has ``is_cut`` set and the area of its own pixels. Others are whole.

    The map is read in strips. What is finished is written: a region that no strip below can add
    to, and of a region that is cut the rows of tiles that are complete. Memory is therefore limited
    to a row of tiles, whatever the height of the map.

    Args:
        class_map_path: Path of a raster of uint8 class indices; no-data pixels give no polygon.
        destination: Path of the ``.gpkg`` file, replaced as a whole once the new one is complete.
        class_names: Names of the classes, in the order of their indices.
        simplify: Tolerance of the simplification in pixels; 0 keeps the pixels' outline.
        min_area: Area in pixels below which a region is left out. One that is cut is never.
        background: Index or indices of classes to leave out.
        palette: Red, green and blue (0 to 255) of each class, in which QGIS then shows the layer;
            None for no style.

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
            left_out = np.atleast_1d([] if background is None else background)
            for pieces, nodes in _regions(source, len(class_names), left_out):
                layer.append(pieces, nodes)
            layer.close()
            if palette is not None:
                shown = [number for number in range(len(class_names)) if number not in left_out]
                add_polygon_style(made, LAYER, 'class_name', [class_names[i] for i in shown],
                                  [palette[i] for i in shown])
            os.replace(made, destination)
        except (OSError, DataSourceError, DataLayerError, FeatureError) as error:
            raise GeoError(disk_message(destination, error)) from error
    return layer.count


def _regions(source: Any, num_classes: int, left_out: np.ndarray
             ) -> Iterator[Tuple[List[Piece], np.ndarray]]:
    """Yield what each strip completes, with the nodes of the strips so far.

    Each node is a key, ``row * (width + 1) + column``; the keys are sorted.
    """
    growing, nodes = _Growing(), _Nodes(source.width)
    for top, bottom in _strips(source.height, max(1, _STRIP_PIXELS // source.width)):
        labels = _read_labels(source, top, bottom, num_classes, left_out)
        nodes.add(labels, top)
        found = [piece for left in range(0, source.width, TILE) for piece in _pieces(
            labels[1:-1, 1 + left:1 + min(left + TILE, source.width)], left, top)]
        yield growing.add(found, top, bottom), nodes.keys
        nodes.forget_above(growing.top)
    yield growing.finish(), nodes.keys


def _strips(height: int, rows: int) -> Iterator[Tuple[int, int]]:
    """Yield (first row, the one behind the last) of each strip; none goes on in another tile."""
    for tile in range(0, height, TILE):
        end = min(tile + TILE, height)
        for top in range(tile, end, rows):
            yield top, min(top + rows, end)


def _read_labels(source: Any, top: int, bottom: int, num_classes: int,
                 left_out: np.ndarray) -> np.ndarray:
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
    if len(left_out):
        wanted &= ~np.isin(classes, left_out)
    start = first - top + 1
    labels[start:start + last - first, 1:-1] = np.where(
        wanted, classes.astype(np.int16), np.int16(-1))
    return labels


def _pieces(labels: np.ndarray, left: int, top: int) -> List[Piece]:
    """Return the connected regions of a block that begins at these pixels."""
    found, rings, owner = [], [], []
    labels = np.ascontiguousarray(labels)
    shapes = rasterio.features.shapes(labels, mask=labels >= 0, connectivity=4,
                                      transform=rasterio.Affine.translation(left, top))
    for number, (geometry, value) in enumerate(shapes):
        found.append(int(value))
        rings += [np.array(ring)[:-1] for ring in geometry['coordinates']]
        owner += [number] * len(geometry['coordinates'])
    if not found:
        return []
    ring = np.repeat(np.arange(len(rings)), [len(points) for points in rings])
    return [Piece(*each) for each in zip(
        found, build_polygons(np.concatenate(rings), ring, np.array(owner)))]


class _Nodes:
    """Pixel corners that all outlines through them keep.

    These are corners where three or more labels meet, where two labels meet crosswise, and where
    an outline crosses the line between two tiles.
    """

    def __init__(self, width: int) -> None:
        self._stride = width + 1
        self.keys = np.empty(0, np.int64)

    def add(self, labels: np.ndarray, top: int) -> None:
        upper, lower = labels[:-1], labels[1:]
        along = (upper[:, 1:] != upper[:, :-1]).astype(np.int8) + (lower[:, 1:] != lower[:, :-1])
        across = (upper[:, 1:] != lower[:, 1:]).astype(np.int8) + (upper[:, :-1] != lower[:, :-1])
        found = along + across >= 3
        found[-top % TILE::TILE] |= along[-top % TILE::TILE] > 0
        found[:, ::TILE] |= across[:, ::TILE] > 0
        found[-top % TILE::TILE, ::TILE] = True
        rows, columns = np.nonzero(found)
        keys = (rows + top) * self._stride + columns
        # The upper edge of a strip is the lower edge of the strip above and replaces its nodes.
        self.keys = np.concatenate([self.keys[self.keys < top * self._stride], keys])

    def forget_above(self, row: Optional[int]) -> None:
        if row is not None:
            self.keys = self.keys[np.searchsorted(self.keys, row * self._stride):]


class _Region:
    """A region that may go on below: its parts that are not written yet, and its extent."""

    def __init__(self, label: int, polygon: Any, bounds: Sequence[float]) -> None:
        self.label, self.bounds = label, np.array(bounds)
        self.parts = [polygon]

    @property
    def is_cut(self) -> bool:
        """Whether it is larger than a tile."""
        return bool((self.bounds[2:] - self.bounds[:2]).max() > TILE)

    def join(self, other: _Region) -> None:
        """Add the parts of another region, of which this one is the continuation."""
        self.parts += other.parts
        self.bounds = np.r_[np.minimum(self.bounds[:2], other.bounds[:2]),
                            np.maximum(self.bounds[2:], other.bounds[2:])]

    def take(self) -> List[Piece]:
        """Return the region in one piece, or tile by tile if it is cut, and forget its parts."""
        parts, self.parts = self.parts, []
        if not self.is_cut:
            return [Piece(self.label, _join(parts))]
        tiles: Dict[Tuple[float, ...], List[Any]] = {}
        for part in parts:
            left, top = part.bounds[:2]
            tiles.setdefault((top // TILE, left // TILE), []).append(part)
        return [Piece(self.label, polygon, True) for inside in tiles.values()
                for polygon in shapely.get_parts(_join(inside))]


class _Growing:
    """Incomplete regions: those that reach the lower edge of the strips so far."""

    def __init__(self) -> None:
        self._regions: Dict[int, _Region] = {}
        self._edge: List[Span] = []
        self._next = 0
        self.top: Optional[int] = None
        """Uppermost row that parts of an incomplete region reach."""

    def add(self, found: Sequence[Piece], top: int, bottom: int) -> List[Piece]:
        """Add the pieces of a strip and return what is now complete."""
        parent = {number: number for number in self._regions}

        def root(number: int) -> int:
            while parent[number] != number:
                parent[number] = parent[parent[number]]
                number = parent[number]
            return number

        complete: List[Piece] = []
        upper: List[Span] = []
        lower: List[Span] = []
        beside: Dict[float, Tuple[List[Span], List[Span]]] = {}  # of a line between tiles
        bounds = shapely.bounds(np.array([piece.polygon for piece in found], object))
        for piece, box in zip(found, bounds.reshape(-1, 4)):
            left, y_min, right, y_max = box
            if y_min > top and y_max < bottom and left % TILE and right % TILE:
                complete.append(piece)
                continue
            label, polygon = piece.label, piece.polygon
            number, self._next = self._next, self._next + 1
            self._regions[number], parent[number] = _Region(label, polygon, box), number
            for spans, axis, line in (
                    (upper, 1, top), (lower, 1, bottom),
                    (beside.setdefault(left, ([], []))[1], 0, left),
                    (beside.setdefault(right, ([], []))[0], 0, right)):
                if line == box[axis] or line == box[axis + 2]:
                    spans += [(*span, label, number) for span in _spans(polygon, line, axis)]
        pairs = list(_touching(self._edge, sorted(upper)))
        for line, (one, other) in beside.items():
            if line % TILE == 0:
                pairs += _touching(sorted(one), sorted(other))
        for one_number, other_number in pairs:
            parent[root(one_number)] = root(other_number)
        joined: Dict[int, _Region] = {}
        for number, region in self._regions.items():
            joined.setdefault(root(number), region)
            if joined[root(number)] is not region:
                joined[root(number)].join(region)
        self._edge = sorted((*span[:3], root(span[3])) for span in lower)
        self._regions = {number: joined.pop(number) for number in {span[3] for span in self._edge}}
        for region in joined.values():
            complete += region.take()
        if bottom % TILE == 0:
            for region in self._regions.values():
                if region.is_cut:
                    complete += region.take()
        self.top = min((int(part.bounds[1]) for region in self._regions.values()
                        for part in region.parts), default=bottom)
        return complete

    def finish(self) -> List[Piece]:
        """Return the regions that reach the last row of the map."""
        return [piece for region in self._regions.values() for piece in region.take()]


def _spans(polygon: Any, line: float, axis: int) -> Iterator[Tuple[int, int]]:
    """Yield (first, last) where the outline runs along a line across ``axis``, 0 for columns."""
    for ring in (polygon.exterior, *polygon.interiors):
        points = shapely.get_coordinates(ring)
        along = (points[:-1, axis] == line) & (points[1:, axis] == line)
        for start, end in zip(points[:-1, 1 - axis][along], points[1:, 1 - axis][along]):
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


def _join(parts: Sequence[Any]) -> Any:
    """Return the union of polygons that touch at the edges of strips and tiles."""
    if len(parts) <= 1:
        return parts[0] if parts else None
    rings = walk(np.array(parts))
    # The union along common edges needs the same points on both sides. Elsewhere the corners
    # describe the outline completely.
    touching = np.isin(rings.points[:, 1], [edge for polygon in parts
                                            for edge in polygon.bounds[1::2]])
    touching |= rings.points[:, 0] % TILE == 0
    return shapely.coverage_union_all(rebuild(rings, rings.corner | touching))


class _Layer:
    """The layer of the GeoPackage, written in batches."""

    def __init__(self, path: Path, source: Any, class_names: Sequence[str], tolerance: float,
                 min_area: float) -> None:
        self.count = 0
        self._path, self._names = path, np.array(list(map(xml_text, class_names)), object)
        self._tolerance, self._min_area = tolerance, min_area
        self._transform, self._stride = source.transform, source.width + 1
        self._crs = source.crs.to_wkt() if source.crs else None
        self._area = EllipsoidArea(self._crs, source.transform, source.width, source.height)

    def append(self, pieces: Sequence[Piece], nodes: np.ndarray) -> None:
        """Write the regions that are large enough; ``nodes`` holds sorted keys."""
        polygons = np.array([piece.polygon for piece in pieces], object)
        is_cut = np.array([piece.is_cut for piece in pieces], bool)
        kept = np.flatnonzero(is_cut | (shapely.area(polygons) >= self._min_area))
        batch = np.cumsum(shapely.length(polygons[kept])) // _BATCH_POINTS
        for numbers in np.split(kept, 1 + np.flatnonzero(np.diff(batch))):
            if len(numbers):
                rings = walk(polygons[numbers])
                self._write(np.array([pieces[number].label for number in numbers], np.int32),
                            is_cut[numbers], self._outlines(rings, nodes), rings)

    def close(self) -> None:
        """Write an empty layer if no region was written, and check that none is missing."""
        if not self.count:
            none = np.empty(0)
            self._write_batch(np.empty(0, np.int32), np.empty(0, bool), np.empty(0, object), none,
                              none)
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

    def _write(self, labels: np.ndarray, is_cut: np.ndarray, outlines: np.ndarray,
               rings: Rings) -> None:
        pixels = polygon_areas(ring_areas(rings.points[rings.corner], rings.ring[rings.corner]),
                               rings.polygon)
        outlines = shapely.transform(outlines, lambda points: to_map(self._transform, points))
        self._write_batch(labels, is_cut, outlines, self._area.of(rings), pixels)

    def _write_batch(self, labels: np.ndarray, is_cut: np.ndarray, outlines: np.ndarray,
                     square_meters: np.ndarray, pixels: np.ndarray) -> None:
        fields = dict(class_id=labels, class_name=self._names[labels], area_m2=square_meters,
                      area_px=pixels.astype(np.int64), is_cut=is_cut)
        with warnings.catch_warnings():
            warnings.filterwarnings('ignore', "'crs' was not provided")  # map in pixels
            pyogrio.raw.write(
                str(self._path), shapely.to_wkb(outlines), list(fields.values()), list(fields),
                field_mask=[None, None, np.isnan(square_meters), None, None], layer=LAYER,
                driver='GPKG', geometry_type='Polygon', crs=self._crs, append=self.count > 0,
                VERSION='1.2')  # GDAL below 3.7, as in QGIS 3.22, knows later ones in part
        self.count += len(labels)
