"""The size of a pixel that an exported file states, from any dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from geo_scenes import DEGREES, PIXELS, UTM, write_raster
from geotiff_data import build_dataset, write_scene
from mmengine.dataset import ConcatDataset, RepeatDataset
from mmseg.datasets import BaseSegDataset
from rasterio.crs import CRS
from rasterio.transform import from_origin
from torch.utils.data import Subset

from mapsage.extras.export.loading import pixel_meters

TEN_METERS = dict(crs=CRS.from_epsg(32650), transform=from_origin(500000.0, 4100000.0, 10, 10))
FEET = dict(crs=CRS.from_epsg(2263), transform=from_origin(980000.0, 200000.0, 1, 1))


def images(folder: Path) -> Any:
    return BaseSegDataset(
        data_root=str(folder), data_prefix=dict(img_path=''), pipeline=[], img_suffix='.tif'
    )


@pytest.mark.parametrize(
    'place, meters',
    [
        (TEN_METERS, 10),
        (UTM, 0.5),
        (FEET, 0.3048),
        (PIXELS, None),
        (DEGREES, pytest.approx(21.91, abs=0.01)),
    ],
    ids=['10 m', '0.5 m', 'feet', 'pixels', 'degrees'],
)
def test_windows_of_scenes(place: Any, meters: Any, tmp_path: Path) -> None:
    write_scene(tmp_path, place=place)
    found = pixel_meters(build_dataset(tmp_path))
    assert found == (pytest.approx(meters, rel=1e-3) if isinstance(meters, float) else meters)


def test_datasets_in_wrappers(tmp_path: Path) -> None:
    write_scene(tmp_path, place=TEN_METERS)
    scenes = build_dataset(tmp_path)
    for dataset in (
        RepeatDataset(scenes, 2),
        ConcatDataset([scenes, scenes]),
        Subset(RepeatDataset(scenes, 2), [3]),
    ):
        assert pixel_meters(dataset) == 10


def test_images(tmp_path: Path) -> None:
    write_raster(tmp_path / 'a.tif', np.ones((3, 8, 8), 'uint8'), TEN_METERS)
    assert pixel_meters(images(tmp_path)) == 10
    cv2.imwrite(str(tmp_path / 'a.tif'), np.ones((8, 8, 3), 'uint8'))  # without a place
    assert pixel_meters(images(tmp_path)) is None
    (tmp_path / 'a.tif').write_bytes(b'a format of its own')
    assert pixel_meters(images(tmp_path)) is None


def test_a_dataset_that_names_no_file() -> None:
    assert pixel_meters([1, 2]) is None
