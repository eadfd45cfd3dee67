"""Labels of a scene from polygons, burned window by window.

`VectorLabels` has the polygons of a file, read once by `vector_file.py`. `BurntLabels` are these
polygons as the labels of one scene, with the interface of `RasterLabels`. Polygons are reprojected
once per CRS and indexed, so a window burns only the polygons near it.

Shapes:
    polygons, indices    (N,) shapely polygons and their int32 class indices, large ones first
    labels               (height, width) class indices, uint8 if all are at most 255, else int32
    bounds               left, bottom, right, top in a CRS
"""

from __future__ import annotations

import math
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import affine
import numpy as np
import pyproj
import rasterio.windows
import shapely
from rasterio.windows import Window

from .blocks import ScenePart
from .burning import burn_polygons
from .coordinates import project_polygons, short_crs, to_map, window_bounds
from .ellipsoid import pixel_sides
from .errors import Box, GeoError, PathName
from .raster import Raster
from .reference_systems import full_turn, next_to, same_crs


class IndexedPolygons(NamedTuple):
    """Polygons in the CRS of a scene, with a spatial index.

    Attributes:
        polygons: Single polygons, object (N,).
        indices: Class index of each polygon, int32 (N,).
        tree: Spatial index of the polygons.
        shifts: Offsets in x at which the polygons are looked up, in the unit of the CRS: a place
            has several x, one full turn apart, in a geographic CRS and in cylindrical projections
            (see ``full_turn``). In any other CRS the only shift is 0.
    """

    polygons: np.ndarray
    indices: np.ndarray
    tree: shapely.STRtree
    shifts: Tuple[float, ...]

    def near(self, bounds: Sequence[float], shift: float) -> Tuple[np.ndarray, List[float]]:
        """Return the numbers of the polygons that meet ``bounds``, moved by -``shift`` in x.

        The second value is the moved bounds.
        """
        left, bottom, right, top = bounds
        moved = [left - shift, bottom, right - shift, top]
        return self.tree.query(shapely.box(*moved)), moved

    def meets(self, bounds: Sequence[float]) -> bool:
        """Return whether a polygon may meet ``bounds``, which its bounds do."""
        return any(len(self.near(bounds, shift)[0]) for shift in self.shifts)

    def inside(self, bounds: Sequence[float]) -> Tuple[np.ndarray, np.ndarray]:
        """Return the polygons within ``bounds``, clipped, and their class indices."""
        clipped, numbers = [], []
        for shift in self.shifts:
            nearby, moved_bounds = self.near(bounds, shift)
            polygons = shapely.clip_by_rect(self.polygons[nearby], *moved_bounds)
            clipped.append(_move(polygons, shift) if shift else polygons)
            numbers.append(nearby)
        order = np.argsort(np.concatenate(numbers), kind='stable')
        return np.concatenate(clipped)[order], self.indices[np.concatenate(numbers)[order]]

    def burn(
        self, transform: affine.Affine, box: Box, outside: int, all_touched: bool = False
    ) -> np.ndarray:
        """Return the class indices of a window, (height, width): uint8 if they fit, else int32.

        Args:
            transform: Affine map from (column, row) to coordinates of the CRS.
            box: Window: column, row, width, height in pixels.
            outside: Class index of pixels that no polygon covers.
            all_touched: Whether a polygon covers every pixel that it touches. If False, it covers
                the pixels whose center it contains.
        """
        column, row, width, height = box
        around = column - 1, row - 1, width + 2, height + 2
        polygons, indices = self.inside(window_bounds(transform, around))
        pieces, owner = shapely.get_parts(polygons, return_index=True)
        areal = _is_areal(pieces)
        burnt = indices[owner][areal]
        fits = all(
            0 <= index <= 255 for index in (outside, burnt.min(initial=0), burnt.max(initial=0))
        )
        dtype = 'uint8' if fits else 'int32'
        return burn_polygons(
            pieces[areal],
            burnt,
            (height, width),
            outside,
            dtype,
            rasterio.windows.transform(Window(column, row, width, height), transform),
            all_touched,
        )


class VectorLabels:
    """Polygons with a class, which are burned into windows of any scene.

    All polygons are read once, and forked workers share them. A pixel gets the class of the polygon
    that contains its center. Large polygons are drawn first, so that small ones stay visible.
    Polygons that cross themselves are made valid; a feature without area is left out, with a
    warning.

    Args:
        path: Path of a file with polygons that GDAL reads (GeoPackage, GeoJSON, Shapefile,
            FlatGeobuf).
        field: Name of the attribute that holds the class, as a name or as an index.
        classes: Class names, in the order of their indices.
        extra: Additional index that may occur, such as the index of ignored pixels.
        layer: Name of the layer; None for the only layer that has the field.
        default_class: Class, as a name or as an index, of features whose field is empty, and of all
            features if the file has no such field. None: both are errors.
        point_radius: Radius in meters of the disk that stands for a point; None: points are errors.

    Attributes:
        defaults: Number of features that have the default class.
        guess: Sentence on the file's encoding, if it was guessed and the guess matters, or ''.

    Raises:
        GeoError: If the file, the layer, the field or a value is not as expected, or if several
            layers have the field and none is named.
    """

    def __init__(
        self,
        path: PathName,
        field: str,
        classes: Sequence[str],
        extra: int = 255,
        layer: Optional[str] = None,
        default_class: Union[None, int, str] = None,
        point_radius: Optional[float] = None,
    ) -> None:
        # pyogrio imports pandas, which takes longer than the rest of the package's imports.
        from .vector_file import read_labeled_polygons

        self.path, self.field, self.layer = str(path), field, layer
        self.default_class, self.point_radius = default_class, point_radius
        file = read_labeled_polygons(
            self.path, field, list(classes), extra, layer, default_class, point_radius
        )
        self._crs, self.defaults, self.guess = file.crs, file.defaults, file.guess
        self._polygons, self._indices = _large_first(file.polygons, file.indices, self.path)
        # CRS as WKT and tolerance -> the polygons in this CRS.
        self._in_crs: Dict[Tuple[str, float], IndexedPolygons] = {}
        self._met = False
        # The first scene without a polygon.
        self._missed: Optional[Raster] = None

    def for_scene(self, scene: Raster, outside: int) -> BurntLabels:
        """Return the labels of a scene.

        Args:
            scene: Scene to burn the polygons into; it needs a georeference.
            outside: Class index of pixels that no polygon covers.

        Raises:
            GeoError: If the scene has no georeference, or the polygons cannot be reprojected.
        """
        if not scene.is_georeferenced:
            raise GeoError(
                f'{scene.path} {scene.georeference_gap}, so polygons cannot be located '
                f'in it; georeference it, or give labels as a raster of its size in '
                f'place of {self.path}.'
            )
        assert scene.crs is not None, 'a georeferenced scene has a CRS'
        self._check_radius(scene)
        key = scene.crs.to_wkt(), tolerance_of(scene)
        # Reprojected here, before workers are forked, so that the workers share the result.
        if key not in self._in_crs:
            self._in_crs[key] = place_polygons(
                self._polygons, self._indices, self._crs, *key, self.path
            )
        if self._in_crs[key].meets(bounds_of(scene)):
            self._met = True
        elif self._missed is None:
            self._missed = scene
        return BurntLabels(self, key, scene.transform, outside)

    def __deepcopy__(self, memo: object) -> VectorLabels:
        # The polygons never change, and a copy of a sample must not copy them all.
        return self

    def _check_radius(self, scene: Raster) -> None:
        """Raise a GeoError if a disk may lie between the centers of a scene's pixels."""
        if self.point_radius is None:
            return
        least = math.sqrt(0.5) * max(pixel_sides(scene))
        # A radius that was rounded for a config is meant to suffice.
        if self.point_radius < 0.99 * least:
            raise GeoError(
                f'point_radius={self.point_radius:g} meters: a point may then label no pixel of '
                f'{scene.path}, whose pixels have a diagonal of {2 * least:.3g} meters. Expected at '
                f'least half of it, {least:.3g}.'
            )

    def check_met(self) -> None:
        """Check that the polygons meet at least one scene that ``for_scene`` was called with.

        Raises:
            GeoError: If ``for_scene`` was called and no polygon meets any of the scenes.
        """
        scene = self._missed
        if self._met or scene is None:
            return
        assert scene.crs is not None, 'a georeferenced scene has a CRS'
        key = scene.crs.to_wkt(), tolerance_of(scene)
        bounds = shapely.total_bounds(self._in_crs[key].polygons)
        raise GeoError(
            f'no polygon of {self.path} (CRS {self._crs.name}) meets a scene: in '
            f'{short_crs(scene.crs)}, the CRS of {scene.path}, the polygons lie in (left, bottom, '
            f'right, top) = {format_bounds(bounds)}, the scene in '
            f'{format_bounds(bounds_of(scene))}. Check that these files belong together and that '
            'each has the CRS it was made in (ogr2ogr -a_srs and rio edit-info --crs correct it).'
        )

    def polygons_in(self, key: Tuple[str, float]) -> IndexedPolygons:
        """Return the polygons in the CRS of a scene that ``for_scene`` was called with.

        Args:
            key: CRS as WKT, and tolerance (``tolerance_of``).
        """
        return self._in_crs[key]


class BurntLabels:
    """The labels of one scene, as returned by ``VectorLabels.for_scene``.

    Attributes:
        path: Path of the vector file.
        settings: What the labels depend on in addition to the file, as JSON values.
    """

    def __init__(
        self, source: VectorLabels, key: Tuple[str, float], transform: affine.Affine, outside: int
    ) -> None:
        self.path = source.path
        self._source, self._key, self._transform = source, key, transform
        self._outside = outside
        self.settings: Dict[str, Any] = dict(field=source.field, outside=outside)
        # The settings are part of the keys of cached features. Those without a value are left out,
        # so that caches from before the setting existed stay valid.
        for name in ('layer', 'default_class', 'point_radius'):
            if getattr(source, name) is not None:
                self.settings[name] = getattr(source, name)

    def __deepcopy__(self, memo: object) -> BurntLabels:
        return self

    def read(self, column: int, row: int, width: int, height: int) -> Tuple[np.ndarray, np.ndarray]:
        """Return the class indices of a window given in pixels, and the pixels that have a label.

        Both are (height, width), as from ``RasterLabels.read``; here every pixel has a label.
        """
        values = self._source.polygons_in(self._key).burn(
            self._transform, (column, row, width, height), self._outside
        )
        return values, np.ones(values.shape, bool)

    def cover(
        self, width: int, height: int, part: Optional[ScenePart] = None
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Return the class index of each polygon in the scene, and the pixels that it covers.

        Args:
            width: Width of the scene in pixels.
            height: Height of the scene in pixels.
            part: The pixels that count; None: all of the scene.

        Returns:
            Two arrays (N,), a value for each polygon (a multi-polygon has several): the class index,
            and the pixels that it covers and that count. The pixels are areas, so overlapping
            polygons count twice. They are 0 where neither a pixel nor half of the polygon counts: so
            small a corner hardly contains the center of a pixel.
        """
        corners = to_map(
            self._transform, np.array([(0, 0), (width, 0), (width, height), (0, height)])
        )
        polygons, indices = self._source.polygons_in(self._key).inside(
            [*corners.min(0), *corners.max(0)]
        )
        to_pixels = ~self._transform
        polygons = shapely.transform(polygons, lambda points: to_map(to_pixels, points))
        if self._transform.b or self._transform.d:
            # A rotated scene is smaller than its bounds, to which the polygons are clipped.
            outline = shapely.box(0, 0, width, height)
            polygons = shapely.intersection(shapely.make_valid(polygons), outline)
        areas = shapely.area(polygons)
        polygons, indices, areas = (values[areas > 0] for values in (polygons, indices, areas))
        if part is None:
            return indices, areas
        counted = part.covered_area(polygons)
        return indices, np.where(counted >= np.minimum(1, areas / 2), counted, 0)


def place_polygons(
    polygons: np.ndarray,
    indices: np.ndarray,
    source: pyproj.CRS,
    crs: str,
    tolerance: float,
    path: str,
) -> IndexedPolygons:
    """Return polygons with their class indices in another CRS, made valid and indexed.

    Args:
        polygons: Single polygons in the CRS ``source``, object (N,).
        indices: Class index of each polygon, int32 (N,).
        source: CRS of the polygons.
        crs: CRS of the result, as WKT.
        tolerance: Largest distance of an edge from its place, in the unit of the CRS.
        path: Path of the polygons' file, for an error message.

    Raises:
        GeoError: If the polygons have no coordinates in the other CRS.
    """
    target = pyproj.CRS.from_wkt(crs)
    if not same_crs(source, target):
        moved = _reproject(polygons, source, target, tolerance, path)
        polygons, owner = polygon_parts(shapely.make_valid(moved))
        indices = indices[owner]
    circle = full_turn(target)
    return IndexedPolygons(
        polygons, indices, shapely.STRtree(polygons), (-circle, 0.0, circle) if circle else (0.0,)
    )


def tolerance_of(scene: Raster) -> float:
    """Return the distance, in the unit of a scene's CRS, that an edge of a polygon may be off.

    It is at most a thousandth of a pixel's side, and a power of 2, so that scenes with nearly equal
    pixels share polygons.
    """
    a, b, _, d, e, _ = scene.transform[:6]
    return 2.0 ** math.floor(math.log2(min(math.hypot(a, d), math.hypot(b, e)) / 1000))


def bounds_of(scene: Raster) -> List[float]:
    """Return left, bottom, right and top of a scene in its CRS."""
    return window_bounds(scene.transform, (0, 0, scene.width, scene.height))


def format_bounds(bounds: Sequence[float]) -> str:
    """Return bounds as text for a message."""
    return '(' + ', '.join(f'{value:.10g}' for value in bounds) + ')'


def _move(polygons: np.ndarray, shift: float) -> np.ndarray:
    return shapely.transform(polygons, lambda points: points + (shift, 0.0))


def _large_first(
    polygons: np.ndarray, indices: np.ndarray, path: str
) -> Tuple[np.ndarray, np.ndarray]:
    """Return single polygons and their class indices, sorted by the area of the feature."""
    if not len(polygons):
        raise GeoError(f'{path} holds no polygons; check that it is the right file and layer.')
    order = np.argsort(-shapely.area(polygons), kind='stable')
    single, owner = polygon_parts(polygons[order])
    return single, indices[order][owner]


def polygon_parts(shapes: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return the single polygons that ``shapes`` consist of, and for each the number of its shape.

    Shapes may be multi-polygons and collections; lines and points in them are left out.
    """
    members, owner = shapely.get_parts(shapes, return_index=True)
    # Collections may contain multi-polygons, so the parts are split once more.
    single, member = shapely.get_parts(members, return_index=True)
    keep = _is_areal(single)
    return single[keep], owner[member][keep]


def _is_areal(shapes: np.ndarray) -> np.ndarray:
    """Return which shapes are single polygons that are not empty, bool (N,)."""
    return (shapely.get_type_id(shapes) == shapely.GeometryType.POLYGON) & ~shapely.is_empty(shapes)


def _reproject(
    polygons: np.ndarray, source: pyproj.CRS, target: pyproj.CRS, tolerance: float, path: str
) -> np.ndarray:
    """Return polygons in another CRS; polygons across the antimeridian are joined again."""
    transformer = pyproj.Transformer.from_crs(source, target, always_xy=True)
    moved = project_polygons(
        polygons, transformer, tolerance, (full_turn(source), full_turn(target))
    )
    if not np.isfinite(shapely.get_coordinates(moved)).all():
        raise GeoError(
            f'{path}: polygons in {source.name} have no coordinates in '
            f'{target.name}; check that its CRS is the one it was drawn in.'
        )
    circle = full_turn(target)
    return _unwrap(moved, circle) if circle else moved


def _unwrap(polygons: np.ndarray, circle: float) -> np.ndarray:
    """Join polygons torn at the antimeridian, where longitudes jump from 180 to -180 degrees.

    In a cylindrical projection x jumps in the same way.
    """
    points, owner = shapely.get_coordinates(shapely.get_exterior_ring(polygons), return_index=True)
    jumps = (np.abs(np.diff(points[:, 0])) > circle / 2) & (owner[1:] == owner[:-1])
    unwrapped = polygons.copy()
    for number in np.unique(owner[1:][jumps]):
        joined = shapely.transform(
            polygons[number],
            lambda points: np.stack([next_to(points[:, 0], points[0, 0], circle), points[:, 1]], 1),
        )
        # A polygon around the whole globe would lose its area, and needs no joining.
        if shapely.area(joined) > 0:
            unwrapped[number] = joined
    return unwrapped
