"""The demo dataset: scenes cut into tiles in LoveDA's folders, and one scene to make a map of.

The folder appears complete or not at all. One exception: if a complete folder lacks the scene for
the map, the scene is added. The scenes are drawn by `demo_scenes.py`.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, List, Union

import cv2

from .demo_folder import write_once
from .demo_map import write_demo_map
from .demo_scenes import SCENE_KINDS, draw_scene

# Increased when the same parameters start to give other images, so that no old folder is reused.
_FORMAT = 1

# One of this many scenes has a corner without data.
_NO_DATA_EVERY = 5

# Each dataset seed owns _SEEDS scene seeds. Training scenes begin at the first one, validation
# scenes at _FIRST_VAL, and the scene for the map has the last one, which neither split reaches.
_SEEDS, _FIRST_VAL = 2000, 1000
# Side of the scene for the map, in tiles.
_MAP_TILES = 8


@dataclass(frozen=True)
class DemoParams:
    """Parameters that determine a demo dataset.

    Attributes:
        seed: Seed of the whole set, 0 .. 2**20 - 1.
        train_scenes: Number of scenes cut into training tiles.
        val_scenes: Scenes cut into validation tiles.
        scene_size: Side of a scene in pixels, a multiple of ``tile_size``.
        tile_size: Side of a tile in pixels, a multiple of 32 and at least 64.
    """

    seed: int = 0
    train_scenes: int = 24
    val_scenes: int = 8
    scene_size: int = 640
    tile_size: int = 128

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
        if self.scene_size < self.tile_size or self.scene_size % self.tile_size:
            raise ValueError(
                f'scene_size={self.scene_size} cannot be cut into whole tiles; '
                f'choose a multiple of tile_size={self.tile_size}'
            )

    def tiles(self) -> Dict[str, int]:
        """Return the number of tiles by split."""
        per_scene = (self.scene_size // self.tile_size) ** 2
        return {'train': self.train_scenes * per_scene, 'val': self.val_scenes * per_scene}


def write_demo_data(root: Union[str, Path], params: DemoParams = DemoParams()) -> List[str]:
    """Write ``img_dir/{train,val}/N.png``, ``ann_dir/{train,val}/N.png``, a scene and a marker.

    Images are RGB; masks are uint8, 0 = no data, 1..7 = background, building, road, water, barren,
    forest, agricultural: what MMSeg's ``LoveDADataset`` reads. No scene is in both splits.
    ``scene.tif`` and ``scene_label.tif`` are in neither; see :func:`write_demo_map`.

    Args:
        root: Folder to write. It must not exist, be empty, or contain this same dataset.
        params: Parameters of the dataset.

    Returns:
        What was written: 'tiles', 'scene' or both. The list is empty if a complete folder with the
        same parameters exists already.

    Raises:
        ValueError: If ``root`` contains anything else; it is then left unchanged.
    """
    root = Path(root)
    map_scene = params.seed * _SEEDS + _SEEDS - 1, params.tile_size * _MAP_TILES

    def write(folder: Path) -> None:
        for kind, split in itertools.product(('img_dir', 'ann_dir'), ('train', 'val')):
            (folder / kind / split).mkdir(parents=True)
        # NumPy and OpenCV release Python's lock. A scene needs about 200 bytes a pixel.
        with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
            scenes: List[Future[object]] = [pool.submit(write_demo_map, folder, *map_scene)]
            scenes += [
                pool.submit(_write_scene, folder, split, index, params)
                for split, count in (('train', params.train_scenes), ('val', params.val_scenes))
                for index in range(count)
            ]
            try:
                for scene in scenes:
                    scene.result()
            finally:
                # After an error or Ctrl-C, only the scenes that are being drawn are finished.
                for scene in scenes:
                    scene.cancel()

    if write_once(root, dict(asdict(params), format=_FORMAT), write):
        return ['tiles', 'scene']
    return ['scene'] if write_demo_map(root, *map_scene) else []


def _write_scene(root: Path, split: str, index: int, params: DemoParams) -> None:
    """Draw scene ``index`` of a split and write its tiles; the kinds of scenes alternate."""
    kinds = list(SCENE_KINDS)
    image, mask = draw_scene(
        params.seed * _SEEDS + (_FIRST_VAL if split == 'val' else 0) + index,
        kinds[index % len(kinds)],
        params.scene_size,
        no_data=index % _NO_DATA_EVERY == _NO_DATA_EVERY - 1,
    )
    size = params.tile_size
    corners = range(0, params.scene_size, size)
    for number, (y, x) in enumerate(itertools.product(corners, corners), index * len(corners) ** 2):
        # OpenCV writes BGR.
        for kind, plane in (('img_dir', image[..., ::-1]), ('ann_dir', mask)):
            path = str(root / kind / split / f'{number}.png')
            if not cv2.imwrite(path, plane[y : y + size, x : x + size]):
                raise OSError(f'OpenCV could not write {path}')
