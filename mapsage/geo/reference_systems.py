"""Questions on coordinate reference systems (CRS) that have one answer everywhere.

Whether two CRS are the same on the ground, how far a turn around the globe is, and whether PROJ's
database can be used. GDAL and pyproj give coordinates as (x, y), whatever the order of the axes in
a CRS is; so that order makes no difference here.
"""

from __future__ import annotations

import functools
import math
import os
from typing import Any, Optional

import numpy as np
import pyproj
import pyproj.exceptions
from pyproj.crs import GeographicCRS, ProjectedCRS
from rasterio.crs import CRS
from rasterio.errors import CRSError

from .errors import GeoError

# Projections in which x is a multiple of the longitude, so that the globe repeats in x.
_CYLINDRICAL = (
    'Mercator',
    'Pseudo Mercator',
    'Equidistant Cylindrical',
    'Equirectangular',
    'Plate Carr',
    'Cylindrical Equal Area',
)


def crs_of_code(code: int) -> CRS:
    """Return the CRS with an EPSG code.

    Raises:
        GeoError: If PROJ's database cannot be used.
    """
    check_proj_database()
    return CRS.from_epsg(code)


@functools.lru_cache(maxsize=None)
def check_proj_database() -> None:
    """Check that rasterio and pyproj can look up a CRS in PROJ's database.

    With the database of another program GDAL still opens a scene, but its CRS has no code and may
    lack its datum, and so has every map of it. The check runs once in a process.

    Raises:
        GeoError: If one of them cannot; the message names the variable that is the likely cause.
    """
    for package, look_up in (('rasterio', CRS.from_epsg), ('pyproj', pyproj.CRS.from_epsg)):
        try:
            look_up(32631)
        except (CRSError, pyproj.exceptions.CRSError, pyproj.exceptions.DataDirError) as error:
            names = [name for name in ('PROJ_DATA', 'PROJ_LIB') if os.environ.get(name)]
            cause = ' and '.join(f'{name}={os.environ[name]}' for name in names)
            raise GeoError(
                f'{package} cannot look up EPSG:32631 in the database of PROJ, proj.db ({error}). '
                + (
                    f'The environment has {cause}, which names the folder of another program (QGIS, '
                    f'conda and OSGeo4W set it) or of another version: unset {" ".join(names)} and '
                    f'start again.'
                    if names
                    else f'Install {package} again: its package brings this file.'
                )
            ) from error


def same_crs(first: Any, second: Any) -> bool:
    """Return whether two CRS give every place on the ground the same coordinates (x, y).

    The names, the codes, the order of axes, heights (compound and 3D CRS) and parameters of a
    transformation to WGS 84 (TOWGS84) make no difference; datum, projection and unit do.

    Args:
        first: CRS of rasterio or pyproj, WKT or a name such as ``EPSG:4326``; None for no CRS.
        second: The other one.
    """
    if first is second:
        return True
    if first is None or second is None:
        return False
    return _same(_definition(first), _definition(second))


def _definition(crs: Any) -> str:
    # rasterio keeps this text with the object; making it takes longer than everything else here.
    if isinstance(crs, CRS):
        return str(crs.wkt)
    return crs.to_wkt() if isinstance(crs, pyproj.CRS) else str(crs)


@functools.lru_cache(maxsize=4096)
def _same(first: str, second: str) -> bool:
    if first == second:
        return True
    a, b = _horizontal(first), _horizontal(second)
    if a is None or b is None or a.is_projected != b.is_projected:
        return False
    if not a.is_projected:
        return bool(a.equals(b, ignore_axis_order=True))
    # PROJ ignores the order of axes in geographic systems only. So a projected CRS is compared in
    # its parts.
    units = [{axis.unit_conversion_factor for axis in crs.axis_info} for crs in (a, b)]
    return bool(
        units[0] == units[1]
        and a.coordinate_operation == b.coordinate_operation
        and _same(_datum(a), _datum(b))
    )


def _datum(projected: pyproj.CRS) -> str:
    """Return the geographic CRS of a projected one as WKT."""
    geodetic = projected.geodetic_crs
    assert geodetic is not None, 'a projected CRS has a geographic one'
    return str(geodetic.to_wkt())


@functools.lru_cache(maxsize=1024)
def _horizontal(definition: str) -> Optional[pyproj.CRS]:
    """Return a CRS without heights and without TOWGS84; None if pyproj cannot read it."""
    try:
        crs: Any = pyproj.CRS.from_user_input(definition)
        while crs.is_bound or crs.is_compound:
            crs = crs.source_crs if crs.is_bound else crs.sub_crs_list[0]
        return crs if len(crs.axis_info) < 3 else _without_height(crs)
    except pyproj.exceptions.CRSError:
        return None


def _without_height(crs: Any) -> Any:
    # `to_2d` came with pyproj 3.6. Older ones make the CRS of its parts, which is all that counts
    # here; axes in degrees or meters are their default.
    if hasattr(crs, 'to_2d'):
        return crs.to_2d()
    geographic = GeographicCRS(crs.name, crs.geodetic_crs.datum)
    return (
        geographic
        if crs.is_geographic
        else ProjectedCRS(crs.coordinate_operation, crs.name, geodetic_crs=geographic)
    )


def full_turn(crs: Any) -> float:
    """Return by how much x grows in one turn around the globe, in the unit of a CRS.

    A place has several such x where this is not 0: in geographic CRS (360 degrees) and cylindrical
    projections. It is 0 in any other CRS, and without CRS.

    Args:
        crs: CRS of rasterio or pyproj, WKT, or None.
    """
    return 0.0 if crs is None else _turn(_definition(crs))


def next_to(x: np.ndarray, reference: Any, circle: float) -> np.ndarray:
    """Return x, moved by whole turns around the globe to within half a turn of a reference.

    Args:
        x: Coordinates; those that are not finite do not change.
        reference: Coordinates of the same shape, or one coordinate.
        circle: Result of :func:`full_turn`; nothing changes where it is 0.
    """
    if not circle:
        return x
    distance = reference - x
    return x + circle * np.round(np.where(np.isfinite(distance), distance, 0) / circle)


@functools.lru_cache(maxsize=1024)
def _turn(definition: str) -> float:
    crs = _horizontal(definition)
    if crs is None or not (crs.is_geographic or crs.is_projected):
        return 0.0
    if crs.is_geographic:
        return round(2 * math.pi / crs.axis_info[0].unit_conversion_factor, 6)
    operation = crs.coordinate_operation
    if (
        operation is None
        or 'ransverse' in operation.method_name
        or 'blique' in operation.method_name
        or not any(name in operation.method_name for name in _CYLINDRICAL)
    ):
        return 0.0
    circle = _turn(_datum(crs))
    degrees = pyproj.Transformer.from_crs(crs.geodetic_crs, crs, always_xy=True)
    # The central meridian is where x is the false easting. Two points a quarter of a turn away on
    # both sides of it are half a turn apart.
    easting = next(
        (
            float(parameter.value) * parameter.unit_conversion_factor
            for parameter in operation.params
            if parameter.name == 'False easting'
        ),
        0.0,
    )
    easting /= crs.axis_info[0].unit_conversion_factor
    middle, _ = degrees.transform(easting, 0.0, direction='INVERSE')
    west, east = degrees.transform([middle - circle / 4, middle + circle / 4], [0.0, 0.0])[0]
    return 2 * abs(east - west)
