"""Encoders whose vectors are known, a config for them, and files of embeddings of other tools."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Optional, Tuple

import numpy as np
import torch
import torch.nn.functional as functional
from geo_scenes import UTM
from mmengine.model import BaseModule
from mmseg.registry import MODELS
from rasterio.transform import Affine
from torch import nn

from mapsage.extras.embeddings import embed as command
from mapsage.geo.gdal_files import open_file

STRIDE = 4

CONFIG = """
custom_imports = dict(imports=['mapsage', 'embedding_runs'])
default_scope = 'mmseg'
crop_size = (64, 64)
test_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
test_dataloader = dict(dataset=dict(type='BaseSegDataset', pipeline=test_pipeline))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[0., 0., 0.], std=[255., 255., 255.], bgr_to_rgb=True),
    backbone=dict(type={backbone!r}),
    decode_head=dict(
        type='FCNHead', in_channels=3, in_index=0, channels=3, num_convs=0, concat_input=False,
        dropout_ratio=0, num_classes=4, align_corners=False),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
"""


@MODELS.register_module()
class BlockMeans(BaseModule):
    """Means of 4x4 pixels, which no window and no context changes, and of 8x8 as a second level."""

    def forward(self, image: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        return functional.avg_pool2d(image, 8), functional.avg_pool2d(image, STRIDE)


@MODELS.register_module()
class Padded(BaseModule):
    """Random convolutions, which see zeros around a window. PADDED_SECONDS makes a batch last."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, 12, 5, 2, 2), nn.ReLU(), nn.Conv2d(12, 12, 5, 2, 2), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(12, 16, 5, 1, 2))

    def forward(self, image: torch.Tensor) -> Tuple[torch.Tensor]:
        time.sleep(float(os.environ.get('PADDED_SECONDS', '0')))
        return (self.layers(image),)


@MODELS.register_module()
class NotFinite(BaseModule):
    """Gives features that are no numbers."""

    def forward(self, image: torch.Tensor) -> Tuple[torch.Tensor]:
        return (functional.avg_pool2d(image, STRIDE) * float('nan'),)


def write_config(folder: Path, backbone: str = 'BlockMeans', extra: str = '') -> Path:
    """Write the config of a segmentor with one of these encoders."""
    path = folder / f'{backbone}.py'
    path.write_text(CONFIG.format(backbone=backbone) + extra)
    return path


def run(config: Path, *arguments: Any) -> int:
    """Run mapsage embed in this process."""
    return command.main([str(config), *map(str, arguments), '--accelerator', 'cpu'])


def write_bands(
    path: Path,
    values: np.ndarray,
    names: Tuple[str, ...],
    nodata: Optional[float] = None,
    transform: Optional[Affine] = None,
    **tags: str,
) -> Path:
    """Write (bands, height, width) with band names and tags, as another tool would."""
    place = dict(UTM, transform=transform or UTM['transform'])
    profile = dict(count=len(values), height=values.shape[1], width=values.shape[2])
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_file(
        path,
        'w',
        driver='GTiff',
        dtype=values.dtype,
        nodata=nodata,
        photometric='minisblack',
        alpha='no',
        **profile,
        **place,
    ) as file:
        file.write(values)
        file.descriptions = names
        file.update_tags(**tags)
    return path


def unit_vectors(random: np.random.RandomState, *shape: int) -> np.ndarray:
    """Return random (dims, ...) float32 vectors of length 1."""
    vectors = random.standard_normal(shape)
    return (vectors / np.linalg.norm(vectors, axis=0)).astype(np.float32)


def write_alpha_earth(path: Path, vectors: np.ndarray) -> Path:
    """Write (64, height, width) vectors as AlphaEarth's files are: bottom-up, rows from the south.

    The first row of ``vectors`` is the northern one.
    """
    height = vectors.shape[1]
    stored = np.sign(vectors) * np.rint(np.sqrt(np.abs(vectors)) * 127.5).clip(0, 127)
    stored = np.where(np.isnan(vectors), -128, stored).astype(np.int8)[:, ::-1]
    top = UTM['transform']
    transform = Affine(top.a, 0, top.c, 0, -top.e, top.f + top.e * height)
    names = tuple(f'A{number:02d}' for number in range(64))
    return write_bands(path, stored, names, -128, transform)


def write_tessera(path: Path, vectors: np.ndarray, version: str = 'v1') -> Path:
    """Write (128, height, width) vectors as ``geotessera download --format tiff`` does."""
    names = tuple(f'Tessera_Band_{number}' for number in range(len(vectors)))
    tags = dict(TESSERA_DATASET_VERSION=version, TESSERA_YEAR='2024', GEOTESSERA_VERSION='0.11.0')
    return write_bands(path, vectors.astype(np.float32), names, **tags)
