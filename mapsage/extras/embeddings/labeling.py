"""A map that follows clicks: what the page of the viewer shows while a user labels embeddings.

A tile is a picture of the vectors, their three principal components as red, green and blue, or
shows the classes of a linear probe, which is fitted again after every click. The viewer keeps
the points (`mapsage/extras/viewer/labeling.py`) and calls from several threads.

A tile of level z has 256 cells of 2**z pixels on a side. Tiles and points count from the northern
edge.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, List, Optional, Sequence, Tuple

import numpy as np

from mapsage_launcher.shipped import program

from .classifiers import Classifier
from .embedding_file import EmbeddingFile, check_one_identity
from .errors import EmbeddingError
from .vectors import Pca, to_unit

TILE = 256
_NOTHING = 255
# Cells that are computed at a time: their vectors fit the cache of a processor.
_CHUNK = 1024
# Tiles of stored vectors in memory: 4 million cells, and a half more.
_TILES = 96
# Percentiles of a component that become black and white.
_STRETCH = 2, 98


class ClickedMap:
    """Embeddings, and the classes that a probe gives them.

    Args:
        paths: Embeddings of one encoder.

    Raises:
        EmbeddingError: If the embeddings are of two encoders, or have no data.
    """

    def __init__(self, paths: Sequence[str]) -> None:
        self.paths = [Path(path) for path in paths]
        self._files = [EmbeddingFile(path) for path in paths]
        check_one_identity(self._files)
        self._stored = functools.lru_cache(_TILES)(self._read)
        self._probe: Optional[Tuple[np.ndarray, np.ndarray]] = None
        self._picture = self._fit_picture()
        # scikit-learn, which takes seconds to import, or is missing.
        Classifier('probe', np.eye(2), np.arange(2), 2)

    def commands(self, points: Path) -> List[str]:
        """Return what to type for a map of everything, and for its accuracy."""
        maps, out = ' '.join(map(str, self.paths)), points.with_suffix('')
        return [
            f'{program("classify")} {maps} --labels {points} --out {out}',
            f'{program("assess")} plan {out / self.paths[0].stem}.tif --points 200 --out {out}_check.gpkg',
        ]

    def has_data(self, file: int, x: float, y: float) -> bool:
        """Return whether there is a vector at a place in pixels."""
        raster = self._files[file].raster
        if not (0 <= x < raster.width and 0 <= y < raster.height):
            return False
        return bool(self._cell(file, x, y)[1])

    def _cell(self, file: int, x: float, y: float) -> Tuple[np.ndarray, np.ndarray]:
        column, row = int(x), int(y)
        values, valid = self._stored(file, 0, column // TILE, row // TILE)
        at = row % TILE, column % TILE
        return self._files[file].decode(values[(slice(None), *at)]), valid[at]

    def tile(self, file: int, kind: str, level: int, column: int, row: int) -> bytes:
        """Return a tile of 256 x 256 cells, row by row.

        Args:
            file: Number of the embedding.
            kind: ``picture``: red, green, blue and opacity of each cell; ``classes``: its class and
                the probability in percent, each 255 without one.
            level, column, row: The tile.

        Raises:
            IndexError: If there is no such tile.
        """
        values, valid = self._stored(file, level, column, row)
        source, probe = self._files[file], self._probe
        is_picture = kind == 'picture'
        result = np.full((4 if is_picture else 2, TILE, TILE), 0 if is_picture else _NOTHING, 'u1')
        box = result[:, : valid.shape[0], : valid.shape[1]]
        if is_picture:
            colors = _project(source, values, *self._picture).clip(0, 255)
            box[:] = np.where(valid, [*colors, np.full(valid.shape, 255)], 0)
        elif probe is not None:
            logits = _project(source, values, *probe)
            best = logits.max(0)
            percent = 100 / np.exp(logits - best).sum(0)
            box[:] = np.where(valid, [logits.argmax(0), np.rint(percent)], _NOTHING)
        return np.ascontiguousarray(np.moveaxis(result, 0, -1)).tobytes()

    def _read(self, file: int, level: int, column: int, row: int) -> Tuple[np.ndarray, np.ndarray]:
        source, side = self._files[file], TILE << min(level, 40)
        left, top = column * side, row * side
        total = source.raster.height
        width, height = min(side, source.raster.width - left), min(side, total - top)
        if min(width, height) < 1:
            raise IndexError(f'no tile {level}/{column}/{row}')
        # AlphaEarth's files end with the northern edge.
        if not source.raster.is_georeferenced or source.raster.transform.e <= 0:
            return source.read_stored(left, top, width, height, side // TILE)
        values, valid = source.read_stored(left, total - top - height, width, height, side // TILE)
        return values[:, ::-1], valid[::-1]

    def _whole(self, file: int) -> Tuple[int, np.ndarray, np.ndarray]:
        """Return the level whose single tile has all of an embedding, and the tile."""
        raster = self._files[file].raster
        level = max(0, int(np.ceil(np.log2(max(raster.width, raster.height) / TILE))))
        return (level, *self._stored(file, level, 0, 0))

    def _fit_picture(self) -> Tuple[np.ndarray, np.ndarray]:
        """Return weights and biases from a vector to red, green and blue of 0..255."""
        samples = []
        for number, file in enumerate(self._files):
            _, values, valid = self._whole(number)
            samples.append(to_unit(file.decode(values[:, valid])))
        vectors = np.concatenate(samples, 1).T
        if len(vectors) < 3:
            raise EmbeddingError(f'{self.paths[0]} has no data that could be shown.')
        mean = vectors.mean(0)
        axes = Pca.fit(vectors - mean, min(3, vectors.shape[1]), '').components.T
        axes = axes[[0, 1, min(2, len(axes) - 1)]]
        low, high = np.percentile((vectors - mean) @ axes.T, _STRETCH, axis=0)
        scale = 255 / np.maximum(high - low, 1e-6)
        weights = axes * scale[:, None]
        return weights.astype(np.float32), (-low * scale - weights @ mean).astype(np.float32)

    def fit(self, points: Sequence[Any], names: Sequence[str]) -> None:
        """Fit the probe to points; nothing is shown before two classes have some.

        Args:
            points: Points with ``file``, ``x``, ``y`` and ``name``.
            names: All classes, the first of which has the value 0.
        """
        labels = np.array([names.index(point.name) for point in points], np.int64)
        used, self._probe = np.unique(labels), None
        if len(used) < 2:
            return
        vectors = to_unit(np.stack([self._cell(p.file, p.x, p.y)[0] for p in points], 1)).T
        weights = np.zeros((len(names), vectors.shape[1]), np.float32)
        # A class without a point, as after a color was chosen, is never the best.
        biases = np.full(len(names), -np.inf, np.float32)
        weights[used], biases[used] = Classifier(
            'probe', vectors, np.searchsorted(used, labels), len(used)
        ).linear()
        self._probe = weights, biases

    def least_sure(self, file: int, points: Sequence[Any]) -> Tuple[float, float]:
        """Return the pixel whose class is least probable, away from the points."""
        if self._probe is None:
            raise EmbeddingError('Every place is unsure so far: label two classes first.')
        level, values, valid = self._whole(file)
        logits = _project(self._files[file], values, *self._probe)
        share = 1 / np.exp(logits - logits.max(0)).sum(0)
        share[~valid] = np.inf
        rows, columns = np.mgrid[: valid.shape[0], : valid.shape[1]]
        # Cells beside a point would say little more than it does.
        radius = max(valid.shape) / 20
        for point in points:
            if point.file == file:
                x, y = point.x / 2**level, point.y / 2**level
                share[(columns - x) ** 2 + (rows - y) ** 2 < radius**2] = np.inf
        row, column = np.unravel_index(share.argmin(), share.shape)
        return (float(column) + 0.5) * 2**level, (float(row) + 0.5) * 2**level


def _project(
    file: EmbeddingFile, values: np.ndarray, weights: np.ndarray, biases: np.ndarray
) -> np.ndarray:
    """Return linear functions (K, H, W) float32 of stored values, with unit length."""
    flat = values.reshape(len(values), -1)
    result = np.empty((len(weights), flat.shape[1]), np.float32)
    for first in range(0, flat.shape[1], _CHUNK):
        vectors = to_unit(file.decode(flat[:, first : first + _CHUNK]))
        result[:, first : first + _CHUNK] = weights @ vectors + biases[:, None]
    return result.reshape(-1, *values.shape[1:])
