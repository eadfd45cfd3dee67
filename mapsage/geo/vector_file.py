"""Polygons and their classes from a vector file: which layer, which field, which class index.

If the file has no field of classes, or a feature has no value in it, the default class applies. If
a shapefile does not name its encoding, several encodings are tried. The polygons are burned into
scenes by `vector_labels.py`.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, Dict, Iterable, List, NamedTuple, Optional, Tuple, Union

import numpy as np
import pyogrio.raw
import pyproj
import shapely
from pyogrio.errors import DataLayerError, DataSourceError

from .errors import GeoError
from .gdal_files import vector_open_error
from .reference_systems import check_proj_database

DefaultClass = Union[None, int, str]
"""Name or index of a class, or None if every feature must name its own."""


# Corners of the polygon that stands for a disk.
_CORNERS = 32


class LabeledPolygons(NamedTuple):
    """Valid polygons and multi-polygons of one layer.

    Attributes:
        crs: CRS of the layer.
        polygons: shapely geometries, object (N,).
        indices: Class index of each polygon, int32 (N,).
        defaults: Number of features without a value, which have the default class.
        guess: Sentence on the file's encoding, if it was guessed and the guess matters, or ''.
    """

    crs: pyproj.CRS
    polygons: np.ndarray
    indices: np.ndarray
    defaults: int
    guess: str = ''


def read_labeled_polygons(
    path: str,
    field: str,
    classes: List[str],
    extra: int,
    layer: Optional[str] = None,
    default_class: DefaultClass = None,
    point_radius: Optional[float] = None,
) -> LabeledPolygons:
    """Read the polygons of a file with their class indices.

    Args:
        path: Path of a file that GDAL reads.
        field: Name of the attribute that holds the class, as a name or as an index.
        classes: Class names, in the order of their indices.
        extra: Additional index that may occur, such as the index of ignored pixels.
        layer: Name of the layer; None for the only layer that has the field.
        default_class: Class of features without a value, and of all features if no layer has the
            field. None: both are errors.
        point_radius: Radius in meters of the disk that stands for a point; None: points are errors.

    Raises:
        GeoError: If the file, the layer, the field or a value is not as expected.
    """
    default = None
    names = {name: number for number, name in enumerate(classes)}
    if default_class is not None:
        default = _class_index(default_class, names, extra)
        if default is None:
            raise GeoError(
                f'default_class={default_class!r}, expected a class of {classes} or '
                f'its index 0 to {len(classes) - 1}, or {extra} to ignore the pixels.'
            )
    refusals: List[GeoError] = []
    encodings = _encodings(path)
    # The field may be invisible in a wrong encoding. So it counts as missing only if no encoding
    # shows it; otherwise all polygons would silently get the default class.
    may_lack = default is not None and not any(
        _has_field(path, field, layer, encoding) for encoding in encodings
    )
    for encoding in encodings:
        try:
            return _read(
                path, field, names, extra, layer, default, may_lack, encoding, point_radius
            )
        except UnicodeDecodeError:
            continue
        except GeoError as error:
            refusals.append(error)
    raise refusals[0]


def _encodings(path: str) -> Tuple[Optional[str], ...]:
    """Return the encodings to try, in this order; None stands for the encoding that the file names.

    A shapefile names its encoding in a ``.cpg`` file or in a byte of its table. Many shapefiles
    have neither, and GDAL reads them as ISO-8859-1, in which any bytes are text.
    """
    try:
        named = (
            Path(path).suffix.lower() != '.shp'
            or pyogrio.read_info(path)['encoding'] != 'ISO-8859-1'
        )
    except (DataSourceError, DataLayerError):
        # Reading the polygons fails too, with a message on what is wrong.
        named = True
    return (None,) if named else ('UTF-8', 'GBK', 'ISO-8859-1')


def _has_field(path: str, field: str, layer: Optional[str], encoding: Optional[str]) -> bool:
    try:
        return any(
            field in pyogrio.read_info(path, layer=name, encoding=encoding)['fields']
            for name, kind in pyogrio.list_layers(path)
            if kind is not None and layer in (None, name)
        )
    except (DataSourceError, DataLayerError, UnicodeDecodeError):
        return False


def _describe_guess(path: str, encoding: Optional[str], texts: Iterable[object]) -> str:
    """Return a sentence on a guessed encoding, or '' if it is named or makes no difference."""
    if encoding is None or all(str(text).isascii() for text in texts):
        return ''
    table = Path(path).with_suffix('.cpg').name
    return (
        f'{path} is read as {encoding}, a guess, since no {table} beside it names the '
        f'encoding. If it is another encoding, write its name there: echo {encoding} > {table}'
    )


def _read(
    path: str,
    field: str,
    names: Dict[str, int],
    extra: int,
    layer: Optional[str],
    default: Optional[int],
    may_lack: bool,
    encoding: Optional[str],
    point_radius: Optional[float],
) -> LabeledPolygons:
    classes = list(names)
    crs, polygons, values, features = _read_layer(
        path, field, layer, classes, may_lack, encoding, point_radius
    )
    guess = _describe_guess(path, encoding, [field, *set(values)])
    indices = {
        value: default if value is None else _class_index(value, names, extra)
        for value in set(values)
    }
    unknown = sorted(_format_value(value) for value, index in indices.items() if index is None)
    if unknown:
        first = next(
            number for number, value in zip(features, values) if _format_value(value) == unknown[0]
        )
        raise GeoError(
            f'{path}: field {field!r} holds {", ".join(unknown[:5])}; expected a class of '
            f'{classes} or its index 0 to {len(classes) - 1}, or {extra} for ignored pixels. '
            f'Feature {first} of the layer holds {unknown[0]}. Correct the file or metainfo'
            + (
                f', or set default_class={classes[:2][-1]!r} for features without a value.'
                if None in indices
                else '.'
            )
            + f' {guess}' * bool(guess)
        )
    return LabeledPolygons(
        crs,
        polygons,
        np.array([indices[value] for value in values], np.int32),
        values.count(None) if default is not None else 0,
        guess,
    )


def _read_layer(
    path: str,
    field: str,
    name: Optional[str],
    classes: List[str],
    may_lack: bool,
    encoding: Optional[str],
    point_radius: Optional[float],
) -> Tuple[pyproj.CRS, np.ndarray, List[Any], np.ndarray]:
    """Return the CRS of a layer, its polygons made valid, their values of ``field``, their numbers.

    A value is None if the feature or the layer has none. A number is the feature's identifier in
    the file, which QGIS shows as ``fid`` or ``$id``.
    """
    try:
        layer, has_field = _choose_layer(path, field, name, classes, may_lack, encoding)
        meta, numbers, geometry, fields = pyogrio.raw.read(
            path,
            columns=[field] if has_field else [],
            layer=layer,
            encoding=encoding,
            return_fids=True,
        )
    except (DataSourceError, DataLayerError) as error:
        raise vector_open_error(path, error) from error
    if not meta['crs']:
        raise GeoError(
            f'{path} has no CRS, so its polygons cannot be located in a scene; set it, '
            'for example with ogr2ogr -a_srs.'
        )
    check_proj_database()
    polygons = shapely.from_wkb(geometry)
    crs = pyproj.CRS.from_user_input(meta['crs'])
    if point_radius is not None:
        polygons = _disks_for_points(polygons, crs, point_radius, path)
    for number in np.flatnonzero(
        shapely.get_type_id(polygons) == shapely.GeometryType.GEOMETRYCOLLECTION
    ):
        polygons[number] = _polygons_of(polygons[number])
    kinds = shapely.get_type_id(polygons)
    unsuitable = ~np.isin(kinds, (shapely.GeometryType.POLYGON, shapely.GeometryType.MULTIPOLYGON))
    unsuitable &= ~shapely.is_missing(polygons)
    if unsuitable.any():
        first = int(np.flatnonzero(unsuitable)[0])
        raise GeoError(
            f'{path}: feature {numbers[first]} of the layer is a '
            f'{polygons[first].geom_type}, '
            f'expected polygons ({int(unsuitable.sum())} others); buffer or remove '
            'them. Points become disks with point_radius=METERS in GeoTiffDataset.'
        )
    features = np.flatnonzero(~(shapely.is_missing(polygons) | shapely.is_empty(polygons)))
    valid = shapely.make_valid(polygons[features])
    has_area = shapely.area(valid) > 0
    if not has_area.all():
        warnings.warn(
            f'{path}: {int((~has_area).sum())} feature(s) without area are left out, '
            f'the first is feature {numbers[features[~has_area]][0]} of the layer.',
            stacklevel=5,
        )
    features = features[has_area]
    values = fields[0][features].tolist() if has_field else [None] * len(features)
    # A column of numbers has NaN where a value is missing.
    values = [None if value != value else value for value in values]
    return crs, valid[has_area], values, numbers[features]


def _disks_for_points(shapes: np.ndarray, crs: pyproj.CRS, radius: float, path: str) -> np.ndarray:
    """Return shapes in which points are disks of ``radius`` meters on the ellipsoid of a CRS."""
    kinds = shapely.get_type_id(shapes)
    is_point = np.isin(kinds, (shapely.GeometryType.POINT, shapely.GeometryType.MULTIPOINT))
    is_point &= ~shapely.is_empty(shapes)
    points, owner = shapely.get_coordinates(shapes[is_point], return_index=True)
    geodetic, ellipsoid = crs.geodetic_crs, crs.get_geod()
    if not len(points):
        return shapes
    if geodetic is None or ellipsoid is None:
        raise GeoError(
            f'{path}: the CRS {crs.name} is not on an ellipsoid, so a radius in meters has no '
            f'meaning; reproject the points.'
        )
    # Sides of a polygon of this many corners deviate from the circle by half a percent.
    azimuths = np.linspace(0, 360, _CORNERS, endpoint=False)
    there = pyproj.Transformer.from_crs(crs, geodetic, always_xy=True)
    longitudes, latitudes = (
        np.repeat(values, _CORNERS) for values in there.transform(points[:, 0], points[:, 1])
    )
    around = np.tile(azimuths, len(points))
    longitudes, latitudes, _ = ellipsoid.fwd(
        longitudes, latitudes, around, np.full(around.shape, radius)
    )
    back = pyproj.Transformer.from_crs(geodetic, crs, always_xy=True)
    rings = np.stack(back.transform(longitudes, latitudes), 1).reshape(len(points), _CORNERS, 2)
    if not np.isfinite(rings).all():
        raise GeoError(f'{path}: points have no coordinates in their CRS {crs.name}; correct it.')
    disks = shapely.polygons(rings)
    shapes = shapes.copy()
    shapes[is_point] = [
        shapely.multipolygons(disks[owner == number]) for number in range(int(is_point.sum()))
    ]
    return shapes


def _polygons_of(collection: shapely.Geometry) -> shapely.Geometry:
    """Return the union of the polygons in a collection; the collection if it has none.

    Its points and lines have no area. Collections may be in a collection.
    """
    parts = np.array([collection], object)
    while (shapely.get_type_id(parts) > shapely.GeometryType.POLYGON).any():
        parts = shapely.get_parts(parts)
    parts = parts[shapely.get_type_id(parts) == shapely.GeometryType.POLYGON]
    return shapely.union_all(shapely.make_valid(parts)) if len(parts) else collection


def _choose_layer(
    path: str,
    field: str,
    name: Optional[str],
    classes: List[str],
    may_lack: bool,
    encoding: Optional[str],
) -> Tuple[str, bool]:
    """Return the name of the layer to read, and whether it has the field.

    Tables without shapes, such as ``layer_styles`` of QGIS, do not count as layers. Layers of
    points or lines are considered only if there are no others.

    Args:
        path: Path of the file.
        field: Name of the field with the class.
        name: Name of the layer, or None to choose the only suitable one.
        classes: Class names, for an example in the error message.
        may_lack: Whether a layer without the field is suitable if no layer has the field.
        encoding: Encoding of the file; None for the encoding that it names.
    """
    kinds = {str(layer): str(kind) for layer, kind in pyogrio.list_layers(path) if kind is not None}
    if name is not None and name not in kinds:
        raise GeoError(
            f'{path} has no layer {name!r}; it has {list(kinds)}. Set layer to the one '
            f'with the labels.'
        )
    fields = {
        layer: list(pyogrio.read_info(path, layer=layer, encoding=encoding)['fields'])
        for layer in (kinds if name is None else [name])
    }
    labeled = _flat_first([layer for layer, names in fields.items() if field in names], kinds)
    has_field = bool(labeled)
    if not labeled and may_lack:
        labeled = _flat_first(list(fields), kinds)
    if not labeled:
        described = '; '.join(f'layer {layer!r} has {names}' for layer, names in fields.items())
        raise GeoError(
            f'{path} has no field {field!r}: {described or "it has no layer"}. Set class_field to '
            f'the one with the class, or default_class={classes[:2][-1]!r} if all polygons are of '
            f'one class.'
            + ''.join(
                f' {guess}'
                for guess in [
                    _describe_guess(
                        path, encoding, [name for names in fields.values() for name in names]
                    )
                ]
                if guess
            )
        )
    if len(labeled) > 1:
        content = f'the field {field!r}' if has_field else 'polygons'
        raise GeoError(
            f'{path} has {len(labeled)} layers with {content}: {labeled}. Set layer to '
            f'the one with the labels.'
        )
    return labeled[0], has_field


def _flat_first(layers: List[str], kinds: Dict[str, str]) -> List[str]:
    """Return the layers that may contain polygons, or all layers if none may."""
    flat = [
        layer
        for layer in layers
        if not kinds[layer].replace('Multi', '').startswith(('Point', 'LineString'))
    ]
    return flat or layers


def _class_index(value: object, names: Dict[str, int], extra: int) -> Optional[int]:
    """Return the class index that a field's value means, or None if it means no class."""
    if isinstance(value, str):
        if value in names or not value.strip().isdecimal():
            return names.get(value)
        # An index in a column of text.
        value = int(value)
    # Other values are infinity or a date, for example.
    if not isinstance(value, (int, float)) or not float(value).is_integer():
        return None
    return int(value) if 0 <= value < len(names) or value == extra else None


def _format_value(value: object) -> str:
    return 'no value' if value is None else str(value)
