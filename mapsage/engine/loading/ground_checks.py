"""Ground that training and validation have in common."""
from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any, List, Optional, Tuple

import cv2
import numpy as np

from mapsage.datasets import GeoTiffDataset
from mapsage.datasets.geotiff.cover import SceneCover
from mapsage.geo import EARTH_RADIUS, GeoError, Globe, Raster, open_raster, pixel_side

from .build import datasets_of_scenes

_POINTS = 256  # that stand for a scene of validation along its longer side
_CELLS = 2048  # that stand for a scene of training along its longer side
_WORTH_SAYING = 0.005  # share of the validated ground from which on a warning is given


@dataclass(frozen=True)
class SharedGround:
    """How the ground of validation lies to that of training.

    Attributes:
        inside: Share of the validated ground that lies in training windows.
        near: Share that does not, but within ``distance`` of one.
        distance: Distance in meters; in pixels where there is no georeference.
    """

    inside: float
    near: float
    distance: float


class _Scene:
    """A scene of a dataset: which of its ground counts, and where that is."""

    def __init__(self, cover: SceneCover, number: int) -> None:
        self._cover, self._number = cover, number
        self.dataset = cover.dataset
        path = cover.paths[number]
        self.raster: Raster = open_raster(path, self.dataset.bands)
        self.path = os.path.realpath(path)
        self.globe: Optional[Globe] = None
        self.pixel = 1.0  # side in meters
        try:
            globe, pixel = Globe(self.raster), pixel_side(self.raster)
        except GeoError:  # then it can be compared with itself alone
            return
        outline = np.array([(x, y) for x in np.linspace(0, self.raster.width, 9)
                            for y in np.linspace(0, self.raster.height, 9)])
        self._outline = np.stack(globe.degrees(outline), 1)
        if math.isfinite(pixel) and np.isfinite(self._outline).all():
            self.globe, self.pixel = globe, pixel

    def step(self, cells: int) -> int:
        """Return the side in pixels of squares of which at most ``cells`` lie along a side."""
        return max(1, self.dataset.window // 32,
                   -(-max(self.raster.width, self.raster.height) // cells))

    def cover(self, step: int) -> np.ndarray:
        """Return where the scene is covered, bool, for the middle of each square."""
        return self._cover.of(self._number, step)

    def points(self) -> np.ndarray:
        """Return (column, row) of points that stand for the ground that counts, (N, 2)."""
        step = self.step(_POINTS)
        return np.argwhere(self.cover(step))[:, ::-1] * step + step / 2

    def may_meet(self, other: _Scene, meters: float) -> bool:
        """Return whether two scenes with a georeference may come within a distance."""
        degrees = math.degrees(2 * meters / EARTH_RADIUS)
        (west, south), (east, north) = self._outline.min(0), self._outline.max(0)
        left, bottom = other._outline.min(0)
        right, top = other._outline.max(0)
        if south - degrees > top or bottom > north + degrees:
            return False
        wide = degrees / max(0.01, math.cos(math.radians(max(map(abs, (south, north))))))
        if max(east - west, right - left) > 180:  # across the antimeridian, or around a pole
            return True
        return (left - east) % 360 <= wide or (west - right) % 360 <= wide or (
            (left - west) % 360 <= east - west) or (west - left) % 360 <= right - left


def shared_ground(train: Any, val: Any) -> Optional[SharedGround]:
    """Return how the ground of a validation set lies to that of training.

    Points of the validated scenes, up to 256 along a side, are looked up in the training windows of
    every scene that shows them.

    Args:
        train: Dataset of training, also in wrappers.
        val: Dataset of validation, also in wrappers.

    Returns:
        The shares; None if one of the two has no scenes, or both are parts of one split in meters,
        which keeps its margin by construction.
    """
    ours, theirs = datasets_of_scenes(train), datasets_of_scenes(val)
    pairs = [(one, other) for other in theirs for one in ours if not _are_parts(one, other)]
    if not pairs:
        return None
    known = {id(each): [_Scene(cover, number) for number in range(len(cover.paths))]
             for each in (*ours, *theirs) for cover in [SceneCover(each)]}
    area = inside = near = farthest = 0.0
    for other in theirs:
        training = [scene for one, that in pairs if that is other for scene in known[id(one)]]
        for scene in known[id(other)]:
            distance = other.window / 2 * scene.pixel
            points = scene.points()
            far = np.full(len(points), np.inf)
            for each in training:
                far = np.minimum(far, _distances(scene, points, each, distance))
            weight = (scene.step(_POINTS) * scene.pixel) ** 2
            area += weight * len(points)
            inside += weight * float((far == 0).sum())
            near += weight * float(((far > 0) & (far < distance)).sum())
            farthest = max(farthest, distance)
    return SharedGround(inside / area, near / area, farthest) if area else None


def ground_note(train: Any, val: Any, name: str = 'val_dataloader') -> Optional[str]:
    """Return a warning where training and validation share ground, else None."""
    blocks = [{each.split.blocks for each in datasets_of_scenes(data) if each.split is not None}
              for data in (train, val)]
    differ = ''
    if all(blocks) and blocks[0] != blocks[1]:
        differ = (f' Their splits differ: {_shown(blocks[0])} in train_dataloader, '
                  f'{_shown(blocks[1])} in {name}; all but part must be equal.')
    found = shared_ground(train, val)
    if not differ and (found is None or max(found.inside, found.near) < _WORTH_SAYING):
        return None
    text = ''
    if found is not None:
        text = (f' {100 * found.inside:.1f} % of the ground of {name} lies in windows of '
                f'train_dataloader, and another {100 * found.near:.1f} % within '
                f'{found.distance:.4g} m (half a window; pixels without georeference) of one.')
    advice = '' if differ else (
        " Give both datasets split=dict(by='blocks', ..., margin=...) with their part "
        '(docs/datasets.md), or use other scenes.')
    return f'scores may be better than on new ground.{text}{differ}{advice}'


def _are_parts(one: GeoTiffDataset, other: GeoTiffDataset) -> bool:
    return (one.split is not None and other.split is not None
            and one.split.blocks == other.split.blocks and one.split.part != other.split.part
            and one.split.blocks.unit == 'meters')


def _distances(scene: _Scene, points: np.ndarray, other: _Scene, limit: float) -> np.ndarray:
    """Return how far each point of a scene is from ground of another that counts, or infinity.

    Distances are in the unit of ``limit``, and right up to it.
    """
    same = scene.path == other.path
    if same and scene.dataset.split is not None and other.dataset.split is not None \
            and scene.dataset.split.blocks == other.dataset.split.blocks \
            and scene.dataset.split.part != other.dataset.split.part:
        return np.full(len(points), np.inf)  # blocks in pixels keep the margin in each file
    reach = limit / other.pixel
    if not same:
        if scene.globe is None or other.globe is None or not scene.may_meet(other, limit):
            return np.full(len(points), np.inf)
        points = other.globe.pixels(*scene.globe.degrees(points))
    size = np.array([other.raster.width, other.raster.height])
    close = np.isfinite(points).all(1)
    close[close] &= ((points[close] > -reach) & (points[close] < size + reach)).all(1)
    found = np.full(len(points), np.inf)
    if close.any():
        step = scene.step(_POINTS) if same else other.step(_CELLS)
        far, pad = _far(other, step, reach)
        column, row = (np.floor(points[close] / step).astype(int) + pad).T
        last = far.shape[0] - 1, far.shape[1] - 1
        found[close] = far[row.clip(0, last[0]), column.clip(0, last[1])] * other.pixel
        # Cells reach over the edge of a scene by less than one, and ground beyond does not count.
        beyond = ((points[close] < 0) | (points[close] >= size)).any(1)
        found[close] = np.where(beyond, np.maximum(found[close], other.pixel / 2), found[close])
    return found


def _far(scene: _Scene, step: int, reach: float) -> Tuple[np.ndarray, int]:
    """Return the distance in pixels of each square of a scene from ground that counts.

    The squares are padded on each side by a number of them, which is returned too.
    """
    pad = math.ceil(reach / step) + 1
    cover = np.pad(scene.cover(step), pad)
    if not cover.any():
        return np.full(cover.shape, np.inf), pad
    far = cv2.distanceTransform((~cover).astype(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    return far * float(step), pad


def _shown(blocks: Any) -> str:
    texts: List[str] = sorted(str(each) for each in blocks)
    return ', '.join(texts)
