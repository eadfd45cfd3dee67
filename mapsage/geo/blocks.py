"""Blocks of ground, each of which belongs to one part of the data in every scene that shows it."""
from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, List, NamedTuple, Tuple

import affine
import numpy as np
import rasterio.features
import shapely

from .globe import EARTH_RADIUS, Globe, turns
from .raster import GeoError, Raster, short_crs

PARTS = ('train', 'val', 'test')

_MOST_BLOCKS = 1_000_000  # of a scene
_LATTICE = 65  # points along each side of a scene that say where on the globe it lies
_ARC = 8  # segments of a quarter of a circle
# Around a block, a margin is drawn as a polygon outside of the circle's arcs, and 1 % larger: the
# sphere's meters differ by up to 0.6 % from those of the ellipsoid.
_WIDER = 1.01 / math.cos(math.pi / 4 / _ARC)


class _SceneBlocks(NamedTuple):
    """Blocks that a scene shows or nearly shows."""

    rectangles: np.ndarray  # polygons in pixels of the scene
    widened: np.ndarray  # the same with the margin around them
    parts: np.ndarray  # index in PARTS of each


@dataclass(frozen=True)
class BlockSplit:
    """Division of the ground into square blocks, of which each belongs to one part of the data.

    With ``unit='meters'`` the blocks are those of one grid on the globe. Its rows are bands between
    two parallels, and each row is divided into a whole number of blocks, as in NASA's integerized
    sinusoidal grid, so that every block is ``size`` meters high and wide to within 1 %, except
    beside the poles. Which part a block belongs to follows from its place in the grid and the seed
    alone. Scenes that overlap, also in different coordinate reference systems or rotated, therefore
    agree on it. With ``unit='pixels'`` each scene has blocks of its own, counted from its upper
    left corner, and their part follows from the name of the file, their place and the seed.

    Attributes:
        size: Side of a block.
        unit: Unit of ``size`` and ``margin``: ``'meters'`` or ``'pixels'``.
        val: Share of the blocks that are for validation.
        test: Share of the blocks that are for tests; the rest is for training.
        margin: Least distance between two pixels, center to center, that count in different parts.
            Training gives way to validation and tests, validation to tests.
        seed: Number that chooses the blocks.
    """

    size: float
    unit: str = 'meters'
    val: float = 0.2
    test: float = 0.0
    margin: float = 0.0
    seed: int = 0

    def of_scene(self, scene: Raster, part: str) -> ScenePart:
        """Return which pixels of a scene belong to ``part``, one of ``PARTS``.

        Raises:
            GeoError: If blocks in meters have no place in the scene, or there are too many.
        """
        blocks = self._on_ground(scene) if self.unit == 'meters' else self._in_pixels(scene)
        rank = PARTS.index(part)
        outline = shapely.box(0, 0, scene.width, scene.height)
        shown = shapely.area(shapely.intersection(blocks.rectangles, outline)) > 0
        own = shown & (blocks.parts == rank)
        pieces = shapely.intersection(blocks.rectangles[own], outline)
        if self.margin and len(pieces):
            pieces = _without(pieces, blocks.widened[blocks.parts > rank])
        pieces = shapely.get_parts(pieces)
        pieces = pieces[(shapely.get_type_id(pieces) == shapely.GeometryType.POLYGON)
                        & (shapely.area(pieces) > 0)]
        return ScenePart(self, part, pieces, (int(own.sum()), int(shown.sum())))

    def _in_pixels(self, scene: Raster) -> _SceneBlocks:
        rows, columns = (math.ceil(side / self.size) for side in (scene.height, scene.width))
        _check_number(rows * columns, self, scene)
        row, column = (each.ravel() for each in np.mgrid[:rows, :columns])
        rectangles = shapely.box(column * self.size, row * self.size, (column + 1) * self.size,
                                 (row + 1) * self.size)
        name = Path(scene.path).stem
        return _SceneBlocks(rectangles, self._widen(rectangles),
                       self._parts([f'{name} {r} {c}' for r, c in zip(row, column)]))

    def _on_ground(self, scene: Raster) -> _SceneBlocks:
        globe = _place(scene, self)
        row, column, count = self._numbers(scene, globe)
        height = 180 / self._rows()
        south, west = row * height - 90, column * (360 / count) - 180
        # A block and its margin are drawn in meters around its corner, then bent into the scene.
        across = np.radians(360 / count) * np.cos(np.radians(south + height / 2)) * EARTH_RADIUS
        up = math.radians(height) * EARTH_RADIUS
        flat = shapely.box(0, 0, across, up)
        step = self.size / _segments(self.size, globe, west[0], south[0])
        drawn: List[np.ndarray] = []
        for shapes in (flat, self._widen(flat)):
            shapes = shapely.segmentize(shapes, step)
            points, owner = shapely.get_coordinates(shapes, return_index=True)
            points /= np.stack([across / (360 / count), np.full(len(row), up / height)], 1)[owner]
            points += np.stack([west, south], 1)[owner]
            points[:, 1] = points[:, 1].clip(-90, 90)
            drawn.append(shapely.set_coordinates(shapes, globe.pixels(*points.T)))
        reaches = shapely.box(0, 0, scene.width, scene.height)
        near = np.isfinite(shapely.bounds(drawn[1])).all(1)
        near[near] &= shapely.intersects(shapely.make_valid(drawn[1][near]), reaches)
        rectangles, widened = (shapely.make_valid(each[near]) for each in drawn)
        whole = column[near] % count[near]  # the same block on both sides of the antimeridian
        return _SceneBlocks(rectangles, widened,
                       self._parts([f'{r} {c}' for r, c in zip(row[near], whole)]))

    def _rows(self) -> int:
        return max(1, round(math.pi * EARTH_RADIUS / self.size))

    def _numbers(self, scene: Raster, globe: Globe
                 ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return row and column of all blocks that may meet a scene, and the blocks in the row."""
        west, south, east, north = _extent(scene, globe)
        height = 180 / self._rows()
        beyond = math.degrees((self.margin * _WIDER + self.size) / EARTH_RADIUS)
        first = max(0, math.floor((south - beyond + 90) / height))
        last = min(self._rows() - 1, math.floor((north + beyond + 90) / height))
        _check_number(last - first + 1, self, scene)
        rows = np.arange(first, last + 1)
        middle = np.cos(np.radians((rows + 0.5) * height - 90))
        around = 2 * math.pi * EARTH_RADIUS * middle
        counts = np.maximum(1, np.round(around / self.size)).astype(int)
        wider = beyond / middle
        begin = np.floor((west - wider + 180) / 360 * counts).astype(int)
        length = np.floor((east + wider + 180) / 360 * counts).astype(int) - begin + 1
        if globe.is_flat:  # once around the globe is enough
            begin, length = np.where(length < counts, begin, 0), np.minimum(length, counts)
        _check_number(int(length.sum()), self, scene)
        row, count = np.repeat(rows, length), np.repeat(counts, length)
        column = np.concatenate([b + np.arange(n) for b, n in zip(begin, length)])
        return row, column, count

    def _widen(self, shapes: np.ndarray) -> np.ndarray:
        return shapely.buffer(shapes, self.margin * _WIDER, quad_segs=_ARC) \
            if self.margin else shapes

    def _parts(self, names: List[str]) -> np.ndarray:
        drawn = np.array([_uniform(f'{self.seed} {name}') for name in names])
        return np.where(drawn < self.test, 2, np.where(drawn < self.test + self.val, 1, 0))


class ScenePart:
    """Pixels of a scene that count in one part of the data, as ``BlockSplit.of_scene`` returns it.

    Attributes:
        blocks: Number of blocks of the part that the scene shows, and of all that it shows.
        pixels: Number of pixels that count, as an area: a pixel on an edge counts by its share.
    """

    def __init__(self, split: BlockSplit, part: str, pieces: np.ndarray,
                 blocks: Tuple[int, int]) -> None:
        self.split, self.part = split, part
        self.blocks = blocks
        self.pixels = float(shapely.area(pieces).sum())
        self._tree = shapely.STRtree(pieces)

    def __deepcopy__(self, memo: Any) -> ScenePart:
        return self  # it never changes, and a copied sample must not copy all blocks

    def __repr__(self) -> str:  # the same in every process: it identifies cached samples
        return f'ScenePart({self.split}, {self.part!r})'

    def mask(self, column: int, row: int, width: int, height: int, step: int = 1) -> np.ndarray:
        """Return which pixels of a window count, bool (height, width).

        Args:
            column: Left edge in pixels of the scene.
            row: Upper edge in pixels of the scene.
            width: Number of columns that are returned.
            height: Number of rows that are returned.
            step: Side in pixels of the squares whose middle is looked at in place of each pixel.
        """
        window = shapely.box(column, row, column + width * step, row + height * step)
        pieces = self._tree.geometries.take(self._tree.query(window, predicate='intersects'))
        if not len(pieces):
            return np.zeros((height, width), bool)
        if len(pieces) == 1 and shapely.contains(pieces[0], window):
            return np.ones((height, width), bool)
        return rasterio.features.rasterize(
            list(pieces), out_shape=(height, width), dtype='uint8',
            transform=affine.Affine(step, 0, column, 0, step, row)).astype(bool)

    def meets(self, column: int, row: int, width: int, height: int) -> bool:
        """Return whether a pixel of a window counts."""
        window = shapely.box(column, row, column + width, row + height)
        pieces = self._tree.geometries.take(self._tree.query(window, predicate='intersects'))
        # A piece without a hole that holds so much of a window holds the center of a pixel.
        return bool(len(pieces)) and bool(
            (shapely.area(shapely.intersection(pieces, window)) > 4 * (width + height)).any()
            or self.mask(column, row, width, height).any())


def _place(scene: Raster, split: BlockSplit) -> Globe:
    try:
        return Globe(scene)
    except GeoError as error:
        raise GeoError(
            f'{error} Blocks of {split.size:,.10g} meters have no place in it: georeference it, or '
            f"divide each scene by itself with unit='pixels' (scenes must not overlap then)."
        ) from error


def _extent(scene: Raster, globe: Globe) -> Tuple[float, float, float, float]:
    """Return west, south, east and north of a scene in degrees; east may be more than 180."""
    points = np.array([(x, y) for y in np.linspace(0, scene.height, _LATTICE)
                       for x in np.linspace(0, scene.width, _LATTICE)])
    longitudes, latitudes = globe.degrees(points)
    there = np.isfinite(longitudes) & np.isfinite(latitudes)
    if not there.any():
        raise GeoError(f'{scene.path}: none of its pixels has a longitude and latitude; check its '
                       f'CRS ({short_crs(scene.crs)}) and transform.')
    longitudes, latitudes = longitudes[there], latitudes[there]
    if globe.is_flat:
        longitudes = longitudes - turns(longitudes - longitudes[0])
    south, north = latitudes.min(), latitudes.max()
    west, east = longitudes.min(), longitudes.max()
    gap = 2 * (north - south) / (_LATTICE - 1)  # between points, with some reserve
    if globe.is_flat and (
            east - west > 180 or max(abs(south), abs(north)) + gap >= 90):  # it may show a pole
        west, east = -180.0, 180.0
    return west, south - gap, east, north + gap


def _segments(size: float, globe: Globe, west: float, south: float) -> int:
    """Return into how many segments a side is cut, so that a curve is hit to 0.01 pixels.

    A side of L meters is bent by up to about L^2 / (4 R) in the usual projections.
    """
    corner = globe.pixels(np.array([west, west]), np.array([south, south + 1e-4]))
    pixels = np.hypot(*(corner[1] - corner[0]))
    if not np.isfinite(pixels):
        return 64
    meters = math.radians(1e-4) * EARTH_RADIUS / max(pixels, 1e-9)
    return min(max(2, math.ceil(math.sqrt(size ** 2 / (4 * EARTH_RADIUS) / (0.01 * meters)))), 64)


def _without(pieces: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return ``pieces`` less all of ``others``."""
    if not len(others):
        return pieces
    piece, other = shapely.STRtree(others).query(pieces, predicate='intersects')
    pieces = pieces.copy()
    order = np.argsort(piece, kind='stable')
    numbers, begins = np.unique(piece[order], return_index=True)
    for number, near in zip(numbers, np.split(other[order], begins[1:])):
        pieces[number] = shapely.difference(pieces[number], shapely.union_all(others[near]))
    return pieces


def _check_number(count: int, split: BlockSplit, scene: Raster) -> None:
    if count > _MOST_BLOCKS:
        raise GeoError(f'{scene.path}: blocks of {split.size:g} {split.unit} are more than '
                       f'{_MOST_BLOCKS:,} in this scene; expected a size of some windows.')


def _uniform(text: str) -> float:
    """Return a number in [0, 1) that follows from a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') / 2 ** 64
