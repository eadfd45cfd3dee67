"""Small maps with confidence, probabilities and a known truth, and labels of their points."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any, List, NamedTuple, Optional, Sequence

import numpy as np
import pyogrio.raw
import shapely
from geo_scenes import CLASSES, PALETTE, UTM

from mapsage.geo import ClassMapWriter, MapInfo, ProbabilityWriter, confidence_path, to_map
from mapsage.geo.probabilities import probabilities_path


class KnownMap(NamedTuple):
    """A map on disk, and what is known of it.

    Attributes:
        path: Path of the map; confidence and probabilities lie next to it.
        truth: True class of each pixel.
        mapped: Class on the map, 255 without data.
        probability: Stored probabilities ``(3, height, width)``.
        transform: Affine transform of the map.
    """

    path: Path
    truth: np.ndarray
    mapped: np.ndarray
    probability: np.ndarray
    transform: Any


def write_map(
    folder: Path, side: int = 200, place: dict = UTM, seed: int = 0, names: Sequence[str] = CLASSES
) -> KnownMap:
    """Write a map of ground, some houses and little water, with its companions."""
    random = np.random.RandomState(seed)
    scores = random.normal(size=(3, side, side)) * 2 + np.array([2.0, 1.0, -3.0])[:, None, None]
    probability = np.exp(scores) / np.exp(scores).sum(0)
    truth = (random.uniform(size=(side, side)) > probability.cumsum(0)).sum(0).clip(0, 2)
    steps = np.round(probability * 250).astype(np.uint8)
    mapped = probability.argmax(0).astype(np.uint8)
    confidence = np.round(100 * probability.max(0)).astype(np.uint8)
    for values in (mapped, confidence, steps):
        values[..., :7] = 255
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / 'map.tif'
    info = MapInfo(list(names), PALETTE, **place)
    with ClassMapWriter(path, side, side, info, confidence=True) as writer:
        writer.write(0, mapped, confidence)
    with ProbabilityWriter(probabilities_path(path), side, side, names, 250, **place) as file:
        file.write(0, steps)
    return KnownMap(path, truth, mapped, steps / 250, place['transform'])


def without_companions(known: KnownMap) -> KnownMap:
    """Delete confidence and probabilities."""
    for path in (confidence_path(known.path), probabilities_path(known.path)):
        Path(path).unlink()
    return known


def read_points(path: Path) -> np.ndarray:
    """Return the coordinates of the points, in the order of their numbers, ``(n, 2)``."""
    _, _, geometry, (numbers,) = pyogrio.raw.read(str(path), layer='points', columns=['point'])
    shapes = shapely.from_wkb(geometry)[np.argsort(numbers)]
    return np.stack([shapely.get_x(shapes), shapely.get_y(shapes)], 1)


def true_labels(path: Path, known: KnownMap) -> List[Optional[str]]:
    """Return the true class of every point."""
    transform = known.transform
    positions = read_points(path)
    pixels = positions if transform is None else to_map(~transform, positions)
    columns, rows = np.floor(pixels).astype(int).T
    return [CLASSES[number] for number in known.truth[rows, columns]]


def label(path: Path, labels: Sequence[Optional[str]]) -> None:
    """Write labels as QGIS does: point 1 gets the first."""
    edit(
        path,
        'UPDATE points SET reference = ? WHERE point = ?',
        [(text, number) for number, text in enumerate(labels, 1)],
    )


def edit(path: Path, statement: str, rows: Sequence[tuple] = ((),)) -> None:
    """Execute SQL on a GeoPackage without its triggers, whose functions only GDAL has."""
    with contextlib.closing(sqlite3.connect(str(path))) as file, file:
        triggers = file.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall()
        for (name,) in triggers:
            file.execute(f'DROP TRIGGER "{name}"')
        file.executemany(statement, rows)
