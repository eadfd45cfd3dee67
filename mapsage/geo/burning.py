"""Burning of polygons into an array: rasterio's, without a request to shapely for every polygon.

`rasterio.features.rasterize` asks shapely for the GeoJSON of every polygon, which makes an object
for every point and takes most of the time. `burn_polygons` lists the same coordinates of all
polygons at once, so the pixels are the same.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, Tuple

import affine
import numpy as np
import rasterio.features
import shapely


def burn_polygons(
    polygons: np.ndarray,
    values: np.ndarray,
    shape: Tuple[int, int],
    fill: int,
    dtype: str,
    transform: affine.Affine,
    all_touched: bool = False,
) -> np.ndarray:
    """Return an array of ``fill`` with the values of polygons; a later polygon hides earlier ones.

    Args:
        polygons: Single polygons that are not empty, object (N,).
        values: Value of each polygon, integers (N,).
        shape: Height and width of the array.
        fill: Value of pixels that no polygon covers.
        dtype: Data type of the array.
        transform: Affine map from (column, row) to the coordinates of the polygons.
        all_touched: Whether a polygon covers every pixel that it touches. If False, it covers the
            pixels whose center it contains.
    """
    if not len(polygons):
        return np.full(shape, fill, dtype)
    with _without_collections():
        return rasterio.features.rasterize(
            zip(_as_geojson(polygons), values.tolist()),
            out_shape=shape,
            fill=fill,
            dtype=dtype,
            all_touched=all_touched,
            transform=transform,
        )


def _as_geojson(polygons: np.ndarray) -> List[Dict[str, Any]]:
    """Return single polygons as GeoJSON: the outer ring first, each ring a list of (x, y)."""
    rings, owner = shapely.get_rings(polygons, return_index=True)
    points, ring = shapely.get_coordinates(rings, return_index=True)
    pairs = list(zip(*points.T.tolist()))
    coordinates: List[List[List[Tuple[float, float]]]] = [[] for _ in polygons]
    begin = 0
    for number, end in zip(owner.tolist(), np.cumsum(np.bincount(ring)).tolist()):
        coordinates[number].append(pairs[begin:end])
        begin = end
    return [dict(type='Polygon', coordinates=rings_of_one) for rings_of_one in coordinates]


@contextmanager
def _without_collections() -> Iterator[None]:
    """Keep Python from collecting garbage.

    A tuple is made for each point. So many new objects start collections of the whole heap, which
    can take longer than burning.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
