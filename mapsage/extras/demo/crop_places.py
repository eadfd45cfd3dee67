"""Places with fields of crops that differ by their season: two sensors, six dates, clouds.

At any single date a crop is green or bare, so one date tells two groups apart; which crop it is
shows in the order of its green dates. Sowing dates, brightness and soil differ from field to field,
and a fifth of every optical image is clouded. Everything is drawn from a seed.
"""

from __future__ import annotations

import datetime
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Dict, Tuple, Union

import cv2
import numpy as np
import rasterio
from rasterio.transform import from_origin

from mapsage.geo import crs_of_code

from .demo_folder import write_once

# Increased when the same parameters start to give other files.
_FORMAT = 1

CROP_CLASSES = ('fallow', 'winter wheat', 'maize', 'two crops', 'meadow', 'rapeseed')
CROP_PALETTE = (
    (170, 140, 110),
    (225, 190, 60),
    (240, 230, 40),
    (190, 90, 170),
    (60, 150, 60),
    (150, 200, 40),
)
# Whether a crop is green at the six dates; no column tells more than two groups apart.
_GREEN = np.array(
    [
        [0, 0, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 0, 1, 1, 0],
        [0, 1, 0, 0, 1, 0],
        [1, 1, 1, 1, 1, 1],
        [1, 1, 0, 0, 0, 1],
    ],
    np.float32,
)
_DATES = tuple(
    datetime.date(2024, month, day)
    for month, day in ((2, 15), (4, 10), (5, 25), (7, 10), (8, 30), (10, 20))
)

# Reflectances times 10,000 of green, red, near infrared and shortwave infrared.
_SOIL = np.array([1100, 1500, 2300, 2900], np.float32)
_PLANTS = np.array([800, 450, 4300, 1700], np.float32)
_CLOUD = np.array([7500, 7400, 7800, 5200], np.float32)
# Backscatter in dB of vv and vh, for bare soil and plants.
_BARE_DB, _PLANT_DB = np.array([-11.0, -19.5], np.float32), np.array([-9.5, -15.0], np.float32)

_CRS, _WEST, _NORTH, _PIXEL = 32633, 400_000.0, 5_400_000.0, 10.0
# Classes of the cloud mask, as in Sentinel-2's SCL: plants, soil, cloud.
_SCL_PLANTS, _SCL_SOIL, _SCL_CLOUD = 4, 5, 9
_FIELD_PIXELS = 14
_CLOUDED = 0.2


@dataclass(frozen=True)
class CropParams:
    """Parameters that determine the places.

    Attributes:
        seed: Seed, 0 .. 2**20 - 1.
        train_places: Number of places for training.
        val_places: Number of places for validation.
        size: Side of a place in pixels of 10 m, even.
    """

    seed: int = 0
    train_places: int = 12
    val_places: int = 4
    size: int = 128

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**20:
            raise ValueError(f'seed={self.seed} is out of range; choose one in 0 .. {2**20 - 1}')
        if self.size < 32 or self.size % 2 or min(self.train_places, self.val_places) < 1:
            raise ValueError(
                f'size={self.size}, train_places={self.train_places} and val_places='
                f'{self.val_places}, expected an even size of 32 or more, and a place '
                'of each kind'
            )


def write_crop_places(root: Union[str, Path], params: CropParams = CropParams()) -> bool:
    """Write ``{train,val}/{s2,scl,s1,labels}/`` with the images and labels of the places.

    ``s2/PLACE_DATE.tif``: green, red, near and shortwave infrared, uint16, 10 m. ``scl/``: classes
    of these images at 20 m; 9 is a cloud. ``s1/``: vv and vh in dB, float32, 20 m, without clouds.
    ``labels/PLACE.tif``: uint8 0..5, the crops of ``CROP_CLASSES``. The dates of a place lie up to
    six days off those of another.

    Args:
        root: Folder to write. It must not exist, be empty, or contain these same places.
        params: Parameters of the places.

    Returns:
        Whether the folder was written; False if it is complete already.

    Raises:
        ValueError: If ``root`` contains anything else; it is then left unchanged.
    """
    marker = dict(asdict(params), kind='places with crops', format=_FORMAT)
    return write_once(Path(root), marker, lambda folder: _write(folder, params))


def _write(folder: Path, params: CropParams) -> None:
    counts = dict(train=params.train_places, val=params.val_places)
    number = 0
    for split, count in counts.items():
        for kind in ('s2', 'scl', 's1', 'labels'):
            (folder / split / kind).mkdir(parents=True)
        for index in range(count):
            random = np.random.RandomState(params.seed * 4096 + number)
            _write_place(folder / split, f'{split}{index}', number, params.size, random)
            number += 1


def _write_place(
    folder: Path, name: str, number: int, size: int, random: np.random.RandomState
) -> None:
    fields = _draw_fields(size, random)
    count = int(fields.max()) + 1
    crops = random.randint(0, len(CROP_CLASSES), count)
    # Fields differ in how much of the ground plants cover, in their soil, and in their season.
    cover = random.uniform(0.65, 1.0, count).astype(np.float32)
    rest = random.uniform(0.0, 0.25, count).astype(np.float32)
    soil = random.normal(1.0, 0.12, count).astype(np.float32)
    late = random.rand(count) < 0.1
    north = _NORTH - number * 2 * size * _PIXEL
    _write_raster(
        folder / f'labels/{name}.tif', crops[fields][None].astype(np.uint8), north, _PIXEL
    )
    for date, nominal in enumerate(_DATES):
        day = nominal + datetime.timedelta(days=int(random.randint(-6, 7)))
        text = f'{day:%Y%m%d}'
        # A late field is where its crop was at the date before.
        green = np.where(late, _GREEN[crops, max(date - 1, 0)], _GREEN[crops, date])
        share = (rest + (cover - rest) * green)[fields]
        optical = _SOIL[:, None, None] * soil[fields] * (1 - share) + _PLANTS[:, None, None] * share
        optical *= random.normal(1.0, 0.04, (len(_SOIL), 1, 1))
        optical += random.normal(0.0, 130.0, optical.shape)
        clouds = _draw_clouds(size, random)
        optical = np.where(
            clouds, _CLOUD[:, None, None] + random.normal(0.0, 500.0, optical.shape), optical
        )
        _write_raster(
            folder / f's2/{name}_{text}.tif',
            optical.clip(1, 10000).round().astype(np.uint16),
            north,
            _PIXEL,
            ('B03', 'B04', 'B08', 'B11'),
        )
        scl = np.where(share > 0.4, _SCL_PLANTS, _SCL_SOIL)[::2, ::2]
        scl = np.where(clouds.reshape(size // 2, 2, size // 2, 2).any((1, 3)), _SCL_CLOUD, scl)
        _write_raster(
            folder / f'scl/{name}_{text}.tif', scl[None].astype(np.uint8), north, 2 * _PIXEL
        )
        coarse = share.reshape(size // 2, 2, size // 2, 2).mean((1, 3))
        radar = _BARE_DB[:, None, None] * (1 - coarse) + _PLANT_DB[:, None, None] * coarse
        radar += random.normal(0.0, 1.8, radar.shape)
        _write_raster(
            folder / f's1/{name}_{text}.tif',
            radar.astype(np.float32),
            north,
            2 * _PIXEL,
            ('vv', 'vh'),
        )


def _draw_fields(size: int, random: np.random.RandomState) -> np.ndarray:
    """Return the number of the field of each pixel: the nearest of scattered points."""
    count = max(4, (size // _FIELD_PIXELS) ** 2)
    points = random.uniform(0, size, (count, 2))
    rows, columns = np.mgrid[:size, :size] + 0.5
    distances = (rows[..., None] - points[:, 0]) ** 2 + (columns[..., None] - points[:, 1]) ** 2
    fields: np.ndarray = distances.argmin(-1)
    return fields


def _draw_clouds(size: int, random: np.random.RandomState) -> np.ndarray:
    """Return the clouded pixels, about a fifth of them in smooth shapes, bool (size, size)."""
    noise = cv2.GaussianBlur(random.normal(size=(size, size)), (0, 0), size / 12)
    clouds: np.ndarray = noise > np.quantile(noise, 1 - _CLOUDED)
    return clouds


def _write_raster(
    path: Path, values: np.ndarray, north: float, pixel: float, names: Tuple[str, ...] = ()
) -> None:
    profile: Dict[str, Any] = dict(
        driver='GTiff',
        dtype=values.dtype,
        count=len(values),
        height=values.shape[1],
        width=values.shape[2],
        crs=crs_of_code(_CRS),
        transform=from_origin(_WEST, north, pixel, pixel),
        tiled=True,
        blockxsize=128,
        blockysize=128,
        compress='deflate',
    )
    with rasterio.open(str(path), 'w', **profile) as file:
        file.write(values)
        for band, name in enumerate(names, 1):
            file.set_band_description(band, name)
