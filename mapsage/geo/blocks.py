"""Division of the ground into blocks, each of which belongs to one part of the data.

The part of a block (``train``, ``val`` or ``test``) follows from its position on the ground and a
seed, not from the scene. So every scene that shows the block agrees, and scenes can be added later
without moving a block. `mapsage/datasets/geotiff/split.py` reads the setting.

Shapes:
    row, column, count    (blocks,) index of a block in the grid on the globe, blocks in its row
    rectangles, widened   (blocks,) shapely polygons in pixels of the scene
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import List, NamedTuple, Tuple

import affine
import numpy as np
import rasterio.features
import shapely

from .coordinates import short_crs
from .errors import GeoError
from .globe import EARTH_RADIUS, Globe
from .raster import Raster
from .reference_systems import next_to

PARTS = ('train', 'val', 'test')

# Largest number of blocks in a scene.
_MOST_BLOCKS = 1_000_000
# Points along each side of a scene whose longitudes and latitudes give its extent on the globe.
_LATTICE = 65
# Segments of a quarter of a circle.
_ARC = 8
# The margin around a block is drawn as a polygon that lies outside the true arcs, and 1 % larger,
# because meters on the sphere and on the ellipsoid differ by up to 0.6 %.
_WIDER = 1.01 / math.cos(math.pi / 4 / _ARC)


class _SceneBlocks(NamedTuple):
    """Blocks that a scene shows, or that reach into it with their margin.

    Attributes:
        rectangles: Polygons in pixels of the scene.
        widened: The same polygons with the margin around them.
        part_index: Index in ``PARTS`` of each block.
    """

    rectangles: np.ndarray
    widened: np.ndarray
    part_index: np.ndarray


@dataclass(frozen=True)
class BlockSplit:
    """Division of the ground into square blocks, of which each belongs to one part of the data.

    With ``unit='meters'`` all scenes share one grid on the globe. Its rows are bands between two
    parallels, and each row is divided into a whole number of blocks, as in NASA's integerized
    sinusoidal grid. So every block is ``size`` meters high and wide to within 1 %, except near the
    poles. The part of a block depends only on its row and column in the grid and on the seed.
    Therefore scenes that overlap agree on it, even if they are rotated or have different coordinate
    reference systems. With ``unit='pixels'`` the blocks of each scene are counted from its upper
    left corner, and their part depends on the name of the file, their row and column, and the seed.

    Attributes:
        size: Side of a block.
        unit: Unit of ``size`` and ``margin``: ``'meters'`` or ``'pixels'``.
        val: Share of the blocks that are for validation.
        test: Share of the blocks that are for tests; the rest is for training.
        margin: Minimum distance between the centers of two pixels that count in different parts.
            Training loses pixels near blocks of validation and tests; validation loses pixels near
            blocks of tests.
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
            GeoError: If the blocks are in meters and the scene has no georeference, or there are
                too many blocks.
        """
        blocks = self._on_ground(scene) if self.unit == 'meters' else self._in_pixels(scene)
        index = PARTS.index(part)
        outline = shapely.box(0, 0, scene.width, scene.height)
        visible = shapely.area(shapely.intersection(blocks.rectangles, outline)) > 0
        selected = visible & (blocks.part_index == index)
        pieces = shapely.intersection(blocks.rectangles[selected], outline)
        if self.margin and len(pieces):
            pieces = _subtract(pieces, blocks.widened[blocks.part_index > index])
        pieces = shapely.get_parts(pieces)
        pieces = pieces[
            (shapely.get_type_id(pieces) == shapely.GeometryType.POLYGON)
            & (shapely.area(pieces) > 0)
        ]
        return ScenePart(self, part, pieces, (int(selected.sum()), int(visible.sum())))

    def _in_pixels(self, scene: Raster) -> _SceneBlocks:
        rows, columns = (math.ceil(side / self.size) for side in (scene.height, scene.width))
        _check_number(rows * columns, self, scene)
        row, column = (axis.ravel() for axis in np.mgrid[:rows, :columns])
        rectangles = shapely.box(
            column * self.size, row * self.size, (column + 1) * self.size, (row + 1) * self.size
        )
        name = Path(scene.path).stem
        return _SceneBlocks(
            rectangles,
            self._widen(rectangles),
            self._draw_parts([f'{name} {r} {c}' for r, c in zip(row, column)]),
        )

    def _on_ground(self, scene: Raster) -> _SceneBlocks:
        globe = _globe_of(scene, self)
        row, column, count = self._blocks_near(scene, globe)
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
        outline = shapely.box(0, 0, scene.width, scene.height)
        near = np.isfinite(shapely.bounds(drawn[1])).all(1)
        near[near] &= shapely.intersects(shapely.make_valid(drawn[1][near]), outline)
        rectangles, widened = (shapely.make_valid(shapes[near]) for shapes in drawn)
        # A block at the antimeridian has two column numbers, one on each side.
        wrapped = column[near] % count[near]
        return _SceneBlocks(
            rectangles, widened, self._draw_parts([f'{r} {c}' for r, c in zip(row[near], wrapped)])
        )

    def _rows(self) -> int:
        """Return the number of rows of the grid on the globe."""
        return max(1, round(math.pi * EARTH_RADIUS / self.size))

    def _blocks_near(
        self, scene: Raster, globe: Globe
    ) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return row and column of all blocks that may meet a scene, and the blocks in the row."""
        west, south, east, north = _extent(scene, globe)
        height = 180 / self._rows()
        reach = math.degrees((self.margin * _WIDER + self.size) / EARTH_RADIUS)
        first = max(0, math.floor((south - reach + 90) / height))
        last = min(self._rows() - 1, math.floor((north + reach + 90) / height))
        _check_number(last - first + 1, self, scene)
        rows = np.arange(first, last + 1)
        middle = np.cos(np.radians((rows + 0.5) * height - 90))
        circumference = 2 * math.pi * EARTH_RADIUS * middle
        counts = np.maximum(1, np.round(circumference / self.size)).astype(int)
        reach_along_row = reach / middle
        begin = np.floor((west - reach_along_row + 180) / 360 * counts).astype(int)
        length = np.floor((east + reach_along_row + 180) / 360 * counts).astype(int) - begin + 1
        # A scene in degrees may be numbered beyond 180; any other needs each block only once.
        if globe.is_flat:
            begin, length = np.where(length < counts, begin, 0), np.minimum(length, counts)
        _check_number(int(length.sum()), self, scene)
        row, count = np.repeat(rows, length), np.repeat(counts, length)
        column = np.concatenate([b + np.arange(n) for b, n in zip(begin, length)])
        return row, column, count

    def _widen(self, shapes: np.ndarray) -> np.ndarray:
        return (
            shapely.buffer(shapes, self.margin * _WIDER, quad_segs=_ARC) if self.margin else shapes
        )

    def _draw_parts(self, names: List[str]) -> np.ndarray:
        """Return the index in ``PARTS`` of each block, which follows from its name and the seed."""
        drawn = np.array([_uniform(f'{self.seed} {name}') for name in names])
        return np.where(drawn < self.test, 2, np.where(drawn < self.test + self.val, 1, 0))


class ScenePart:
    """Pixels of a scene that count in one part of the data, as returned by ``BlockSplit.of_scene``.

    Attributes:
        blocks: Number of blocks of the part in the scene, and of all blocks in the scene.
        pixels: Number of pixels that count. It is an area: a pixel on an edge counts by its share.
    """

    def __init__(
        self, split: BlockSplit, part: str, pieces: np.ndarray, blocks: Tuple[int, int]
    ) -> None:
        self.split, self.part = split, part
        self.blocks = blocks
        self.pixels = float(shapely.area(pieces).sum())
        self._tree = shapely.STRtree(pieces)

    def __deepcopy__(self, memo: object) -> ScenePart:
        # The object never changes, and a copy of a sample must not copy all blocks.
        return self

    def __repr__(self) -> str:
        # The text identifies cached samples, so it must be the same in every process.
        return f'ScenePart({self.split}, {self.part!r})'

    def mask(self, column: int, row: int, width: int, height: int, step: int = 1) -> np.ndarray:
        """Return which pixels of a window count, bool (height, width).

        Args:
            column: Left edge in pixels of the scene.
            row: Upper edge in pixels of the scene.
            width: Number of columns that are returned.
            height: Number of rows that are returned.
            step: Side of a square in pixels. The result has a value for each square instead of each
                pixel: whether its middle counts.
        """
        window = shapely.box(column, row, column + width * step, row + height * step)
        pieces = self._tree.geometries.take(self._tree.query(window, predicate='intersects'))
        if not len(pieces):
            return np.zeros((height, width), bool)
        if len(pieces) == 1 and shapely.contains(pieces[0], window):
            return np.ones((height, width), bool)
        return rasterio.features.rasterize(
            list(pieces),
            out_shape=(height, width),
            dtype='uint8',
            transform=affine.Affine(step, 0, column, 0, step, row),
        ).astype(bool)

    def covered_area(self, polygons: np.ndarray) -> np.ndarray:
        """Return the pixels that count of each polygon (in pixels of the scene), float (N,)."""
        polygons = shapely.make_valid(polygons)
        owner, piece = self._tree.query(polygons, predicate='intersects')
        common = shapely.intersection(polygons[owner], self._tree.geometries.take(piece))
        return np.bincount(owner, shapely.area(common), len(polygons))

    def meets(self, column: int, row: int, width: int, height: int) -> bool:
        """Return whether a pixel of a window counts."""
        window = shapely.box(column, row, column + width, row + height)
        pieces = self._tree.geometries.take(self._tree.query(window, predicate='intersects'))
        # A piece without a hole that covers so much of a window contains the center of a pixel.
        return bool(len(pieces)) and bool(
            (shapely.area(shapely.intersection(pieces, window)) > 4 * (width + height)).any()
            or self.mask(column, row, width, height).any()
        )


def _globe_of(scene: Raster, split: BlockSplit) -> Globe:
    """Return the globe of a scene, or raise an error that offers blocks in pixels."""
    try:
        return Globe(scene)
    except GeoError as error:
        raise GeoError(
            f'{error} Blocks of {split.size:,.10g} meters need a georeference: add it, or divide '
            f"each scene separately with unit='pixels' (scenes must not overlap then)."
        ) from error


def _extent(scene: Raster, globe: Globe) -> Tuple[float, float, float, float]:
    """Return west, south, east and north of a scene in degrees; east may be more than 180."""
    points = np.array(
        [
            (x, y)
            for y in np.linspace(0, scene.height, _LATTICE)
            for x in np.linspace(0, scene.width, _LATTICE)
        ]
    )
    longitudes, latitudes = globe.degrees(points)
    on_globe = np.isfinite(longitudes) & np.isfinite(latitudes)
    if not on_globe.any():
        raise GeoError(
            f'{scene.path}: none of its pixels has a longitude and latitude; check its '
            f'CRS ({short_crs(scene.crs)}) and transform.'
        )
    longitudes, latitudes = longitudes[on_globe], latitudes[on_globe]
    if globe.is_flat:
        longitudes = next_to(longitudes, longitudes[0], 360)
    south, north = latitudes.min(), latitudes.max()
    west, east = longitudes.min(), longitudes.max()
    # Distance between two points, with some reserve.
    gap = 2 * (north - south) / (_LATTICE - 1)
    # Such a scene may contain a pole, and then has all longitudes.
    if globe.is_flat and (east - west > 180 or max(abs(south), abs(north)) + gap >= 90):
        west, east = -180.0, 180.0
    return west, south - gap, east, north + gap


def _segments(size: float, globe: Globe, west: float, south: float) -> int:
    """Return the number of segments of a block's side that approximate its curve to 0.01 pixels.

    In the usual projections a side of L meters deviates from a straight line by up to about
    L^2 / (4 R).
    """
    corner = globe.pixels(np.array([west, west]), np.array([south, south + 1e-4]))
    pixels = np.hypot(*(corner[1] - corner[0]))
    if not np.isfinite(pixels):
        return 64
    meters = math.radians(1e-4) * EARTH_RADIUS / max(pixels, 1e-9)
    return min(max(2, math.ceil(math.sqrt(size**2 / (4 * EARTH_RADIUS) / (0.01 * meters)))), 64)


def _subtract(pieces: np.ndarray, shapes: np.ndarray) -> np.ndarray:
    """Return ``pieces`` minus all of ``shapes``."""
    if not len(shapes):
        return pieces
    piece, shape = shapely.STRtree(shapes).query(pieces, predicate='intersects')
    pieces = pieces.copy()
    order = np.argsort(piece, kind='stable')
    numbers, begins = np.unique(piece[order], return_index=True)
    for number, near in zip(numbers, np.split(shape[order], begins[1:])):
        pieces[number] = shapely.difference(pieces[number], shapely.union_all(shapes[near]))
    return pieces


def _check_number(count: int, split: BlockSplit, scene: Raster) -> None:
    if count > _MOST_BLOCKS:
        raise GeoError(
            f'{scene.path}: blocks of {split.size:g} {split.unit} are more than '
            f'{_MOST_BLOCKS:,} in this scene; expected a side of several windows.'
        )


def _uniform(text: str) -> float:
    """Return a number in [0, 1), uniformly distributed, that depends only on a text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, 'big') / 2**64
