"""A larger georeferenced scene of the demo, ``scene.tif``, to make a map of, and its labels.

The tiles of the demo have no coordinates; this scene does, so that the map opens in a GIS. Its
coordinates are at sea, because the scene is not a real place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Dict

import numpy as np
import rasterio
from mmseg.datasets import LoveDADataset
from rasterio.transform import from_origin

from mapsage.geo import crs_of_code
from mapsage.geo.cog import temporary_beside

from .demo_scenes import draw_scene
from .ground_canvas import NO_DATA

SCENE, LABEL = 'scene.tif', 'scene_label.tif'

# The kind of scene in which every class covers a few percent.
_KIND = 'river'

# UTM zone 31N: upper left corner and side of a pixel in meters.
_CRS, _WEST, _NORTH, _PIXEL = 32631, 500_000.0, 4_500_000.0, 0.5

# Side of a block of the GeoTIFF in pixels.
_BLOCK = 256


def write_demo_map(root: Path, seed: int, size: int) -> bool:
    """Add ``scene.tif`` and ``scene_label.tif`` to a folder, unless it has both.

    The scene is RGB uint8, tiled and deflated, in UTM 31N at 0.5 m, with a corner of no data (0).
    The label holds the classes that were drawn: uint8, 0 = no data, 1..7 as in the masks of the
    tiles, with LoveDA's colors. Each file appears complete or not at all.

    Args:
        root: Folder to write into, which must exist.
        seed: Seed of the scene. The scenes cut into tiles should have other seeds.
        size: Side of the scene in pixels, at least 64.

    Returns:
        Whether the files were written.
    """
    if (root / SCENE).is_file() and (root / LABEL).is_file():
        return False
    image, mask = draw_scene(seed, _KIND, size, no_data=True)
    _write(root / LABEL, mask[None], photometric='palette')
    _write(root / SCENE, image.transpose(2, 0, 1), photometric='rgb')
    return True


def _write(path: Path, bands: np.ndarray, photometric: str) -> None:
    """Write bands, uint8 (bands, H, W), as a GeoTIFF; a single band gets LoveDA's colors."""
    profile: Dict[str, object] = dict(
        driver='GTiff',
        dtype='uint8',
        count=bands.shape[0],
        height=bands.shape[1],
        width=bands.shape[2],
        crs=crs_of_code(_CRS),
        nodata=NO_DATA,
        photometric=photometric,
        transform=from_origin(_WEST, _NORTH, _PIXEL, _PIXEL),
        tiled=True,
        blockxsize=_BLOCK,
        blockysize=_BLOCK,
        compress='deflate',
        interleave='pixel',
    )
    with temporary_beside(path) as folder:
        with rasterio.open(str(folder / path.name), 'w', **profile) as file:
            file.write(bands)
            if len(bands) == 1:
                colors = enumerate(LoveDADataset.METAINFO['palette'], 1)
                file.write_colormap(1, {NO_DATA: (0, 0, 0), **{v: tuple(c) for v, c in colors}})
        os.replace(str(folder / path.name), str(path))
