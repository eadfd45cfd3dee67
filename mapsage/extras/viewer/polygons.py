"""Reads the polygons of a map within a box, as GeoJSON in the CRS of the map.

The page asks for the box that it shows, so a map may have millions of polygons. A file is checked
to be a GeoPackage before GDAL opens it, because GDAL would follow other formats to servers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Union

import numpy as np
import pyogrio.raw
import shapely
from pyogrio.errors import DataSourceError

# First bytes of every GeoPackage (GeoPackage 1.2, section 1.1.1.1).
_SQLITE = b'SQLite format 3\0'
MOST = 5000
"""Largest number of polygons in an answer; nobody can tell more of them apart on a screen."""


def polygons_in(path: Union[str, Path], box: Sequence[float]) -> Dict[str, Any]:
    """Return the polygons that intersect a box.

    Args:
        path: Path of a GeoPackage that ``write_polygons`` made.
        box: Left, bottom, right and top in the CRS of the map.

    Returns:
        A GeoJSON FeatureCollection with ``class_id``, ``class_name`` and ``area_m2`` of each
        polygon. If the box has more than ``MOST`` polygons, the collection is empty and has the
        key ``too_many``.
    """
    _check_geopackage(path)
    meta, _, shapes, columns = pyogrio.raw.read(
        str(path),
        layer='map',
        bbox=tuple(box),
        max_features=MOST + 1,
        columns=['class_id', 'class_name', 'area_m2'],
    )
    if len(shapes) > MOST:
        return dict(type='FeatureCollection', features=[], too_many=MOST)
    values = dict(zip(meta['fields'], columns))
    return dict(
        type='FeatureCollection',
        features=[
            dict(
                type='Feature',
                geometry=json.loads(text),
                properties=dict(
                    class_id=int(values['class_id'][number]),
                    class_name=str(values['class_name'][number]),
                    area_m2=_number(values['area_m2'][number]),
                ),
            )
            for number, text in enumerate(shapely.to_geojson(shapely.from_wkb(shapes)))
        ],
    )


def _check_geopackage(path: Union[str, Path]) -> None:
    """Check that a file is a database: GDAL would follow descriptions of layers on a server."""
    with open(path, 'rb') as file:
        if file.read(len(_SQLITE)) != _SQLITE:
            raise DataSourceError(f'{path} is not a GeoPackage')


def _number(value: Optional[float]) -> Optional[float]:
    return float(value) if value is not None and np.isfinite(value) else None
