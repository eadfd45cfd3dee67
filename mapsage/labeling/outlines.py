"""Where windows of scenes lie on the ground, and how far they are from each other."""
from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pyproj
import shapely

from mapsage.geo import Raster, reprojected, window_outline

from .window_facts import Place
from .window_source import WindowSource

_FAR = 1e6  # between windows of different files without coordinates, in sides of a window


def outlines(source: WindowSource, places: Sequence[Place], crs: str) -> List[Any]:
    """Return the outlines of windows of georeferenced scenes as polygons in a CRS, given as WKT."""
    found = []
    rasters: Dict[str, Tuple[Raster, str]] = {}
    for place in places:
        if place.path not in rasters:
            with source.scene(place.path).raster as raster:
                assert raster.crs is not None  # it is georeferenced
                rasters[place.path] = raster, raster.crs.to_wkt()
        raster, own = rasters[place.path]
        found.append(reprojected(window_outline(raster, *place[1:]), own, crs))
    return found


def overlap(one: Place, other: Place) -> float:
    """Return which share of a window of a file lies in another of the same file."""
    def shared(first: int, side: int, start: int, length: int) -> int:
        return max(0, min(first + side, start + length) - max(first, start))

    return (shared(one.column, one.width, other.column, other.width)
            * shared(one.row, one.height, other.row, other.height) / (one.width * one.height))


def middles_on_ground(polygons: Sequence[Any], crs: str) -> np.ndarray:
    """Return the middles of windows, ``(windows, 2)``, in units of the median window's side.

    In a geographic CRS degrees of longitude are shortened by the cosine of the latitude.

    Args:
        polygons: Outlines of the windows.
        crs: Their CRS as WKT.
    """
    middles = shapely.get_coordinates(shapely.centroid(np.array(polygons, object)))
    scale = np.ones(2)
    if pyproj.CRS.from_wkt(crs).is_geographic:
        scale[0] = np.cos(np.radians(np.clip(middles[:, 1].mean(), -89, 89)))
    side = np.sqrt(np.median(shapely.area(np.array(polygons, object))) * scale.prod())
    return middles * scale / side


def middles_in_files(places: Sequence[Place]) -> np.ndarray:
    """Return the middles of windows, ``(windows, 2)``, in sides of a window; files are far apart.

    For images without coordinates.
    """
    numbers: Dict[str, int] = {}
    return np.array([(
        numbers.setdefault(each.path, len(numbers)) * _FAR
        + (each.column + each.width / 2) / each.width,
        (each.row + each.height / 2) / each.height) for each in places])
