"""Everything that a plan must know of a map, from one pass over it.

The pass counts pixels and areas by mapped class and level of confidence, adds up the probabilities,
and computes the digest that ties a plan to its map. Strata follow from these tables, so the map is
read only once more, to draw the points.

Shapes (K classes, L levels of confidence):
    pixels, area       (K, L)
    probability        (K, L, K) sum of area times probability of each class
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Callable, List, Optional

import numpy as np

from .errors import AssessError
from .map_reader import LEVELS, MapReader, MapWindow

# Share of the pixels where the mapped class may lack the largest probability, since the map and its
# probabilities are rounded differently.
_MOST_CONTRADICTED = 0.1
# Side in pixels of the blocks of a digest, which plans store: it never changes.
_BLOCK = 512

Advance = Callable[[int], None]
"""Function that counts finished windows."""


@dataclass(frozen=True)
class MapCensus:
    """Tables of a map.

    Attributes:
        class_names: Names of the K classes.
        unit: Unit of ``area``: ``'m2'`` or ``'px'``.
        pixels: Pixels by mapped class and confidence in percent, int64 ``(K, L)``.
        area: Area of these pixels, float64 ``(K, L)``.
        probability: Sum of area times probability, float64 ``(K, L, K)``, or None.
        digest: Text that names the map: changes with its grid and its classes.
    """

    class_names: List[str]
    unit: str
    pixels: np.ndarray
    area: np.ndarray
    probability: Optional[np.ndarray]
    digest: str

    @property
    def class_shares(self) -> np.ndarray:
        """Share of the area that each class has on the map, ``(K,)``."""
        return self.area.sum(1) / self.area.sum()


def take_census(reader: MapReader, advance: Advance) -> MapCensus:
    """Read a map once.

    Args:
        reader: The map.
        advance: Function that counts finished windows.

    Raises:
        AssessError: If the map has no pixel with a class, or the probabilities contradict it.
    """
    classes = len(reader.class_names)
    pixels, area = np.zeros(classes * LEVELS, np.int64), np.zeros(classes * LEVELS)
    probability = np.zeros((classes, classes * LEVELS)) if reader.has_probabilities else None
    digest, contradictions = MapDigest(reader), _Contradictions(classes)
    for window in reader.windows():
        digest.add(window)
        valid = window.classes >= 0
        cells = window.classes[valid].astype(np.int64) * LEVELS + window.level[valid]
        weights = window.pixel_area[valid]
        pixels += np.bincount(cells, minlength=len(pixels))
        area += np.bincount(cells, weights, len(area))
        if probability is not None and window.probabilities is not None:
            for number, plane in enumerate(window.probabilities):
                probability[number] += np.bincount(cells, weights * plane[valid], len(area))
            contradictions.add(window, valid)
        advance(1)
    if not pixels.sum():
        raise AssessError(f'{reader.path} has no pixel with a class; check its no-data value.')
    contradicted = contradictions.count() / pixels.sum()
    if contradicted > _MOST_CONTRADICTED:
        raise AssessError(
            f'at {100 * contradicted:.0f} % of the pixels of {reader.path} another class has a '
            'larger probability, so the probabilities do not belong to this map. Name the file '
            'that mapsage predict --probabilities wrote with it.'
        )
    shape = classes, LEVELS
    return _without_absent_values(
        reader,
        MapCensus(
            reader.class_names,
            reader.unit,
            pixels.reshape(shape),
            area.reshape(shape),
            None
            if probability is None
            else np.moveaxis(probability.reshape(classes, *shape), 0, 2),
            digest.text(),
        ),
    )


def digest_of(reader: MapReader, advance: Advance) -> str:
    """Return the digest of a map, as in :class:`MapCensus`."""
    digest = MapDigest(reader)
    for window in reader.windows(probabilities=False):
        digest.add(window)
        advance(1)
    return digest.text()


class MapDigest:
    """A digest of the grid and the classes of a map, whatever the windows and their order.

    It is the sum of the SHA-256 of all blocks, each with its position; the grid counts as a block.

    Args:
        reader: The map.
    """

    def __init__(self, reader: MapReader) -> None:
        self._sum = _hash(reader.grid_key())

    def add(self, window: MapWindow) -> None:
        """Add a window; its edges lie on edges of blocks or of the map."""
        left, top, width, height = window.box
        for row in range(0, height, _BLOCK):
            for column in range(0, width, _BLOCK):
                block = window.classes[row : row + _BLOCK, column : column + _BLOCK]
                self._sum += _hash(f'{left + column} {top + row} '.encode() + block.tobytes())

    def text(self) -> str:
        """Return the digest as 32 hexadecimal digits."""
        return f'{self._sum % (1 << 128):032x}'


def _hash(data: bytes) -> int:
    return int.from_bytes(hashlib.sha256(data).digest(), 'big')


class _Contradictions:
    """Counts the pixels whose class on the map is not the class of their probabilities.

    A model of one score may have another threshold than 0.5. So for two classes the threshold is
    the one that fits the map best.

    Args:
        classes: Number of classes.
    """

    def __init__(self, classes: int) -> None:
        self._classes, self._count = classes, 0
        # Pixels of two classes by mapped class and probability of the second class, in percent.
        self._by_score = np.zeros((2, LEVELS), np.int64)

    def add(self, window: MapWindow, valid: np.ndarray) -> None:
        """Count the valid pixels of a window that has probabilities."""
        assert window.probabilities is not None, 'called for windows with probabilities'
        if self._classes == 2:
            score = np.round(100 * window.probabilities[1][valid]).astype(np.int64)
            cells = window.classes[valid] * LEVELS + np.clip(score, 0, LEVELS - 1)
            self._by_score += np.bincount(cells, minlength=2 * LEVELS).reshape(2, LEVELS)
            return
        mapped = np.take_along_axis(
            window.probabilities, np.maximum(window.classes, 0)[None].astype(np.int64), 0
        )[0]
        self._count += int((valid & (mapped < window.probabilities.max(0) - 0.01)).sum())

    def count(self) -> int:
        """Return the number of contradicted pixels."""
        first, second = self._by_score.cumsum(1)
        return self._count + int((second + first[-1] - first).min())


def _without_absent_values(reader: MapReader, census: MapCensus) -> MapCensus:
    """Drop the values that do not occur, for a map that does not name its classes."""
    if reader.has_names:
        return census
    present = np.flatnonzero(census.pixels.sum(1))
    reader.keep_classes(present)
    return MapCensus(
        reader.class_names,
        census.unit,
        census.pixels[present],
        census.area[present],
        census.probability,
        census.digest,
    )
