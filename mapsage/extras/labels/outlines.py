"""Positions of windows: outlines on the ground, centers, and overlaps.

Centers are in units of a window's side, so that `choice.choose` can apply one minimum distance to
georeferenced scenes and to plain images.
"""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import numpy as np
import pyproj
import shapely

from mapsage.geo import Raster, reprojected, window_outline

from .window_facts import FileWindow
from .window_source import WindowSource

# Images without coordinates have no distance between them. This one, in sides of a window, is
# larger than any sensible minimum distance.
_FAR = 1e6


def outlines(source: WindowSource, boxes: Sequence[FileWindow], crs: str) -> List[Any]:
    """Return the outlines of windows of georeferenced scenes, as shapely polygons.

    Args:
        source: Source of the windows' scenes.
        boxes: The windows.
        crs: CRS of the polygons as WKT.
    """
    polygons = []
    rasters: Dict[str, Tuple[Raster, str]] = {}
    for box in boxes:
        if box.path not in rasters:
            with source.scene(box.path).raster as raster:
                # The caller has refused inputs without a CRS.
                assert raster.crs is not None
                rasters[box.path] = raster, raster.crs.to_wkt()
        raster, raster_crs = rasters[box.path]
        polygons.append(reprojected(window_outline(raster, *box[1:]), raster_crs, crs))
    return polygons


def overlap(box: FileWindow, second: FileWindow) -> float:
    """Return the share of ``box`` that lies in ``second``, a window of the same file."""

    def shared(first: int, side: int, start: int, length: int) -> int:
        return max(0, min(first + side, start + length) - max(first, start))

    return (
        shared(box.column, box.width, second.column, second.width)
        * shared(box.row, box.height, second.row, second.height)
        / (box.width * box.height)
    )


def middles_on_ground(polygons: Sequence[Any], crs: str) -> np.ndarray:
    """Return the centers of windows, ``(windows, 2)``, in units of the median window's side.

    In a geographic CRS, degrees of longitude are shortened by the cosine of the latitude.

    Args:
        polygons: Outlines of the windows.
        crs: CRS of the outlines as WKT.
    """
    centers = shapely.get_coordinates(shapely.centroid(np.array(polygons, object)))
    scale = np.ones(2)
    if pyproj.CRS.from_wkt(crs).is_geographic:
        scale[0] = np.cos(np.radians(np.clip(centers[:, 1].mean(), -89, 89)))
    side = np.sqrt(np.median(shapely.area(np.array(polygons, object))) * scale.prod())
    return centers * scale / side


def middles_in_files(boxes: Sequence[FileWindow]) -> np.ndarray:
    """Return the centers of windows, ``(windows, 2)``, in units of a window's side.

    For images without coordinates: windows of two files are never close to each other.
    """
    file_numbers: Dict[str, int] = {}
    return np.array(
        [
            (
                file_numbers.setdefault(box.path, len(file_numbers)) * _FAR
                + (box.column + box.width / 2) / box.width,
                (box.row + box.height / 2) / box.height,
            )
            for box in boxes
        ]
    )
