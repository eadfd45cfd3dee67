"""One larger, georeferenced scene of the demo, to make a map of: ``scene.tif`` and its truth."""
from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import rasterio
from mmseg.datasets import LoveDADataset
from rasterio.crs import CRS
from rasterio.transform import from_origin

from mapsage.geo.cog import temporary_beside

from .demo_scenes import draw_scene
from .ground_canvas import NO_DATA

SCENE, LABEL = 'scene.tif', 'scene_label.tif'

_KIND = 'river'  # the one in which every class has a few percent

# UTM zone 31N, meters; the canvas's pixel. At sea, so that nobody takes it for a real place.
_CRS, _WEST, _NORTH, _PIXEL = 32631, 500_000., 4_500_000., 0.5

_BLOCK = 256  # pixels


def write_demo_map(root: Path, seed: int, size: int) -> bool:
    """Add ``scene.tif`` and ``scene_label.tif`` to a folder, unless it has both.

    The scene is RGB uint8, tiled and deflated, UTM 31N at 0.5 m, with a corner of no data (0). The
    label is what was drawn: uint8, 0 = no data, 1..7 as in the masks of the tiles, with LoveDA's
    colors. Each file appears whole or not at all.

    Args:
        root: Folder that exists.
        seed: Seed of the scene; choose one that no tile is cut from.
        size: Side of the scene in pixels, at least 64.

    Returns:
        Whether it wrote them.
    """
    if (root / SCENE).is_file() and (root / LABEL).is_file():
        return False
    image, mask = draw_scene(seed, _KIND, size, no_data=True)
    _write(root / LABEL, mask[None], photometric='palette')
    _write(root / SCENE, image.transpose(2, 0, 1), photometric='rgb')
    return True


def _write(path: Path, bands: np.ndarray, **options: Any) -> None:
    """Write bands, uint8 (bands, H, W)."""
    profile = dict(
        options, driver='GTiff', dtype='uint8', count=bands.shape[0], height=bands.shape[1],
        width=bands.shape[2], crs=CRS.from_epsg(_CRS), nodata=NO_DATA,
        transform=from_origin(_WEST, _NORTH, _PIXEL, _PIXEL), tiled=True, blockxsize=_BLOCK,
        blockysize=_BLOCK, compress='deflate', interleave='pixel')
    with temporary_beside(path) as folder:
        with rasterio.open(str(folder / path.name), 'w', **profile) as file:
            file.write(bands)
            if len(bands) == 1:
                colors = enumerate(LoveDADataset.METAINFO['palette'], 1)
                file.write_colormap(1, {NO_DATA: (0, 0, 0), **{v: tuple(c) for v, c in colors}})
        os.replace(str(folder / path.name), str(path))
