"""Labels of a scene, window by window: from a raster on the same grid, or from polygons."""
from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np
import pyogrio.raw
import pyproj
import rasterio
import rasterio.features
import shapely
from pyogrio.errors import DataLayerError, DataSourceError
from rasterio.windows import Window

from .pool import open_raster
from .raster import GeoError, Raster, to_map

VECTOR_SUFFIXES = ('.gpkg', '.geojson', '.json', '.shp', '.fgb')

RASTER_SUFFIXES = ('.tif', '.tiff', '.vrt', '.img', '.png')

UNLABELLED = -1 << 31
"""Of pixels that have no label: no-data, or beyond the scene."""


class RasterLabels:
    """Class values from a raster on the grid of its scene.

    Args:
        path: A raster with one band of integers.
        scene: The scene it belongs to.

    Raises:
        GeoError: If CRS, transform or size differ; both files are named. A raster without
            georeference needs the size of the scene only.
    """

    def __init__(self, path: Any, scene: Raster) -> None:
        self.path = str(path)
        labels = Raster(path)
        if len(labels.bands) != 1 or labels.dtype.kind not in 'ui':
            raise GeoError(f'labels {path} have {len(labels.bands)} band(s) of '
                           f'{labels.dtype}, expected one band of class indices (integers); '
                           'convert them, for example with gdal_translate -b 1 -ot Byte.')
        _check_same_grid(labels, scene)

    def read(self, column: int, row: int, width: int, height: int) -> np.ndarray:
        """Return int32 (height, width): values, ``UNLABELLED`` for no-data and beyond."""
        values, valid = open_raster(self.path).read(column, row, width, height)
        return np.where(valid, values[0].astype(np.int32), np.int32(UNLABELLED))


class VectorLabels:
    """Polygons with a class each, burnt into windows of any scene.

    All polygons are read once; forked workers share them. In a window those whose interior holds
    a pixel's centre give it their class, large ones drawn first, so that small ones stay visible.

    Args:
        path: A file with polygons that GDAL reads (GeoPackage, GeoJSON, Shapefile, FlatGeobuf).
        field: The attribute with the class: its name, or its index.
        classes: Class names by index.
        extra: Other index that may occur, such as that of ignored pixels.

    Raises:
        GeoError: For a file, a field or a value that is not as expected.
    """

    def __init__(self, path: Any, field: str, classes: Sequence[str], extra: int = 255) -> None:
        self.path = str(path)
        self._crs, polygons, values = _read_vector(self.path, field)
        indices = _class_indices(values, list(classes), extra, f'{self.path}: field {field!r}')
        self._polygons, self._indices = _large_first(polygons, indices, self.path)
        self._in_crs: Dict[str, Tuple[np.ndarray, Any]] = {}

    def for_scene(self, scene: Raster, outside: int) -> BurntLabels:
        """Return the labels of a scene; ``outside`` is the value where no polygon lies.

        Raises:
            GeoError: If the scene has no georeference, or the polygons cannot be reprojected.
        """
        if not scene.is_georeferenced:
            raise GeoError(f'{scene.path} has no georeference, so polygons have no place in '
                           f'it; georeference it, or give labels as a raster of its size instead '
                           f'of {self.path}.')
        assert scene.crs is not None  # it is georeferenced
        return BurntLabels(self, scene.crs.to_wkt(), scene.transform, outside)

    def inside(self, crs: str, bounds: Sequence[float]) -> Tuple[np.ndarray, np.ndarray]:
        """Return the polygons that meet ``bounds`` (in ``crs``), clipped, and their indices."""
        if crs not in self._in_crs:
            polygons = _reproject(self._polygons, self._crs, crs, self.path)
            self._in_crs[crs] = polygons, shapely.STRtree(polygons)
        polygons, tree = self._in_crs[crs]
        found = np.sort(tree.query(shapely.box(*bounds)))
        return shapely.clip_by_rect(polygons[found], *bounds), self._indices[found]


class BurntLabels:
    """The labels of one scene; see ``VectorLabels.for_scene``."""

    def __init__(self, source: VectorLabels, crs: str, transform: Any, outside: int) -> None:
        self.path = source.path
        self._source, self._crs, self._transform = source, crs, transform
        self._outside = outside

    def read(self, column: int, row: int, width: int, height: int) -> np.ndarray:
        """Return int32 (height, width): class indices."""
        x, y = (column - 1, column + width + 1), (row - 1, row + height + 1)
        corners = to_map(self._transform, np.array([(i, j) for i in x for j in y]))
        polygons, indices = self._source.inside(
            self._crs, [*corners.min(0), *corners.max(0)])
        parts, owner = shapely.get_parts(polygons, return_index=True)
        shapes = [(part, int(index)) for part, index in zip(parts, indices[owner])
                  if part.geom_type == 'Polygon' and not part.is_empty]
        if not shapes:
            return np.full((height, width), self._outside, np.int32)
        return rasterio.features.rasterize(
            shapes, out_shape=(height, width), fill=self._outside, dtype='int32',
            transform=rasterio.windows.transform(Window(column, row, width, height),
                                                 self._transform))


def find_labels(labels: str, scene: str) -> str:
    """Return the label file of a scene: ``labels`` itself, or in that folder the one of its name.

    Raises:
        GeoError: If there is none, or more than one.
    """
    folder = Path(labels)
    if not folder.is_dir():
        return labels
    stem = Path(scene).stem
    found = [path for path in sorted(folder.glob('*'))
             if path.stem == stem and path.suffix.lower() in RASTER_SUFFIXES + VECTOR_SUFFIXES]
    if len(found) != 1:
        names = ', '.join(path.name for path in found) or 'none'
        raise GeoError(f'scene {scene} needs one label file {stem}.* in {folder}, found {names}; '
                       f'expected one of {", ".join(RASTER_SUFFIXES + VECTOR_SUFFIXES)}.')
    return str(found[0])


def _check_same_grid(labels: Raster, scene: Raster) -> None:
    here = f'labels {labels.path}'
    if (labels.width, labels.height) != (scene.width, scene.height):
        raise GeoError(f'{here} are {labels.width} x {labels.height} pixels, their scene '
                       f'{scene.path} is {scene.width} x {scene.height}; expected the same grid, '
                       'cut and resample them to it (rio warp --like).')
    if not (labels.is_georeferenced and scene.is_georeferenced):
        return
    if labels.crs != scene.crs:
        raise GeoError(f'{here} are in {_short(labels.crs)}, their scene {scene.path} is in '
                       f'{_short(scene.crs)}; reproject them to its grid (rio warp --like, '
                       'resampling nearest).')
    corners = np.array([(0, 0), (scene.width, 0), (0, scene.height)])
    step = np.abs(to_map(scene.transform, np.array([(1, 1)]))
                  - to_map(scene.transform, np.array([(0, 0)])))
    offset = np.abs(to_map(labels.transform, corners) - to_map(scene.transform, corners)) / step
    if offset.max() > 0.1:
        raise GeoError(f'{here} lie up to {offset.max():.4g} pixels beside their scene '
                       f'{scene.path} (transforms {tuple(labels.transform)[:6]} and '
                       f'{tuple(scene.transform)[:6]}); resample them to its grid '
                       '(rio warp --like, resampling nearest).')


def _short(crs: Any) -> str:
    return str(crs.to_string())[:60]


def _read_vector(path: str, field: str) -> Tuple[pyproj.CRS, np.ndarray, np.ndarray]:
    """Return the CRS, the polygons (shapely) and their values of ``field``."""
    try:
        there = list(pyogrio.read_info(path)['fields'])
        if field not in there:
            raise GeoError(f'{path} has no field {field!r}, it has {there}; set class_field to '
                           'the one with the class.')
        meta, _, geometry, fields = pyogrio.raw.read(path, columns=[field])
    except (DataSourceError, DataLayerError) as error:
        state = 'no vector file that GDAL reads' if Path(path).exists() else 'no such file'
        raise GeoError(f'cannot open {path}: {state} ({error}); expected polygons as GeoPackage '
                       'or GeoJSON. Check the path, or copy the file again.') from error
    if not meta['crs']:
        raise GeoError(f'{path} says no CRS, so its polygons have no place in a scene; set it, '
                       'for example with ogr2ogr -a_srs.')
    polygons = shapely.from_wkb(geometry)
    kinds = shapely.get_type_id(polygons)
    other = ~np.isin(kinds, (shapely.GeometryType.POLYGON, shapely.GeometryType.MULTIPOLYGON))
    other &= ~shapely.is_missing(polygons)
    if other.any():
        number = int(np.flatnonzero(other)[0])
        raise GeoError(f'{path}: feature {number} of the layer is a {polygons[number].geom_type}, '
                       f'expected polygons ({int(other.sum())} others); buffer or remove them.')
    present = ~(shapely.is_missing(polygons) | shapely.is_empty(polygons))
    return pyproj.CRS.from_user_input(meta['crs']), polygons[present], fields[0][present]


def _class_indices(values: np.ndarray, classes: List[str], extra: int, where: str) -> np.ndarray:
    """Return int32 (N,) class indices for names or indices."""
    index = {name: number for number, name in enumerate(classes)}
    known = {value: _class_index(value, index, len(classes), extra)
             for value in set(values.tolist())}
    unknown = sorted(str(value) for value, number in known.items() if number is None)
    if unknown:
        raise GeoError(f'{where} holds {", ".join(unknown[:5])}; expected a class of {classes} or '
                       f'its index 0 to {len(classes) - 1}, or {extra} for ignored pixels. '
                       'Correct the file or metainfo.')
    return np.array([known[value] for value in values.tolist()], np.int32)


def _class_index(value: Any, index: Dict[str, int], count: int, extra: int) -> Optional[int]:
    if isinstance(value, str):
        return index.get(value)
    if value is None or value != value or int(value) != value:
        return None
    return int(value) if 0 <= value < count or value == extra else None


def _large_first(polygons: np.ndarray, indices: np.ndarray, path: str
                 ) -> Tuple[np.ndarray, np.ndarray]:
    if not len(polygons):
        raise GeoError(f'{path} holds no polygons; check that it is the right file and layer.')
    order = np.argsort(-shapely.area(polygons), kind='stable')
    return polygons[order], indices[order]


def _reproject(polygons: np.ndarray, source: pyproj.CRS, target: str, path: str) -> np.ndarray:
    destination = pyproj.CRS.from_wkt(target)
    if source.equals(destination, ignore_axis_order=True):
        return polygons
    transformer = pyproj.Transformer.from_crs(source, destination, always_xy=True)
    moved = shapely.transform(polygons, lambda points: np.stack(
        transformer.transform(points[:, 0], points[:, 1]), 1))
    if not np.isfinite(shapely.get_coordinates(moved)).all():
        raise GeoError(f'{path}: polygons in {source.name} have no coordinates in '
                       f'{destination.name}; check that its CRS is the one it was drawn in.')
    return moved
