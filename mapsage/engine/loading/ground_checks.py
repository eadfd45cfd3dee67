"""Measures the ground that training and validation share, where scores are too good.

Windows of training may overlap the validated scenes, or lie so close that a model has seen nearly
the same pixels. :func:`shared_ground` looks up points of the validated scenes in the training
windows of all scenes that show the same place on the Earth; :func:`ground_note` turns the shares
into a warning.

Coordinates are pixels (column, row) of a scene, or degrees (longitude, latitude) on the globe.
"""

from __future__ import annotations

import filecmp
import itertools
import math
import os
from dataclasses import dataclass
from typing import Collection, Dict, Iterator, List, Optional, Tuple

import cv2
import numpy as np

from mapsage.datasets import GeoTiffDataset
from mapsage.datasets.geotiff.cover import SceneCover
from mapsage.geo import EARTH_RADIUS, GeoError, Globe, Raster, open_raster, pixel_side
from mapsage.host.dataset_parts import inner_datasets, listed_samples, reads_remotely

from .build import datasets_of_scenes

# Points along the longer side of a scene of validation.
_POINTS = 256
# Squares along the longer side of a scene of training.
_CELLS = 2048
# Smallest share of the validated ground that causes a warning.
_MIN_SHARE = 0.005
# Limits that keep the comparison of images within about a second on a local disk: the files that are
# listed, the images of validation, and the training images that each of them is compared with.
_MOST_FILES, _COMPARED, _MOST_CANDIDATES = 20_000, 64, 200


@dataclass(frozen=True)
class SharedGround:
    """Position of the validated ground relative to the training windows.

    Attributes:
        inside: Share of the validated ground that lies in training windows.
        near: Share that lies outside of them, but within ``distance`` of one.
        distance: Distance in meters; in pixels for scenes without georeference.
    """

    inside: float
    near: float
    distance: float


class _Scene:
    """A scene of a dataset: the ground that its windows cover, and its position on the globe."""

    def __init__(self, cover: SceneCover, number: int) -> None:
        self._cover, self._number = cover, number
        self.dataset = cover.dataset
        path = cover.paths[number]
        self.raster: Raster = open_raster(path, self.dataset.bands)
        self.path = os.path.realpath(path)
        self.globe: Optional[Globe] = None
        # Side of a pixel in meters.
        self.pixel = 1.0
        try:
            globe, pixel = Globe(self.raster), pixel_side(self.raster)
        except GeoError:
            # Without georeference the scene can only be compared with itself.
            return
        outline = np.array(
            [
                (x, y)
                for x in np.linspace(0, self.raster.width, 9)
                for y in np.linspace(0, self.raster.height, 9)
            ]
        )
        self._outline = np.stack(globe.degrees(outline), 1)
        if math.isfinite(pixel) and np.isfinite(self._outline).all():
            self.globe, self.pixel = globe, pixel

    def step(self, cells: int) -> int:
        """Return the side in pixels of squares, at most ``cells`` of which lie along the scene."""
        return max(
            1, self.dataset.window // 32, -(-max(self.raster.width, self.raster.height) // cells)
        )

    def cover(self, step: int) -> np.ndarray:
        """Return whether the middle of each square is covered, bool (rows, columns)."""
        return self._cover.of(self._number, step)

    def points(self) -> np.ndarray:
        """Return points on the covered ground, (N, 2) as (column, row)."""
        step = self.step(_POINTS)
        return np.argwhere(self.cover(step))[:, ::-1] * step + step / 2

    def may_meet(self, target: _Scene, meters: float) -> bool:
        """Return whether two scenes with a georeference may come within a distance."""
        degrees = math.degrees(2 * meters / EARTH_RADIUS)
        (west, south), (east, north) = self._outline.min(0), self._outline.max(0)
        left, bottom = target._outline.min(0)
        right, top = target._outline.max(0)
        if south - degrees > top or bottom > north + degrees:
            return False
        wide = degrees / max(0.01, math.cos(math.radians(max(map(abs, (south, north))))))
        if max(east - west, right - left) > 180:
            # Across the antimeridian, or around a pole.
            return True
        return (
            (left - east) % 360 <= wide
            or (west - right) % 360 <= wide
            or ((left - west) % 360 <= east - west)
            or (west - left) % 360 <= right - left
        )


def shared_ground(train: object, val: object) -> Optional[SharedGround]:
    """Return the shares of the validated ground that lie in or near training windows.

    Points of the validated scenes, up to 256 along a side, are looked up in the training windows of
    every scene that shows them.

    Args:
        train: Dataset of training, also in wrappers.
        val: Dataset of validation, also in wrappers.

    Returns:
        The shares. None if one of the two has no scenes, or if both are parts of one split in
        meters, which keeps its margin by construction.
    """
    train_sets, val_sets = datasets_of_scenes(train), datasets_of_scenes(val)
    pairs = [
        (train_set, val_set)
        for val_set in val_sets
        for train_set in train_sets
        if not _are_parts(train_set, val_set)
    ]
    if not pairs:
        return None
    scenes_of = {
        id(dataset): [_Scene(cover, number) for number in range(len(cover.paths))]
        for dataset in (*train_sets, *val_sets)
        for cover in [SceneCover(dataset)]
    }
    area = inside = near = farthest = 0.0
    for val_set in val_sets:
        training = [
            scene
            for train_set, partner in pairs
            if partner is val_set
            for scene in scenes_of[id(train_set)]
        ]
        for scene in scenes_of[id(val_set)]:
            distance = val_set.window / 2 * scene.pixel
            points = scene.points()
            far = np.full(len(points), np.inf)
            for train_scene in training:
                far = np.minimum(far, _distances(scene, points, train_scene, distance))
            weight = (scene.step(_POINTS) * scene.pixel) ** 2
            area += weight * len(points)
            inside += weight * float((far == 0).sum())
            near += weight * float(((far > 0) & (far < distance)).sum())
            farthest = max(farthest, distance)
    return SharedGround(inside / area, near / area, farthest) if area else None


def copies_note(train: object, val: object) -> Optional[str]:
    """Return a warning if image files of validation are files of training too, else None.

    Up to 64 images of validation are compared by content with the training images of the same size
    in bytes.
    """
    by_size: Dict[Optional[int], List[str]] = {}
    for path in itertools.islice(_image_files(train), _MOST_FILES):
        by_size.setdefault(_size_of(path), []).append(path)
    by_size.pop(None, None)
    paths = list(itertools.islice(_image_files(val), _MOST_FILES))
    compared = paths[:: -(-len(paths) // _COMPARED)] if paths else []
    copies = [
        (path, candidate)
        for path in compared
        for candidate in by_size.get(_size_of(path), ())[:_MOST_CANDIDATES]
        if filecmp.cmp(path, candidate, shallow=False)
    ]
    count = len({path for path, _ in copies})
    if not count:
        return None
    return (
        f'{count} of {len(compared)} images of val_dataloader are images of train_dataloader too, '
        f'such as {copies[0][0]} and {copies[0][1]}: their scores are those of images that the '
        f'model has seen. Take them out of one of the two.'
    )


def _image_files(dataset: object) -> Iterator[str]:
    """Yield the paths of a dataset's images, each once; scenes are compared by their ground."""
    for inside in inner_datasets(dataset):
        if isinstance(inside, GeoTiffDataset) or reads_remotely(inside):
            continue
        paths = (sample.get('img_path') for sample in listed_samples(inside))
        yield from (path for path in dict.fromkeys(paths) if isinstance(path, str))


def _size_of(path: str) -> Optional[int]:
    """Return the bytes of a file, or None if it is no file of this machine."""
    try:
        return os.stat(path).st_size
    except OSError:
        return None


def ground_note(train: object, val: object, name: str = 'val_dataloader') -> Optional[str]:
    """Return a warning if training and validation share ground, else None."""
    blocks = [
        {scenes.split.blocks for scenes in datasets_of_scenes(dataset) if scenes.split is not None}
        for dataset in (train, val)
    ]
    differ = ''
    if all(blocks) and blocks[0] != blocks[1]:
        differ = (
            f' Their splits differ: {_format_blocks(blocks[0])} in train_dataloader, '
            f'{_format_blocks(blocks[1])} in {name}; all but part must be equal.'
        )
    shared = shared_ground(train, val)
    if not differ and (shared is None or max(shared.inside, shared.near) < _MIN_SHARE):
        return None
    text = ''
    if shared is not None:
        text = (
            f' {100 * shared.inside:.1f} % of the ground of {name} lies in windows of '
            f'train_dataloader, and another {100 * shared.near:.1f} % within '
            f'{shared.distance:.4g} m (half a window; pixels without georeference) of one.'
        )
    advice = (
        ''
        if differ
        else (
            " Give both datasets split=dict(by='blocks', ..., margin=...) with their part "
            '(docs/reference/datasets.md), or use other scenes.'
        )
    )
    return f'scores may be better than on new ground.{text}{differ}{advice}'


def _are_parts(first: GeoTiffDataset, second: GeoTiffDataset) -> bool:
    """Return whether two datasets are different parts of one split in meters."""
    return (
        first.split is not None
        and second.split is not None
        and first.split.blocks == second.split.blocks
        and first.split.part != second.split.part
        and first.split.blocks.unit == 'meters'
    )


def _distances(scene: _Scene, points: np.ndarray, target: _Scene, limit: float) -> np.ndarray:
    """Return the distance of each point of a scene from the covered ground of another scene.

    Args:
        scene: Scene of the points.
        points: Points as (column, row), (N, 2).
        target: Other scene.
        limit: Distance up to which results are exact, in meters; in pixels without georeference.

    Returns:
        Distances in the unit of ``limit``, (N,). Infinity where the target has no ground near.
    """
    same = scene.path == target.path
    if (
        same
        and scene.dataset.split is not None
        and target.dataset.split is not None
        and scene.dataset.split.blocks == target.dataset.split.blocks
        and scene.dataset.split.part != target.dataset.split.part
    ):
        # Blocks in pixels keep the margin inside of each file.
        return np.full(len(points), np.inf)
    reach = limit / target.pixel
    if not same:
        if scene.globe is None or target.globe is None or not scene.may_meet(target, limit):
            return np.full(len(points), np.inf)
        points = target.globe.pixels(*scene.globe.degrees(points))
    size = np.array([target.raster.width, target.raster.height])
    close = np.isfinite(points).all(1)
    close[close] &= ((points[close] > -reach) & (points[close] < size + reach)).all(1)
    distances = np.full(len(points), np.inf)
    if close.any():
        step = scene.step(_POINTS) if same else target.step(_CELLS)
        far, pad = _distance_grid(target, step, reach)
        column, row = (np.floor(points[close] / step).astype(int) + pad).T
        last = far.shape[0] - 1, far.shape[1] - 1
        distances[close] = far[row.clip(0, last[0]), column.clip(0, last[1])] * target.pixel
        # The last squares reach beyond the edge of the scene, where no ground is covered.
        beyond = ((points[close] < 0) | (points[close] >= size)).any(1)
        distances[close] = np.where(
            beyond, np.maximum(distances[close], target.pixel / 2), distances[close]
        )
    return distances


def _distance_grid(scene: _Scene, step: int, reach: float) -> Tuple[np.ndarray, int]:
    """Return the distance in pixels of each square of a scene from covered ground.

    Returns:
        The distances, (rows, columns), padded on each side, and the number of squares of the
        padding.
    """
    pad = math.ceil(reach / step) + 1
    cover = np.pad(scene.cover(step), pad)
    if not cover.any():
        return np.full(cover.shape, np.inf), pad
    far = cv2.distanceTransform((~cover).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    return far * float(step), pad


def _format_blocks(blocks: Collection[object]) -> str:
    return ', '.join(sorted(str(block) for block in blocks))
