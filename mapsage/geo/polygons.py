"""Polygons of the regions of a class map, in memory that does not grow with the map's height.

The map is read in strips. `_pieces` outlines the regions of a strip, `_OpenRegions` joins pieces
of neighboring strips and tiles, and `PolygonLayer` simplifies and writes what is complete. Two
neighbors get the same simplified border because both keep the same `_Nodes` (see `outlines.py`).

Shapes:
    labels           (rows + 2, width + 2) int16: a strip with a border of one pixel; -1: no class
    polygon          shapely polygon whose corners are pixel corners (column, row)
    nodes            sorted int64 keys, row * (width + 1) + column of a pixel corner
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict, Iterator, List, Optional, Sequence, Tuple, Union

import numpy as np
import rasterio
import rasterio.features
import shapely
from rasterio.windows import Window

from .cog import disk_message, temporary_beside
from .errors import GeoError, PathName
from .gdal_files import open_file
from .outlines import build_polygons, rebuild, walk
from .polygon_layer import LAYER, FieldSource, Piece, PolygonLayer
from .qgis_style import add_polygon_style

TILE = 1024
"""Side of a tile in pixels. A region that is wider or higher is cut at the edges of tiles."""

# Pixels of a strip. The pieces of its regions are in memory at the same time.
_STRIP_PIXELS = 2 << 20


Span = Tuple[int, int, int, int]
"""Section of a line between two rows or columns that a region touches: first and last pixel corner,
class, number of the region."""


def write_polygons(
    class_map_path: PathName,
    destination: PathName,
    class_names: Sequence[str],
    simplify: float = 1.0,
    min_area: float = 0,
    background: Union[None, int, Sequence[int]] = None,
    palette: Optional[Sequence[Sequence[int]]] = None,
    further: Optional[FieldSource] = None,
) -> int:
    """Write the connected regions of a class map into a GeoPackage.

    The file has one layer, ``map``, with the fields ``class_id``, ``class_name``, ``area_m2``,
    ``area_px`` and ``is_cut``. Two pixels belong to one region if they share an edge; a common
    corner is not enough. Areas are measured before the outline is simplified: ``area_px`` counts
    the pixels; ``area_m2`` is measured on the ellipsoid of the map's CRS, whatever its projection,
    and is null for a map without a CRS. Coordinates of such a map are in pixels, (column, row) from
    the upper left corner.

    Neighbors share their simplified border, without gaps. Regions about as thin as the tolerance
    keep their exact outline and may overlap a neighbor by up to the tolerance.

    A region that is wider or higher than ``TILE`` pixels is cut along the grid of tiles. Each of
    its polygons has ``is_cut`` set and the area of the polygon's pixels. All other regions are
    whole.

    The map is read in strips, and finished polygons are written at once: regions that end above the
    next strip, and for a cut region its polygons in complete rows of tiles. Memory is therefore
    limited to a row of tiles, whatever the height of the map.

    Args:
        class_map_path: Path of a raster of uint8 class indices; no-data pixels give no polygon.
        destination: Path of the ``.gpkg`` file, replaced as a whole once the new one is complete.
        class_names: Names of the classes, in the order of their indices.
        simplify: Tolerance of the simplification in pixels; 0 keeps the pixels' outline.
        min_area: Area in pixels below which a region is left out. A cut region is never left out.
        background: Index or indices of classes to leave out.
        palette: Red, green and blue (0 to 255) of each class for a QGIS style of the layer; None
            for no style.
        further: Source of further fields, such as ``ChangeFields``, or None.

    Returns:
        Number of polygons.

    Raises:
        GeoError: If the map contains a class without a name, or the file cannot be written.
    """
    # pyogrio imports pandas, which takes longer than the rest of the package's imports.
    from pyogrio.errors import DataLayerError, DataSourceError, FeatureError

    destination = Path(destination)
    with open_file(class_map_path) as source, temporary_beside(destination) as folder:
        temporary = folder / destination.name
        layer = PolygonLayer(temporary, source, class_names, simplify, min_area, further)
        try:
            excluded = np.atleast_1d([] if background is None else background)
            for pieces, nodes in _regions(source, len(class_names), excluded):
                layer.append(pieces, nodes)
            layer.close()
            if palette is not None:
                styled = [number for number in range(len(class_names)) if number not in excluded]
                add_polygon_style(
                    temporary,
                    LAYER,
                    'class_name',
                    [class_names[i] for i in styled],
                    [palette[i] for i in styled],
                )
            os.replace(temporary, destination)
        except (OSError, DataSourceError, DataLayerError, FeatureError) as error:
            raise GeoError(disk_message(destination, error)) from error
    return layer.count


def _regions(
    source: rasterio.DatasetReader, num_classes: int, excluded: np.ndarray
) -> Iterator[Tuple[List[Piece], np.ndarray]]:
    """Yield the polygons that each strip completes, with the nodes on their outlines."""
    regions, nodes = _OpenRegions(), _Nodes(source.width)
    for top, bottom in _strips(source.height, max(1, _STRIP_PIXELS // source.width)):
        labels = _read_labels(source, top, bottom, num_classes, excluded)
        nodes.add(labels, top)
        pieces = [
            piece
            for left in range(0, source.width, TILE)
            for piece in _pieces(
                labels[1:-1, 1 + left : 1 + min(left + TILE, source.width)], left, top
            )
        ]
        yield regions.add(pieces, top, bottom), nodes.keys
        nodes.drop_above(regions.top)
    yield regions.finish(), nodes.keys


def _strips(height: int, rows: int) -> Iterator[Tuple[int, int]]:
    """Yield (start, end) in rows of each strip, with the end excluded; no strip spans two tiles."""
    for tile in range(0, height, TILE):
        end = min(tile + TILE, height)
        for top in range(tile, end, rows):
            yield top, min(top + rows, end)


def _read_labels(
    source: rasterio.DatasetReader, top: int, bottom: int, num_classes: int, excluded: np.ndarray
) -> np.ndarray:
    """Return the classes of a strip with a border of one pixel, int16 (rows + 2, width + 2).

    Pixels without data, of excluded classes, and beyond the map are -1.
    """
    labels = np.full((bottom - top + 2, source.width + 2), -1, np.int16)
    first, last = max(top - 1, 0), min(bottom + 1, source.height)
    window = Window(0, first, source.width, last - first)
    classes = source.read(1, window=window)
    included = source.read_masks(1, window=window) != 0
    highest = int(classes[included].max()) if included.any() else 0
    if highest >= num_classes:
        raise GeoError(
            f'{source.name} holds class {highest} in the rows from {first} on, but '
            f'{num_classes} class names were given; give a name for each.'
        )
    if len(excluded):
        included &= ~np.isin(classes, excluded)
    start = first - top + 1
    labels[start : start + last - first, 1:-1] = np.where(
        included, classes.astype(np.int16), np.int16(-1)
    )
    return labels


def _pieces(labels: np.ndarray, left: int, top: int) -> List[Piece]:
    """Return the connected regions of a block whose upper left corner is at (left, top)."""
    classes, rings, owner = [], [], []
    labels = np.ascontiguousarray(labels)
    shapes = rasterio.features.shapes(
        labels, mask=labels >= 0, connectivity=4, transform=rasterio.Affine.translation(left, top)
    )
    for number, (geometry, value) in enumerate(shapes):
        classes.append(int(value))
        rings += [np.array(ring)[:-1] for ring in geometry['coordinates']]
        owner += [number] * len(geometry['coordinates'])
    if not classes:
        return []
    ring = np.repeat(np.arange(len(rings)), [len(points) for points in rings])
    polygons = build_polygons(np.concatenate(rings), ring, np.array(owner))
    return [Piece(label, polygon) for label, polygon in zip(classes, polygons)]


class _Nodes:
    """Pixel corners that simplification must not remove.

    These are corners where three or more labels meet, where two labels meet crosswise, and where
    an outline crosses the line between two tiles.

    Attributes:
        keys: Sorted keys of the nodes in the rows that open regions still reach.
    """

    def __init__(self, width: int) -> None:
        self._stride = width + 1
        self.keys = np.empty(0, np.int64)

    def add(self, labels: np.ndarray, top: int) -> None:
        """Add the nodes of a strip that begins at row ``top``."""
        upper, lower = labels[:-1], labels[1:]
        along = (upper[:, 1:] != upper[:, :-1]).astype(np.int8) + (lower[:, 1:] != lower[:, :-1])
        across = (upper[:, 1:] != lower[:, 1:]).astype(np.int8) + (upper[:, :-1] != lower[:, :-1])
        is_node = along + across >= 3
        is_node[-top % TILE :: TILE] |= along[-top % TILE :: TILE] > 0
        is_node[:, ::TILE] |= across[:, ::TILE] > 0
        is_node[-top % TILE :: TILE, ::TILE] = True
        rows, columns = np.nonzero(is_node)
        keys = (rows + top) * self._stride + columns
        # The upper edge of a strip is the lower edge of the strip above and replaces its nodes.
        self.keys = np.concatenate([self.keys[self.keys < top * self._stride], keys])

    def drop_above(self, row: Optional[int]) -> None:
        """Drop the nodes above a row; None drops nothing."""
        if row is not None:
            self.keys = self.keys[np.searchsorted(self.keys, row * self._stride) :]


class _Region:
    """A region that may continue below: its polygons that are not written yet, and its extent.

    Attributes:
        label: Class index.
        polygons: Sections of the region in strips and tiles.
        bounds: Left, top, right and bottom of the whole region in pixels.
    """

    def __init__(self, label: int, polygon: shapely.Polygon, bounds: Sequence[float]) -> None:
        self.label, self.bounds = label, np.array(bounds)
        self.polygons = [polygon]

    @property
    def is_cut(self) -> bool:
        """Whether the region is larger than a tile."""
        return bool((self.bounds[2:] - self.bounds[:2]).max() > TILE)

    def join(self, region: _Region) -> None:
        """Add the polygons of another region that touches this one."""
        self.polygons += region.polygons
        self.bounds = np.r_[
            np.minimum(self.bounds[:2], region.bounds[:2]),
            np.maximum(self.bounds[2:], region.bounds[2:]),
        ]

    def take(self) -> List[Piece]:
        """Return the polygons, joined to one or to one per tile if the region is cut.

        The region has no polygons afterward.
        """
        polygons, self.polygons = self.polygons, []
        if not self.is_cut:
            return [Piece(self.label, _join(polygons))]
        tiles: Dict[Tuple[float, ...], List[shapely.Polygon]] = {}
        for polygon in polygons:
            left, top = polygon.bounds[:2]
            tiles.setdefault((top // TILE, left // TILE), []).append(polygon)
        return [
            Piece(self.label, polygon, True)
            for in_tile in tiles.values()
            for polygon in shapely.get_parts(_join(in_tile))
        ]


class _OpenRegions:
    """Regions that reach the lower edge of the strips so far, so that they may continue below.

    Attributes:
        top: Uppermost row that an unwritten polygon of these regions reaches; None before the first
            strip.
    """

    def __init__(self) -> None:
        self._regions: Dict[int, _Region] = {}
        # Where the regions touch the lower edge.
        self._edge: List[Span] = []
        self._next_number = 0
        self.top: Optional[int] = None

    def add(self, pieces: Sequence[Piece], top: int, bottom: int) -> List[Piece]:
        """Add the pieces of a strip and return the polygons that are now complete.

        Pieces that touch across the upper edge of the strip, or across the line between two tiles,
        are joined with a union-find structure over their numbers.
        """
        parent = {number: number for number in self._regions}

        def root(number: int) -> int:
            while parent[number] != number:
                parent[number] = parent[parent[number]]
                number = parent[number]
            return number

        complete: List[Piece] = []
        upper: List[Span] = []
        lower: List[Span] = []
        # Column of a line between tiles -> spans on its left and on its right side.
        sides: Dict[float, Tuple[List[Span], List[Span]]] = {}
        bounds = shapely.bounds(np.array([piece.polygon for piece in pieces], object))
        for piece, box in zip(pieces, bounds.reshape(-1, 4)):
            left, y_min, right, y_max = box
            if y_min > top and y_max < bottom and left % TILE and right % TILE:
                complete.append(piece)
                continue
            label, polygon = piece.label, piece.polygon
            number, self._next_number = self._next_number, self._next_number + 1
            self._regions[number], parent[number] = _Region(label, polygon, box), number
            for spans, axis, line in (
                (upper, 1, top),
                (lower, 1, bottom),
                (sides.setdefault(left, ([], []))[1], 0, left),
                (sides.setdefault(right, ([], []))[0], 0, right),
            ):
                if line == box[axis] or line == box[axis + 2]:
                    spans += [(*span, label, number) for span in _spans(polygon, line, axis)]
        pairs = list(_touching(self._edge, sorted(upper)))
        for line, (left_spans, right_spans) in sides.items():
            if line % TILE == 0:
                pairs += _touching(sorted(left_spans), sorted(right_spans))
        for number_a, number_b in pairs:
            parent[root(number_a)] = root(number_b)
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
        self.top = min(
            (
                int(polygon.bounds[1])
                for region in self._regions.values()
                for polygon in region.polygons
            ),
            default=bottom,
        )
        return complete

    def finish(self) -> List[Piece]:
        """Return the regions that reach the last row of the map."""
        return [piece for region in self._regions.values() for piece in region.take()]


def _spans(polygon: shapely.Polygon, line: float, axis: int) -> Iterator[Tuple[int, int]]:
    """Yield (first, last) pixel corner of each section of an outline along a line.

    With ``axis`` 0 the line is the column ``line``, with 1 it is the row ``line``.
    """
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


def _join(polygons: Sequence[shapely.Polygon]) -> Optional[shapely.Geometry]:
    """Return the union of polygons that touch at the edges of strips and tiles."""
    if len(polygons) <= 1:
        return polygons[0] if polygons else None
    rings = walk(np.array(polygons))
    # The union along common edges needs the same points on both sides. Elsewhere the corners
    # describe the outline completely.
    touching = np.isin(
        rings.points[:, 1], [edge for polygon in polygons for edge in polygon.bounds[1::2]]
    )
    touching |= rings.points[:, 0] % TILE == 0
    return shapely.coverage_union_all(rebuild(rings, rings.corner | touching))
