"""An area of interest: polygons that define which pixels of a scene count.

`AreaOfInterest` reads a file of polygons in any CRS; `SceneArea` is the same area in the pixels of
one scene. Labels from polygons are in `vector_labels.py`, which has the functions to reproject and
burn polygons that are used here too.
"""

from __future__ import annotations

import hashlib
import warnings
from typing import List, NamedTuple, Optional, Sequence, Tuple

import affine
import numpy as np
import pyproj
import shapely

from .coordinates import short_crs, window_bounds
from .errors import GeoError, PathName
from .gdal_files import check_name, vector_open_error
from .raster import Raster
from .reference_systems import check_proj_database
from .vector_labels import (
    IndexedPolygons,
    bounds_of,
    format_bounds,
    place_polygons,
    polygon_parts,
    tolerance_of,
)

# Side in pixels of the squares that are burned at a time.
_TILE = 1024


class _AreaLayer(NamedTuple):
    name: str
    crs: pyproj.CRS
    polygons: np.ndarray


class AreaOfInterest:
    """The union of all polygons of a file, of all its layers, in any CRS.

    Features of other kinds are left out, with a warning.

    Args:
        path: Path of a file with polygons that GDAL reads (GeoPackage, GeoJSON, Shapefile, KML).
        where: Condition on the features' fields, as in SQL; default: all features.

    Attributes:
        path: Path of the file.
        key: Text that changes with the polygons and their CRS.

    Raises:
        GeoError: If the file cannot be read, has no polygons, or a layer of them has no CRS.
    """

    def __init__(self, path: PathName, where: Optional[str] = None) -> None:
        self.path = str(path)
        self._layers = _read_layers(self.path, where)
        digest = hashlib.sha256()
        for layer in self._layers:
            digest.update(layer.crs.to_wkt().encode())
            digest.update(b''.join(shapely.to_wkb(layer.polygons)))
        self.key = digest.hexdigest()[:16]

    def of_scene(self, scene: Raster) -> SceneArea:
        """Return the area in the pixels of a scene. It may be empty.

        Raises:
            GeoError: If the scene has no georeference, or the polygons cannot be reprojected.
        """
        if not scene.is_georeferenced:
            raise GeoError(
                f'{scene.path} {scene.georeference_gap}, so the area of {self.path} '
                f'cannot be located in it; georeference it, or leave the area out.'
            )
        assert scene.crs is not None, 'a georeferenced scene has a CRS'
        crs = scene.crs.to_wkt()
        layers = [
            place_polygons(
                layer.polygons,
                np.ones(len(layer.polygons), np.int32),
                layer.crs,
                crs,
                tolerance_of(scene),
                self.path,
            )
            for layer in self._layers
        ]
        return SceneArea(layers, scene.transform, (scene.height, scene.width), self.key)

    def describe_miss(self, scene: Raster) -> str:
        """Return a sentence for a scene that the area does not cover: where area and scene lie."""
        assert scene.crs is not None, 'a georeferenced scene has a CRS'
        bounds = self.of_scene(scene).bounds()
        return (
            f'{self.path} covers no pixel of {scene.path}: in {short_crs(scene.crs)} the area '
            f'lies in (left, bottom, right, top) = {format_bounds(bounds)}, the scene in '
            f'{format_bounds(bounds_of(scene))}'
        )


class SceneArea:
    """An area of interest in the pixels of one scene.

    Args:
        layers: Polygons in the CRS of the scene.
        transform: Affine map from (column, row) to coordinates of the scene's CRS.
        size: Height and width of the scene in pixels.
        key: Key of the area.
        all_touched: Whether every pixel that the area touches belongs to it. If False, a pixel
            belongs to the area if its center does.
    """

    def __init__(
        self,
        layers: Sequence[IndexedPolygons],
        transform: affine.Affine,
        size: Tuple[int, int],
        key: str,
        all_touched: bool = False,
    ) -> None:
        self._layers, self._transform, self._size = list(layers), transform, size
        self._key, self._all_touched = key, all_touched

    def __deepcopy__(self, memo: object) -> SceneArea:
        # The area never changes, and a copy of a sample must not copy all polygons.
        return self

    def __repr__(self) -> str:
        # The text identifies cached samples, so it must be the same in every run.
        return f'SceneArea({self._key})'

    def mask(self, column: int, row: int, width: int, height: int) -> np.ndarray:
        """Return which pixels of a window are in the area, bool (height, width)."""
        inside = np.zeros((height, width), bool)
        for layer in self._layers:
            inside |= (
                layer.burn(self._transform, (column, row, width, height), 0, self._all_touched) != 0
            )
        return inside

    def meets(self, column: int, row: int, width: int, height: int) -> bool:
        """Return whether a pixel of a window lies both in the scene and in the area."""
        right, bottom = min(column + width, self._size[1]), min(row + height, self._size[0])
        # Tile by tile, so that memory does not grow with the scene.
        for top in range(row, bottom, _TILE):
            for left in range(column, right, _TILE):
                box = left, top, min(_TILE, right - left), min(_TILE, bottom - top)
                bounds = window_bounds(self._transform, box)
                is_near = any(layer.meets(bounds) for layer in self._layers)
                if is_near and self.mask(*box).any():
                    return True
        return False

    def resized(self, size: Tuple[int, int]) -> SceneArea:
        """Return the area for a scene with pixels of another size.

        In the result, every pixel that the area touches belongs to it.

        Args:
            size: Height and width of the scene in pixels of the other size.
        """
        if size == self._size:
            return self
        scale = affine.Affine.scale(self._size[1] / size[1], self._size[0] / size[0])
        return SceneArea(self._layers, self._transform * scale, size, self._key, True)

    def bounds(self) -> List[float]:
        """Return left, bottom, right and top of the polygons, in the CRS of the scene."""
        return list(
            shapely.total_bounds(np.concatenate([layer.polygons for layer in self._layers]))
        )


def _read_layers(path: str, where: Optional[str]) -> List[_AreaLayer]:
    # pyogrio imports pandas, which takes longer than the rest of the package's imports.
    import pyogrio
    from pyogrio.errors import DataLayerError, DataSourceError

    check_name(path)
    check_proj_database()
    try:
        names = [str(name) for name, kind in pyogrio.list_layers(path) if kind is not None]
        read = [(name, *_read_layer(path, name, where)) for name in names]
    except (DataSourceError, DataLayerError) as error:
        raise vector_open_error(path, error) from error
    skipped = sorted({kind for _, _, _, kinds in read for kind in kinds})
    layers = []
    for name, crs, polygons, _ in read:
        if not len(polygons):
            continue
        # Older GDAL names the CRS of a GeoPackage's layer without CRS "Undefined ...".
        if not crs or pyproj.CRS.from_user_input(crs).name.startswith('Undefined '):
            raise GeoError(
                f'{path}: layer {name!r} has no CRS, so its polygons cannot be located '
                'in a scene; set the CRS, for example with ogr2ogr -a_srs.'
            )
        layers.append(_AreaLayer(name, pyproj.CRS.from_user_input(crs), polygons))
    if not layers:
        content = f', only {", ".join(skipped)}' if skipped else ''
        raise GeoError(
            f'{path} holds no polygons with an area{content}; expected polygons around '
            'what counts (buffer points or lines in a GIS).'
        )
    if skipped:
        warnings.warn(
            f'{path}: features that are {", ".join(skipped)} are left out of the area; '
            'only polygons count.',
            stacklevel=4,
        )
    return layers


def _read_layer(
    path: str, name: str, where: Optional[str]
) -> Tuple[Optional[str], np.ndarray, List[str]]:
    """Return the CRS and polygons of a layer, and the kinds of its other features."""
    import pyogrio.raw

    meta, _, geometry, _ = pyogrio.raw.read(path, layer=name, columns=[], where=where)
    shapes = shapely.from_wkb(geometry)
    shapes = shapely.force_2d(shapes[~(shapely.is_missing(shapes) | shapely.is_empty(shapes))])
    areal = np.isin(
        shapely.get_type_id(shapes),
        (
            shapely.GeometryType.POLYGON,
            shapely.GeometryType.MULTIPOLYGON,
            shapely.GeometryType.GEOMETRYCOLLECTION,
        ),
    )
    polygons = polygon_parts(shapely.make_valid(shapes[areal]))[0]
    return (
        meta['crs'],
        polygons[shapely.area(polygons) > 0],
        [f'{shape.geom_type}s' for shape in shapes[~areal]],
    )
