"""Outlines of windows in map coordinates and in another CRS."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyproj
import rasterio
import shapely
from geo_scenes import write_raster

from mapsage.geo import Raster, reprojected, window_outline
from mapsage.geo.coordinates import project_polygons

DEGREES = pyproj.CRS.from_epsg(4326).to_wkt()
UTM = pyproj.CRS.from_epsg(32633).to_wkt()


def test_short_edges_get_no_nodes() -> None:
    """100,000 buildings are reprojected as they were, with the same bits."""
    centers = np.random.RandomState(0).uniform((3, 45), (4, 46), (500, 2))
    houses = shapely.box(*(centers - 1e-4).T, *(centers + 1e-4).T)
    sheets = shapely.box(*(centers - 0.1).T, *(centers + 0.1).T)
    to_utm = pyproj.Transformer.from_crs(4326, 32631, always_xy=True)

    def move(points: np.ndarray) -> np.ndarray:
        return np.stack(to_utm.transform(points[:, 0], points[:, 1]), 1)

    moved = project_polygons(houses, to_utm, 5e-4, (360, 0))
    assert shapely.equals_exact(moved, shapely.transform(houses, move), 0).all()
    both = project_polygons(np.concatenate([houses, sheets]), to_utm, 5e-4, (360, 0))
    assert shapely.equals_exact(both[:500], moved, 0).all()
    points = shapely.get_num_coordinates(both[500:])
    assert points.min() > 20 and points.max() < 2000
    # The nodes are on the edges.
    back = shapely.transform(
        both[500:],
        lambda points: np.stack(
            to_utm.transform(points[:, 0], points[:, 1], direction='INVERSE'), 1
        ),
    )
    assert shapely.hausdorff_distance(back, sheets).max() < 1e-8


def test_the_sides_of_a_window_are_right_in_another_crs(tmp_path: Path) -> None:
    """A parallel is an arc in UTM: the middle of a side of 4 degrees is kilometers off a chord."""
    grid = dict(crs='EPSG:4326', transform=rasterio.Affine(0.04, 0, 10, 0, -0.04, 62))
    path = write_raster(tmp_path / 'a.tif', np.ones((1, 100, 200), np.uint8), grid)
    with Raster(str(path)) as raster:
        polygon = window_outline(raster, 50, 0, 100, 100)
    assert (
        shapely.equals(shapely.normalize(polygon), shapely.normalize(shapely.box(12, 58, 16, 62)))
        and reprojected(polygon, DEGREES, DEGREES) is polygon
    )
    moved = reprojected(polygon, DEGREES, UTM)
    middle = shapely.Point(
        *pyproj.Transformer.from_crs(DEGREES, UTM, always_xy=True).transform(14, 62)
    )
    assert moved.exterior.distance(middle) < 1
    corners = np.array(
        pyproj.Transformer.from_crs(DEGREES, UTM, always_xy=True).transform([12, 16], [62, 62])
    ).T
    assert shapely.LineString(corners).distance(middle) > 1000
