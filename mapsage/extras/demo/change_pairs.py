"""The demo of change: pairs of tiles in Open-CD's folders, and a pair of scenes to make a map of.

The ground is drawn by `change_ground.py`. No ground is in two of the splits, and the scenes of the
map are in none.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, Tuple, Union

import cv2
import numpy as np
import rasterio
from rasterio.transform import from_origin

from mapsage.geo import crs_of_code

from .change_ground import CHANGE_KINDS, ChangedGround, draw_change
from .demo_folder import write_once

# Increased when the same parameters start to give other files.
_FORMAT = 1
# Seeds of a dataset: training scenes from the first one, validation scenes from _FIRST_VAL, and the
# pair for the map has the last one.
_SEEDS, _FIRST_VAL = 2000, 1000
# UTM zone 31N, upper left corner and side of a pixel in meters. The place is at sea.
_CRS, _WEST, _NORTH, _PIXEL = 32631, 500_000.0, 4_500_000.0, 0.5
# Names of the scenes for the map carry their dates.
BEFORE, AFTER, TRUTH = 'before_20190614.tif', 'after_20230702.tif', 'truth.tif'


@dataclass(frozen=True)
class ChangeParams:
    """Parameters that determine the demo of change.

    Attributes:
        seed: Seed of the whole set, 0 .. 2**20 - 1.
        train_scenes, val_scenes: Numbers of scenes that are cut into tiles, 1 .. 999.
        scene_size: Side of a scene in pixels, a multiple of ``tile_size``, at least 128.
        tile_size: Side of a tile in pixels, a multiple of 32 and at least 64.
        pair_size: Side of the pair of scenes for the map in pixels, at least 128.
    """

    seed: int = 0
    train_scenes: int = 24
    val_scenes: int = 8
    scene_size: int = 640
    tile_size: int = 128
    pair_size: int = 1024

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**20:
            raise ValueError(f'seed={self.seed} is out of range; choose one in 0 .. {2**20 - 1}')
        for name, count in (('train_scenes', self.train_scenes), ('val_scenes', self.val_scenes)):
            if not 1 <= count < 1000:
                raise ValueError(f'{name}={count} is out of range; choose 1 .. 999')
        if self.tile_size < 64 or self.tile_size % 32:
            raise ValueError(
                f'tile_size={self.tile_size} does not suit the backbones; '
                'choose a multiple of 32, at least 64'
            )
        if self.scene_size < 128 or self.scene_size % self.tile_size:
            raise ValueError(
                f'scene_size={self.scene_size} cannot be cut into whole tiles; '
                f'choose a multiple of tile_size={self.tile_size}, at least 128'
            )
        if self.pair_size < 128:
            raise ValueError(f'pair_size={self.pair_size} is too small; choose 128 or more')

    def tiles(self) -> Dict[str, int]:
        """Return the number of pairs of tiles by split."""
        per_scene = (self.scene_size // self.tile_size) ** 2
        return {'train': self.train_scenes * per_scene, 'val': self.val_scenes * per_scene}


def write_change_pairs(root: Union[str, Path], params: ChangeParams = ChangeParams()) -> bool:
    """Write ``{train,val}/{A,B,label,label_A,label_B}/N.png`` and a pair of GeoTIFFs.

    ``A`` and ``B`` are the pictures before and after, RGB. ``label`` is 255 where the class has
    changed and 0 elsewhere. ``label_A`` and ``label_B`` hold the classes before and after, 1..7 as
    in the tiles of ``write_demo_data``, and 0 where nothing has changed: the folders of LEVIR-CD
    and SECOND, as Open-CD reads them.

    ``pair/before_20190614.tif`` and ``pair/after_20230702.tif`` have a CRS and 0.5 m a pixel;
    ``pair/truth.tif`` is 1 where the class has changed.

    Args:
        root: Folder to write. It must not exist, be empty, or contain this same dataset.
        params: Parameters of the dataset.

    Returns:
        Whether the folder was written; False if it is complete already.

    Raises:
        ValueError: If ``root`` contains anything else; it is then left unchanged.
    """
    marker = dict(asdict(params), kind='pairs of two dates', format=_FORMAT)
    return write_once(Path(root), marker, lambda folder: _write(folder, params))


def _write(folder: Path, params: ChangeParams) -> None:
    for split, first, count in (
        ('train', 0, params.train_scenes),
        ('val', _FIRST_VAL, params.val_scenes),
    ):
        number = 0
        for index in range(count):
            ground = draw_change(
                params.seed * _SEEDS % 2**31 + first + index,
                CHANGE_KINDS[index % len(CHANGE_KINDS)],
                params.scene_size,
            )
            number = _write_tiles(folder / split, ground, params.tile_size, number)
    _write_pair(
        folder / 'pair',
        draw_change(params.seed * _SEEDS % 2**31 + _SEEDS - 1, 'river', params.pair_size),
    )


def labels_of(ground: ChangedGround) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the labels of change (0 and 255) and the classes before and after (0: unchanged)."""
    changed = ground.mask_before != ground.mask_after
    return (
        np.where(changed, 255, 0).astype(np.uint8),
        ground.mask_before * changed,
        ground.mask_after * changed,
    )


def _write_tiles(folder: Path, ground: ChangedGround, size: int, number: int) -> int:
    """Cut a scene into tiles named by ``number`` and the numbers after it; return the next one."""
    change, before, after = labels_of(ground)
    # OpenCV writes BGR.
    planes: Dict[str, np.ndarray] = dict(
        A=ground.before[..., ::-1],
        B=ground.after[..., ::-1],
        label=change,
        label_A=before,
        label_B=after,
    )
    for name in planes:
        (folder / name).mkdir(parents=True, exist_ok=True)
    for row in range(0, len(change), size):
        for column in range(0, len(change), size):
            for name, plane in planes.items():
                path = str(folder / name / f'{number}.png')
                if not cv2.imwrite(path, plane[row : row + size, column : column + size]):
                    raise OSError(f'OpenCV could not write {path}')
            number += 1
    return number


def _write_pair(folder: Path, ground: ChangedGround) -> None:
    folder.mkdir()
    changed = (ground.mask_before != ground.mask_after).astype(np.uint8)
    for name, bands in (
        (BEFORE, ground.before.transpose(2, 0, 1)),
        (AFTER, ground.after.transpose(2, 0, 1)),
        (TRUTH, changed[None]),
    ):
        profile: Dict[str, object] = dict(
            driver='GTiff',
            dtype='uint8',
            count=len(bands),
            height=bands.shape[1],
            width=bands.shape[2],
            crs=crs_of_code(_CRS),
            tiled=True,
            blockxsize=256,
            blockysize=256,
            compress='deflate',
            transform=from_origin(_WEST, _NORTH, _PIXEL, _PIXEL),
            nodata=0 if len(bands) == 3 else None,
        )
        with rasterio.open(str(folder / name), 'w', **profile) as file:
            file.write(bands)
