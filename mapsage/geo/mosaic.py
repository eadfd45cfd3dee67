"""Several scenes of one area as one raster, on a common grid of pixels.

`Mosaic` has the interface of `Raster`, so a program need not know whether it reads one scene or
many. Nothing is copied or built beforehand: a window is composed of the scenes it meets when it is
read. Scenes off the grid are interpolated (`grid_position.py`).

Shapes:
    Box          (column, row, width, height) in pixels of the mosaic
    values       (bands, height, width)
    valid        (height, width) bool
"""

from __future__ import annotations

import math
from collections import OrderedDict
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple

import affine
import numpy as np

from mapsage.base.console import shorten_list

from .coordinates import short_crs
from .errors import Box, GeoError, PathName
from .grid_position import (
    BLOCK,
    RasterOnGrid,
    box_on_grid,
    intersection,
    is_north_up,
    read_on_grid,
    slices_in,
)
from .pool import most_open
from .raster import Raster
from .reference_systems import same_crs
from .scene_facts import STORED, check_one_unit, facts_of, open_scenes

# Smallest share of a mosaic that its scenes must cover; below, they do not belong together.
_SPARSEST = 0.005


class Mosaic(Raster):
    """Neighboring or overlapping scenes, read as one raster.

    The grid of pixels is taken from the first scene that is north up, and extended to all scenes.
    If all scenes are rotated, the grid is north up in the CRS of the first scene, with pixels of
    the same size. Scenes on this grid, to within a twentieth of a pixel, are read without change.
    The others (rotated, in another CRS, with another pixel size, or shifted by a fraction of a
    pixel) are interpolated bilinearly between their valid pixels; neighbors that follow each other
    in ``paths`` and share a grid are interpolated as one scene, without a seam. A pixel has data if
    its center lies in a valid pixel of any scene; if scenes overlap, the first scene with data
    counts.

    A mosaic is used like a ``Raster``. Memory does not grow with the number of scenes.

    Args:
        paths: Paths of files that GDAL reads, the most important first.
        bands: Band numbers of each scene, as in ``Raster``.
        names, units, strict: As in ``open_scene``; the default of ``names`` are the first scene's.

    Attributes:
        reordered: Whether a scene has its bands in another order, by their names.
        scenes: The scenes, opened.
        resampled: Path of each interpolated scene, with the reason.

    Raises:
        GeoError: If a scene cannot be opened or has no georeference, if some have a CRS and others
            have none, if their bands, data types or units differ, or if they are so far apart that nearly
            all of the mosaic would be empty.
    """

    def __init__(
        self,
        paths: Sequence[PathName],
        bands: Optional[Sequence[int]] = None,
        names: Sequence[str] = (),
        units: str = STORED,
        strict: bool = False,
    ) -> None:
        self.scenes = list(open_scenes(paths, bands, names, units, strict=strict))
        check_one_unit(map(facts_of, self.scenes))
        self._join(self.scenes)

    def _join(self, rasters: Sequence[Raster]) -> None:
        first = rasters[0]
        for raster in rasters:
            _check_alike(raster, first)
        self.path = f'the mosaic of {len(rasters)} scene(s)'
        self.bands, self.dtype = first.bands, first.dtype
        self.nodata, self.may_have_gaps = None, True
        self.is_remote = any(raster.is_remote for raster in rasters)
        self.is_georeferenced, self.blocks = first.crs is not None, (BLOCK, BLOCK)
        base = next((raster for raster in rasters if is_north_up(raster.transform)), None)
        self._grid_source = first.path if base is None else base.path
        self.crs = (base or first).crs
        transform = _north_up(first.transform) if base is None else base.transform
        middle = 0.0 if base is None else base.width / 2
        boxes = [box_on_grid(raster, self.crs, transform, middle=middle) for raster in rasters]
        left, top = (min(box[side] for box in boxes) for side in (0, 1))
        self.width = max(box[0] + box[2] for box in boxes) - left
        self.height = max(box[1] + box[3] for box in boxes) - top
        self.transform = transform * affine.Affine.translation(left, top)
        covered = sum(raster.width * raster.height for raster in rasters)
        if covered < _SPARSEST * self.width * self.height:
            raise GeoError(
                f'a mosaic of these {len(rasters)} scenes has {self.width:,} x '
                f'{self.height:,} pixels, nearly all of them empty: the scenes lie far '
                f'apart. Make one mosaic of each group of neighbors.'
            )
        members = [
            RasterOnGrid(
                raster,
                (x - left, y - top, width, height),
                self.crs,
                self.transform,
                (self.width, self.height),
            )
            for raster, (x, y, width, height) in zip(rasters, boxes)
        ]
        self.resampled = [
            (member.raster.path, member.difference) for member in members if member.difference
        ]
        self._members = []
        for group in _neighbors(members):
            if len(group) > 1:
                joined = Mosaic.__new__(Mosaic)
                joined._join([member.raster for member in group])
                box = box_on_grid(joined, self.crs, self.transform, middle=middle - left)
                group = [
                    RasterOnGrid(joined, box, self.crs, self.transform, (self.width, self.height))
                ]
            self._members += group
        # Numbers of the scenes with open files, from the least to the most recently used one.
        self._recent: OrderedDict = OrderedDict()

    def describe(self) -> str:
        """Return one line on size, grid, and which scenes are interpolated."""
        grid = 'pixels' if self.crs is None else short_crs(self.crs)
        members = [f'{path} ({difference})' for path, difference in self.resampled]
        listed = shorten_list(members, 4)
        return (
            f'{self.path}: {self.width}x{self.height} pixels on the grid of '
            f'{self._grid_source} ({grid})' + f'; interpolated onto it: {listed}' * bool(listed)
        )

    def read(self, column: int, row: int, width: int, height: int) -> Tuple[np.ndarray, np.ndarray]:
        """Read a window, as ``Raster.read`` does.

        Raises:
            RasterBlockError: If pixels of the window cannot be decoded in the scene that counts
                there. The error lists blocks of the mosaic, squares of 512 pixels.
        """
        return read_on_grid((column, row, width, height), self.width, self.height, self._compose)

    def read_reduced(
        self, factor: int, row: int = 0, height: Optional[int] = None
    ) -> Tuple[np.ndarray, np.ndarray]:
        """Read every ``factor``-th pixel of the rows from ``row`` on, as ``Raster`` does."""
        height = self.height - row if height is None else height
        strips = [self.read(0, first, self.width, 1) for first in range(row, row + height, factor)]
        return (
            np.concatenate([values[:, :, ::factor] for values, _ in strips], 1),
            np.concatenate([valid[:, ::factor] for _, valid in strips]),
        )

    def images(self) -> Iterator[Tuple[str, Raster]]:
        """Yield the scenes, as ``Raster`` does."""
        for scene in self.scenes:
            yield from scene.images()

    def facts(self) -> Dict[str, Any]:
        """Return the grids of the scenes and what makes their pixels invalid, as JSON values."""
        members = [member.raster.facts() for member in self._members]
        names = dict.fromkeys(name for facts in members for name in facts)
        return {name: [facts.get(name) for facts in members] for name in names}

    def files(self) -> List[str]:
        """Return the paths of all files that the pixels come from."""
        return [path for member in self._members for path in member.raster.files()]

    def close(self) -> None:
        """Close the files of all scenes in this process; a later read opens them again."""
        for member in self._members:
            member.raster.close()

    def __getstate__(self) -> Dict[str, Any]:
        return dict(self.__dict__, _recent=OrderedDict())

    def _compose(self, box: Box) -> Tuple[np.ndarray, np.ndarray]:
        """Return values and valid pixels of a window; later scenes fill gaps of earlier ones."""
        values = np.zeros((len(self.bands), box[3], box[2]), self.dtype)
        valid = np.zeros((box[3], box[2]), bool)
        for number, member in enumerate(self._members):
            shared = intersection(box, member.box)
            if shared is None:
                continue
            area = slices_in(shared, box)
            if valid[area].all():
                continue
            scene_values, is_new = member.read(shared)
            self._limit_open_files(number)
            np.logical_and(is_new, ~valid[area], out=is_new)
            np.copyto(values[(slice(None), *area)], scene_values, where=is_new)
            valid[area] |= is_new
        return values, valid

    def _limit_open_files(self, number: int) -> None:
        """Note that scene ``number`` was read, and close the least recently used scenes."""
        self._recent[number] = None
        self._recent.move_to_end(number)
        while len(self._recent) > most_open():
            self._members[self._recent.popitem(last=False)[0]].raster.close()


def _neighbors(members: Sequence[RasterOnGrid]) -> List[List[RasterOnGrid]]:
    """Return the members in their order, those in one list that are interpolated as one scene.

    These follow each other, have one grid, and touch the rectangle around those before them.
    """
    groups: List[List[RasterOnGrid]] = []
    around: Optional[Box] = None  # in pixels of the first of the last group
    for member in members:
        box = None if around is None else _box_beside(groups[-1][0], member)
        if (
            around is None
            or box is None
            or intersection(box, (around[0] - 1, around[1] - 1, around[2] + 2, around[3] + 2))
            is None
        ):
            groups.append([member])
            around = (0, 0, member.raster.width, member.raster.height)
            continue
        groups[-1].append(member)
        left, top = min(around[0], box[0]), min(around[1], box[1])
        around = (
            left,
            top,
            max(around[0] + around[2], box[0] + box[2]) - left,
            max(around[1] + around[3], box[1] + box[3]) - top,
        )
    return groups


def _box_beside(first: RasterOnGrid, second: RasterOnGrid) -> Optional[Box]:
    """Return the extent of an interpolated scene in pixels of another; None if grids differ."""
    left, right = first.raster, second.raster
    if not (
        first.is_off_grid
        and second.is_off_grid
        and is_north_up(left.transform)
        and is_north_up(right.transform)
        and same_crs(left.crs, right.crs)
    ):
        return None
    box = box_on_grid(right, left.crs, left.transform, middle=left.width / 2)
    return None if RasterOnGrid(right, box, left.crs, left.transform).difference else box


def _check_alike(raster: Raster, first: Raster) -> None:
    """Raise an error if a scene cannot be in one mosaic with the first scene."""
    if raster.transform == affine.identity:
        raise GeoError(
            f'{raster.path} {raster.georeference_gap}, so its position in the mosaic is '
            f'unknown; georeference it, or leave it out.'
        )
    if (raster.crs is None) != (first.crs is None):
        bare, referenced = (raster, first) if raster.crs is None else (first, raster)
        raise GeoError(
            f'{bare.path} has no CRS and {referenced.path} has '
            f'{short_crs(referenced.crs)}; set it with gdal_edit.py -a_srs.'
        )
    if (len(raster.bands), raster.dtype) != (len(first.bands), first.dtype):
        raise GeoError(
            f'{raster.path} has {len(raster.bands)} band(s) of {raster.dtype}, and '
            f'{first.path} {len(first.bands)} of {first.dtype}; the scenes of a mosaic '
            f'need the same. Choose bands, or convert with gdal_translate -ot.'
        )


def _north_up(transform: affine.Affine) -> affine.Affine:
    """Return a transform that is north up, with square pixels of the same area and the same origin."""
    side = math.sqrt(abs(transform.determinant))
    return affine.Affine(side, 0, transform.c, 0, -side, transform.f)
