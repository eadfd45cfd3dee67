"""Random points of each stratum, in one pass over the map.

Every pixel gets a random key, and the pixels with the smallest keys of a stratum are its points: a
simple random sample without replacement. On a map in degrees the areas of the pixels differ, and
the estimates weight the points by them. Memory holds a window and the points.
"""

from __future__ import annotations

from typing import List, NamedTuple

import numpy as np

from .census import Advance
from .map_reader import MapReader, MapWindow
from .strata import Strata


class DrawnPoints(NamedTuple):
    """Pixels of a sample, in random order; arrays ``(n,)``.

    Attributes:
        column: Column of the pixel.
        row: Row of the pixel.
        stratum: Index of its stratum.
        mapped: Index of its class on the map.
        area: Area of the pixel.
        probability: Probability of each class ``(n, K)``, or None.
    """

    column: np.ndarray
    row: np.ndarray
    stratum: np.ndarray
    mapped: np.ndarray
    area: np.ndarray
    probability: np.ndarray


def draw_points(
    reader: MapReader, strata: Strata, points: np.ndarray, seed: int, advance: Advance
) -> DrawnPoints:
    """Draw points.

    Args:
        reader: The map.
        strata: Its strata.
        points: Number of points of each stratum, ``(H,)``; at most its pixels.
        seed: Seed of the keys: the same seed gives the same points.
        advance: Function that counts finished windows.
    """
    strata_count = len(strata.names)
    # Rows: key, column, row, class, area, and the probabilities.
    smallest: List[np.ndarray] = [np.empty((5, 0)) for _ in range(strata_count)]
    limits = np.full(strata_count, np.inf)
    for number, window in enumerate(reader.windows(probabilities=False)):
        random = np.random.Generator(np.random.PCG64([seed, number]))
        stratum = _strata_of(window, strata)
        keys = random.exponential(size=stratum.shape)
        rows, columns = np.nonzero(keys < np.append(limits, -1.0)[stratum])
        for index in range(strata_count):
            inside = stratum[rows, columns] == index
            row, column = rows[inside], columns[inside]
            candidates = np.stack(
                [
                    keys[row, column],
                    column + window.box[0],
                    row + window.box[1],
                    window.classes[row, column],
                    window.pixel_area[row, column],
                ]
            )
            joined = np.concatenate([smallest[index], candidates], 1)
            count = int(points[index])
            if joined.shape[1] > count:
                joined = (
                    joined[:, np.argpartition(joined[0], count - 1)[:count]]
                    if count
                    else joined[:, :0]
                )
                limits[index] = joined[0].max() if count else -1.0
            smallest[index] = joined
        advance(1)
    random = np.random.Generator(np.random.PCG64([seed, -1 % (1 << 32)]))
    table = np.concatenate(smallest, 1)
    owner = np.repeat(np.arange(strata_count), [block.shape[1] for block in smallest])
    # Sorted by key first, because the order of `argpartition` differs between NumPy versions.
    order = np.argsort(table[0], kind='stable')
    order = order[random.permutation(len(order))]
    column, row, mapped = table[1:4, order].astype(np.int64)
    return DrawnPoints(
        column, row, owner[order], mapped, table[4, order], read_probabilities(reader, column, row)
    )


def read_probabilities(reader: MapReader, column: np.ndarray, row: np.ndarray) -> np.ndarray:
    """Return the probabilities of pixels, float64 ``(n, K)``; ``(n, 0)`` without probabilities."""
    if not reader.has_probabilities:
        return np.empty((len(column), 0))
    windows = [reader.read((int(x), int(y), 1, 1)) for x, y in zip(column, row)]
    return np.array(
        [window.probabilities[:, 0, 0] for window in windows if window.probabilities is not None],
        float,
    )


def _strata_of(window: MapWindow, strata: Strata) -> np.ndarray:
    """Return the strata of a window's pixels; pixels without data have stratum -1."""
    stratum = strata.table[window.classes, window.level]
    stratum[window.classes < 0] = -1
    return stratum
