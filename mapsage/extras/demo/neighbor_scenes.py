"""Six neighboring scenes with four bands of 16 bits, and polygons of what they show.

They have the difficulties of real deliveries: they overlap, differ in brightness, one is rotated,
one lies in another UTM zone, and one has a corner without data. The ground is drawn once by
`wide_ground.py`, and the scenes are cut out of it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Dict, Tuple, Union

import numpy as np
import rasterio
from mmseg.datasets import LoveDADataset
from rasterio.transform import Affine, from_origin
from rasterio.warp import Resampling, reproject, transform

from mapsage.geo import crs_of_code, write_polygons

from .demo_folder import write_once
from .wide_ground import WideGround, draw_ground

# Increased when the same parameters start to give other files.
_FORMAT = 1

# UTM zone 31N, in meters. The coordinates are at sea, because the scenes are not a real place.
_CRS, _WEST, _NORTH, _PIXEL = 32631, 500_000.0, 4_500_000.0, 0.5
# The neighboring zone. Its grid north differs by four degrees here.
_NEXT_ZONE = 32632
# Degrees by which the grid of scene _ROTATED is rotated.
_ROTATION = 8

_ROWS, _COLUMNS = 'ab', '123'
# Distance between neighbors, in sides of a scene: they overlap by a tenth.
_STEP = 0.9
_ROTATED, _REPROJECTED, _CUT = 'b2', 'a3', 'a1'


@dataclass(frozen=True)
class NeighborParams:
    """Parameters that determine the scenes.

    Attributes:
        seed: Seed of the ground, 0 .. 2**20 - 1.
        scene_size: Side of a scene in pixels, at least 128.
    """

    seed: int = 0
    scene_size: int = 1000

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**20:
            raise ValueError(f'seed={self.seed} is out of range; choose one in 0 .. {2**20 - 1}')
        if self.scene_size < 128:
            raise ValueError(
                f'scene_size={self.scene_size} is too small for scenes that overlap '
                'by a tenth; choose 128 pixels or more'
            )


def write_neighbor_scenes(
    root: Union[str, Path], params: NeighborParams = NeighborParams()
) -> bool:
    """Write ``scenes/{a,b}{1,2,3}.tif``, ``labels.gpkg`` and ``truth.tif``.

    Row a lies in the north, column 1 in the west; neighbors overlap by a tenth of their side. The
    scenes have red, green, blue and near infrared, uint16, about 0 to 8,200, no data 0, and 0.5 m a
    pixel. Each scene has a slightly different gain, and its own noise. They lie in UTM zone 31N;
    the grid of b2 is rotated by 8 degrees, a3 is in zone 32N, and a1 has no data in its outer
    corner.

    The polygons cover the ground, with LoveDA's seven classes in ``class_name``. They outline the
    classes of ``truth.tif``, uint8 0..6.

    Args:
        root: Folder to write. It must not exist, be empty, or contain these same scenes.
        params: Parameters of the scenes.

    Returns:
        Whether the folder was written; False if it is complete already.

    Raises:
        ValueError: If ``root`` contains anything else; it is then left unchanged.
    """
    marker = dict(asdict(params), kind='neighboring scenes', format=_FORMAT)
    return write_once(Path(root), marker, lambda folder: _write(folder, params))


def _write(folder: Path, params: NeighborParams) -> None:
    size = params.scene_size
    ground = draw_ground(
        params.seed,
        round(size * (1 + _STEP * (len(_COLUMNS) - 1))),
        round(size * (1 + _STEP * (len(_ROWS) - 1))),
    )
    to_meters = from_origin(_WEST, _NORTH, _PIXEL, _PIXEL)
    (folder / 'scenes').mkdir()
    for row, letter in enumerate(_ROWS):
        for column, digit in enumerate(_COLUMNS):
            name = letter + digit
            center = to_meters * ((column * _STEP + 0.5) * size, (row * _STEP + 0.5) * size)
            rng = np.random.RandomState(params.seed * 8 + 3 * row + column)
            _write_scene(folder / 'scenes' / f'{name}.tif', name, size, ground, center, rng)
    meta = LoveDADataset.METAINFO
    _write_classes(folder / 'truth.tif', ground.mask - 1)
    write_polygons(
        folder / 'truth.tif', folder / 'labels.gpkg', meta['classes'], palette=meta['palette']
    )


def _write_scene(
    path: Path,
    name: str,
    size: int,
    ground: WideGround,
    center: Tuple[float, float],
    rng: np.random.RandomState,
) -> None:
    """Cut one scene out of the ground; ``center`` is in meters of UTM zone 31N."""
    scene_crs = crs_of_code(_CRS)
    crs = crs_of_code(_NEXT_ZONE) if name == _REPROJECTED else scene_crs
    (x,), (y,) = transform(scene_crs, crs, [center[0]], [center[1]])
    grid = (
        Affine.translation(x, y)
        * Affine.rotation(_ROTATION if name == _ROTATED else 0)
        * Affine.scale(_PIXEL, -_PIXEL)
        * Affine.translation(-size / 2, -size / 2)
    )
    values = np.zeros((len(ground.bands), size, size), np.float32)
    reproject(
        ground.bands,
        values,
        src_transform=from_origin(_WEST, _NORTH, _PIXEL, _PIXEL),
        src_crs=scene_crs,
        dst_transform=grid,
        dst_crs=crs,
        src_nodata=0,
        dst_nodata=0,
        resampling=Resampling.bilinear,
    )
    valid = values[0] > 0
    if name == _CUT:
        rows, columns = np.mgrid[:size, :size]
        valid &= rows + 1.5 * columns > 0.3 * size
    gain = 32 * (1 + 0.03 * rng.randn(len(values), 1, 1))
    noise = rng.randn(*values.shape).astype(np.float32)
    values = (values * gain + 20 * noise).round().clip(1, 65535) * valid
    profile: Dict[str, object] = dict(
        driver='GTiff',
        dtype='uint16',
        count=len(values),
        height=size,
        width=size,
        crs=crs,
        transform=grid,
        nodata=0,
        tiled=True,
        blockxsize=256,
        blockysize=256,
        compress='deflate',
        predictor=2,
        interleave='pixel',
        photometric='rgb',
        alpha='no',
    )
    with rasterio.open(str(path), 'w', **profile) as file:
        file.write(values.astype(np.uint16))
        for band, color in enumerate(('red', 'green', 'blue', 'near infrared'), 1):
            file.set_band_description(band, color)


def _write_classes(path: Path, classes: np.ndarray) -> None:
    colors = enumerate(LoveDADataset.METAINFO['palette'])
    profile: Dict[str, object] = dict(
        driver='GTiff',
        dtype='uint8',
        count=1,
        height=classes.shape[0],
        width=classes.shape[1],
        crs=crs_of_code(_CRS),
        transform=from_origin(_WEST, _NORTH, _PIXEL, _PIXEL),
        nodata=255,
        tiled=True,
        blockxsize=256,
        blockysize=256,
        compress='deflate',
        photometric='palette',
    )
    with rasterio.open(str(path), 'w', **profile) as file:
        file.write(classes, 1)
        file.write_colormap(1, {value: tuple(color) for value, color in colors})
