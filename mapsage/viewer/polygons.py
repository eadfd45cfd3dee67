"""The polygons of a map that lie in a box, as GeoJSON in the coordinates of the map."""
from __future__ import annotations

import json
from typing import Any, Dict, Sequence

import numpy as np
import pyogrio
import pyogrio.raw
import shapely
from pyogrio.errors import DataSourceError

_SQLITE = b'SQLite format 3\0'  # of every GeoPackage (GeoPackage 1.2, section 1.1.1.1)
MOST = 5000
"""Number of polygons up to which a box is answered; more of them nobody can tell apart."""


def polygons_in(path: Any, box: Sequence[float]) -> Dict[str, Any]:
    """Return the polygons that meet a box.

    Args:
        path: Path of a GeoPackage that ``write_polygons`` made.
        box: Left, bottom, right and top in the CRS of the map.

    Returns:
        A GeoJSON FeatureCollection with ``class_id``, ``class_name`` and ``area_m2`` of each
        polygon. Where there are more than ``MOST``, it has none, and ``too_many``.
    """
    _check_geopackage(path)
    meta, _, shapes, columns = pyogrio.raw.read(
        str(path), layer='map', bbox=tuple(box), max_features=MOST + 1,
        columns=['class_id', 'class_name', 'area_m2'])
    if len(shapes) > MOST:
        return dict(type='FeatureCollection', features=[], too_many=MOST)
    values = dict(zip(meta['fields'], columns))
    return dict(type='FeatureCollection', features=[
        dict(type='Feature', geometry=json.loads(text), properties=dict(
            class_id=int(values['class_id'][number]), class_name=str(values['class_name'][number]),
            area_m2=_number(values['area_m2'][number])))
        for number, text in enumerate(shapely.to_geojson(shapely.from_wkb(shapes)))])


def count_polygons(path: Any) -> int:
    """Return the number of polygons of a GeoPackage that ``write_polygons`` made."""
    _check_geopackage(path)
    return int(pyogrio.read_info(str(path), layer='map')['features'])


def _check_geopackage(path: Any) -> None:
    """Check that a file is a database: GDAL would follow descriptions of layers on a server."""
    with open(path, 'rb') as file:
        if file.read(len(_SQLITE)) != _SQLITE:
            raise DataSourceError(f'{path} is no GeoPackage')


def _number(value: Any) -> Any:
    return float(value) if value is not None and np.isfinite(value) else None
