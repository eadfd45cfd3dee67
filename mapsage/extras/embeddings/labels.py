"""Labeled cells of embeddings: from points, polygons, or a raster of classes.

Every label lies in one cell of one embedding. Labels are found by their coordinates, so they need
not share the grid or the CRS of the embeddings; without georeference, a raster needs the same size.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, List, Optional, Sequence, Tuple

import affine
import numpy as np
import pyogrio.raw
import shapely
from pyogrio.errors import DataLayerError, DataSourceError

from mapsage.geo import Raster, read_classes, reprojected, to_map
from mapsage.geo.burning import burn_polygons
from mapsage.geo.labels import VECTOR_SUFFIXES

from .embedding_file import EmbeddingFile
from .errors import EmbeddingError

_SEED = 0
_ROWS = 512


@dataclass(frozen=True)
class LabeledCells:
    """Labeled cells, N of them.

    Attributes:
        classes: Names of the classes that occur, in alphabetical order, or in the raster's.
        palette: RGB colors of the classes, or None.
        labels: Index of the class of each cell, ``(N,)``.
        vectors: Their vectors of unit length, ``(N, C)`` float32.
        places: Coordinates of their centers in the CRS of the first embedding, ``(N, 2)``; in
            pixels without georeference.
        counts: Labels without a cell: ``outside`` all embeddings, on cells without ``data``.
    """

    classes: Tuple[str, ...]
    palette: Optional[np.ndarray]
    labels: np.ndarray
    vectors: np.ndarray
    places: np.ndarray
    counts: dict


def read_labels(
    path: str, files: Sequence[EmbeddingFile], field: str, layer: Optional[str], most: int
) -> LabeledCells:
    """Return the cells that a file labels.

    Args:
        path: GeoPackage or another vector file of points or polygons, or a raster of classes.
        files: Embeddings of one identity.
        field: Field of a vector file that holds the class.
        layer: Layer of a vector file; None for the only one with the field.
        most: Largest number of cells of a class that are taken from a raster or from polygons, at
            random.

    Raises:
        EmbeddingError: If no label lies on an embedding, or they are of one class only.
        GeoError: If a file cannot be read.
    """
    if Path(path).suffix.lower() in VECTOR_SUFFIXES:
        crs, shapes, values = _read_features(path, field, layer)
        names = sorted({str(value) for value in values})
        numbers = np.array([names.index(str(value)) for value in values], np.int64)
        palette, locate = None, _locate_features(path, crs, shapes, numbers, most, len(names))
    else:
        names, palette, locate = _open_class_raster(path, files, most)
    found: List[Tuple[np.ndarray, ...]] = []
    empty, seen = 0, np.zeros(1, bool)
    for file in files:
        columns, rows, labels, hits = locate(file)
        seen = seen | hits
        vectors, valid = _read_cells(file, columns, rows)
        empty += int((~valid).sum())
        centers = np.stack([columns, rows], 1) + 0.5
        places = _move(to_map(file.raster.transform, centers), file.raster.crs, files[0].raster.crs)
        found.append((labels[valid], vectors[valid], places[valid]))
    outside = int((~seen).sum())
    labels, vectors, places = (np.concatenate(parts) for parts in zip(*found))
    counts = dict(outside=outside, data=empty)
    present = np.unique(labels)
    if not len(present):
        raise EmbeddingError(
            f'no label of {path} lies on the {len(files)} embedding(s) ({outside} outside, {empty} '
            f'on cells without data), the first of which is {files[0].path}. Check that the files '
            f'belong together and that each has the CRS it was made in.'
        )
    if len(present) == 1:
        raise EmbeddingError(
            f'all {len(labels)} labels of {path} on the embeddings are of one class, '
            f'{names[present[0]]}; expected two or more. Label what the class must be told from.'
        )
    return LabeledCells(
        tuple(names[index] for index in present),
        None if palette is None else palette[present],
        np.searchsorted(present, labels),
        vectors,
        places,
        counts,
    )


def _read_features(path: str, field: str, layer: Optional[str]) -> Tuple[Any, np.ndarray, list]:
    """Return CRS, geometries and classes of the features that have both."""
    try:
        fields = {
            str(name): list(map(str, pyogrio.read_info(path, layer=name)['fields']))
            for name, kind in pyogrio.list_layers(path)
            if kind is not None and layer in (None, name)
        }
        layers = [name for name, names in fields.items() if field in names]
        if len(layers) != 1:
            shown = '; '.join(f'{name}: {", ".join(names)}' for name, names in fields.items())
            raise EmbeddingError(
                f'{path}: {len(layers)} layers have a field {field!r}, expected one; it has '
                f'{shown or "no layer"}. Name the field of the class with --field, and the layer '
                f'with --layer.'
            )
        meta, _, geometry, values = pyogrio.raw.read(path, layer=layers[0], columns=[field])
    except (DataSourceError, DataLayerError) as error:
        state = 'no vector file that GDAL reads' if Path(path).exists() else 'no such file'
        raise EmbeddingError(
            f'cannot open {path}: {state} ({error}); expected points or polygons as GeoPackage or '
            f'GeoJSON, or a raster of classes.'
        ) from error
    shapes = shapely.from_wkb(geometry)
    known = [
        value is not None and value == value and str(value).strip() != '' for value in values[0]
    ]
    chosen = np.array(known, bool) & ~shapely.is_missing(shapes) & ~shapely.is_empty(shapes)
    shapes = shapes[chosen]
    if not len(shapes):
        raise EmbeddingError(
            f'{path}: none of {len(chosen)} feature(s) has a geometry and a class in the field '
            f'{field!r}. Label some in QGIS, or name another field with --field.'
        )
    kinds = {shape.geom_type.replace('Multi', '') for shape in shapes}
    if kinds - {'Point', 'Polygon'}:
        raise EmbeddingError(f'{path} holds {", ".join(kinds)}; expected points or polygons.')
    return meta['crs'], shapes, [_as_name(value) for value in values[0][chosen]]


def _as_name(value: object) -> str:
    """Return a class of a field as text; 1.0 is the class 1, as other programs write integers."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return str(value).strip()


# For an embedding: columns, rows and labels of its labeled cells, and which of the file's labels
# lie on the embedding.
_Located = Tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _locate_features(
    path: str, crs: Any, shapes: np.ndarray, numbers: np.ndarray, most: int, classes: int
) -> Callable[[EmbeddingFile], _Located]:
    """Return a function that finds the cells of points and polygons in an embedding."""

    def locate(file: EmbeddingFile) -> _Located:
        raster = file.raster
        if (crs is None) != (raster.crs is None):
            named, bare = (raster.path, path) if crs is None else (path, raster.path)
            raise EmbeddingError(
                f'{bare} has no CRS and {named} has one, so labels cannot be located. Set it, for '
                f'example with ogr2ogr -a_srs or gdal_edit -a_srs.'
            )
        moved = shapes if raster.crs is None else reprojected(shapes, crs, raster.crs)
        inverse = ~raster.transform
        is_point = shapely.get_type_id(shapely.get_geometry(moved, 0)) == shapely.GeometryType.POINT
        parts, owner = shapely.get_parts(moved[is_point], return_index=True)
        pixels = np.floor(to_map(inverse, shapely.get_coordinates(parts)))
        inside = ((pixels >= 0) & (pixels < (raster.width, raster.height))).all(1)
        hits = np.zeros(len(shapes), bool)
        hits[np.flatnonzero(is_point)[owner[inside]]] = True
        cells = pixels[inside].astype(np.int64)
        labels = numbers[is_point][owner[inside]]
        burnt, touched = _burn(raster, moved, ~is_point, numbers, inverse, most, classes)
        hits |= touched
        columns, rows, burnt_labels = burnt
        # Two labels of a class in one cell are one; of two classes, the cell has both.
        unique = np.unique(
            np.stack(
                [
                    np.concatenate([cells[:, 0], columns]),
                    np.concatenate([cells[:, 1], rows]),
                    np.concatenate([labels, burnt_labels]),
                ]
            ),
            axis=1,
        )
        return unique[0], unique[1], unique[2], hits

    return locate


def _burn(
    raster: Raster,
    shapes: np.ndarray,
    chosen: np.ndarray,
    numbers: np.ndarray,
    inverse: affine.Affine,
    most: int,
    classes: int,
) -> Tuple[Tuple[np.ndarray, np.ndarray, np.ndarray], np.ndarray]:
    """Return the cells whose centers polygons contain, and which of the shapes have some."""
    parts, owner = shapely.get_parts(shapes, return_index=True)
    areal = chosen[owner] & (shapely.get_type_id(parts) == shapely.GeometryType.POLYGON)
    parts, owner = parts[areal], owner[areal]
    sample = _Sample(most, classes)
    touched = np.zeros(len(shapes), bool)
    # In pixels, so that the transform of the raster, which may point up, does not matter.
    parts = shapely.transform(parts, lambda points: to_map(inverse, points))
    order = np.argsort(-shapely.area(parts), kind='stable')
    parts, owner = parts[order], owner[order]
    bounds = shapely.bounds(parts)
    for row in range(0, raster.height, _ROWS):
        rows = min(_ROWS, raster.height - row)
        near = np.flatnonzero((bounds[:, 1] < row + rows) & (bounds[:, 3] > row))
        shape = rows, raster.width
        shift = affine.Affine.translation(0, row)
        burnt = burn_polygons(parts[near], owner[near] + 1, shape, 0, 'int32', shift)
        ys, xs = np.nonzero(burnt)
        owners = burnt[ys, xs] - 1
        touched[owners] = True
        sample.add(xs, ys + row, numbers[owners])
    return sample.take(), touched


class _Sample:
    """At most ``most`` random cells of each class.

    Every cell gets a random number, and those with the smallest stay.
    """

    def __init__(self, most: int, classes: int) -> None:
        self._most, self._random = most, np.random.RandomState(_SEED)
        empty = np.empty((0, 3), np.int64)
        self._cells = [(empty, np.empty(0)) for _ in range(classes)]

    def add(self, columns: np.ndarray, rows: np.ndarray, labels: np.ndarray) -> None:
        keys = self._random.random_sample(len(labels))
        for label in np.unique(labels):
            chosen = labels == label
            cells = np.stack([columns[chosen], rows[chosen], labels[chosen]], 1)
            kept, kept_keys = self._cells[label]
            cells, joined = np.concatenate([kept, cells]), np.concatenate([kept_keys, keys[chosen]])
            order = np.argsort(joined, kind='stable')[: self._most]
            self._cells[label] = cells[order], joined[order]

    def take(self) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        cells = np.concatenate([cells for cells, _ in self._cells])
        return cells[:, 0], cells[:, 1], cells[:, 2]


def _open_class_raster(
    path: str, files: Sequence[EmbeddingFile], most: int
) -> Tuple[List[str], Optional[np.ndarray], Callable[[EmbeddingFile], _Located]]:
    """Return the classes of a raster, their colors, and a function that finds labeled cells."""
    raster = Raster(path)
    if len(raster.bands) != 1 or raster.dtype.kind not in 'ui':
        raise EmbeddingError(
            f'{path} has {len(raster.bands)} band(s) of {raster.dtype}, expected one band of class '
            f'indices (integers), or points or polygons.'
        )
    values = set()
    for row in range(0, raster.height, _ROWS):
        (pixels,), valid = raster.read(0, row, raster.width, min(_ROWS, raster.height - row))
        values |= set(np.unique(pixels[valid]).tolist())
    # 255 marks ignored pixels in MMSegmentation's labels.
    codes = np.array(sorted(values - {255}), np.int64)
    if len(codes) > 254:
        raise EmbeddingError(f'{path} holds {len(codes)} values, expected at most 254 classes.')
    known = {entry['value']: entry for entry in read_classes(path)}
    names = [str(known[code]['name']) if code in known else str(code) for code in codes.tolist()]
    palette = (
        np.array([known[code]['color'] for code in codes.tolist()], np.uint8)
        if known and all(code in known for code in codes.tolist())
        else None
    )

    def locate(file: EmbeddingFile) -> _Located:
        sample = _Sample(most, len(codes))
        to_pixels = _pixel_finder(raster, file)
        found = False
        for row in range(0, file.raster.height, _ROWS):
            rows = min(_ROWS, file.raster.height - row)
            ys, xs = (axis.ravel() for axis in np.mgrid[row : row + rows, 0 : file.raster.width])
            pixels = np.floor(to_pixels(np.stack([xs, ys], 1) + 0.5))
            inside = ((pixels >= 0) & (pixels < (raster.width, raster.height))).all(1)
            if not inside.any():
                continue
            columns, lines = pixels[inside].astype(np.int64).T
            box = columns.min(), lines.min(), np.ptp(columns) + 1, np.ptp(lines) + 1
            (values,), valid = raster.read(*map(int, box))
            values = values[lines - box[1], columns - box[0]]
            labeled = valid[lines - box[1], columns - box[0]] & np.isin(values, codes)
            found = found or bool(labeled.any())
            sample.add(
                xs[inside][labeled], ys[inside][labeled], np.searchsorted(codes, values[labeled])
            )
        return (*sample.take(), np.array([found]))

    return names, palette, locate


def _pixel_finder(raster: Raster, file: EmbeddingFile) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from (column, row) of an embedding to those of a raster."""
    other = file.raster
    if raster.is_georeferenced and other.is_georeferenced:
        return lambda cells: to_map(
            ~raster.transform, _move(to_map(other.transform, cells), other.crs, raster.crs)
        )
    if raster.is_georeferenced or other.is_georeferenced:
        raise EmbeddingError(
            f'one of {raster.path} and {other.path} has no georeference, so labels cannot be '
            f'located. Give both the CRS and transform they were made in.'
        )
    # Both are in pixels of one picture: a cell is as many pixels as the sizes say.
    factor = raster.width / other.width, raster.height / other.height
    return lambda cells: cells * factor


def _read_cells(
    file: EmbeddingFile, columns: np.ndarray, rows: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """Return unit vectors (N, C) of cells, and which have data; each tile is read once."""
    vectors = np.zeros((len(columns), file.dims), np.float32)
    valid = np.zeros(len(columns), bool)
    height, width = file.raster.blocks
    # A file may be one block, or have rows as blocks.
    height, width = min(max(height, 16), 512), min(width, 512)
    tiles = np.stack([rows // height, columns // width], 1)
    with file.raster:
        for tile in np.unique(tiles, axis=0):
            chosen = np.flatnonzero((tiles == tile).all(1))
            top, left = int(tile[0]) * height, int(tile[1]) * width
            right = min(width, file.raster.width - left)
            bottom = min(height, file.raster.height - top)
            values, known = file.read_unit(left, top, right, bottom)
            y, x = rows[chosen] - top, columns[chosen] - left
            vectors[chosen], valid[chosen] = values[:, y, x].T, known[y, x]
    return vectors, valid


def _move(points: np.ndarray, source: Any, target: Any) -> np.ndarray:
    """Return (N, 2) coordinates in another CRS; as they are if one is not known."""
    if source is None or target is None:
        return points
    return shapely.get_coordinates(reprojected(shapely.points(points), source, target))
