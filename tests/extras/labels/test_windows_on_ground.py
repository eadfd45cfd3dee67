"""Outlines, centers and overlaps of windows."""

from __future__ import annotations

import numpy as np
import pyproj
import shapely

from mapsage.extras.labels.outlines import middles_in_files, middles_on_ground, overlap
from mapsage.extras.labels.window_facts import FileWindow

DEGREES = pyproj.CRS.from_epsg(4326).to_wkt()
UTM = pyproj.CRS.from_epsg(32633).to_wkt()


def test_a_step_to_the_east_is_as_long_as_one_to_the_north() -> None:
    """At 60 degrees of latitude, where a degree of longitude is half as long."""
    boxes = [
        shapely.box(x, y, x + 0.002, y + 0.001) for x, y in ((15, 60), (15.002, 60), (15, 60.001))
    ]
    first, east, north = middles_on_ground(boxes, DEGREES)
    assert np.allclose(east - first, [1, 0], atol=1e-3)
    assert np.allclose(north - first, [0, 1], atol=1e-3)
    meters = [shapely.box(x, 0, x + 50, 50) for x in (0, 100)]
    assert np.allclose(np.diff(middles_on_ground(meters, UTM), axis=0), [[2, 0]])


def test_shares_and_middles_in_pixels() -> None:
    boxes = [
        FileWindow('a', 0, 0, 64, 64),
        FileWindow('a', 32, 16, 64, 64),
        FileWindow('b', 0, 0, 64, 64),
    ]
    assert overlap(boxes[0], boxes[1]) == 0.375 and overlap(boxes[0], boxes[0]) == 1
    assert overlap(FileWindow('a', 0, 0, 32, 32), FileWindow('a', 0, 0, 64, 64)) == 1
    first, second, second_file = middles_in_files(boxes)
    assert np.allclose(second - first, [0.5, 0.25]) and second_file[0] - first[0] > 1000
