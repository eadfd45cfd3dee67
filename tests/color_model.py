"""A model whose map is known to the pixel, and scenes for it, in memory and in files."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, List, Optional, Tuple

import numpy as np
import torch
from mmcv.cnn import ConvModule
from mmengine.model import BaseModule
from mmseg.registry import MODELS
from torch import nn

NAMES = ('red', 'green', 'blue', 'dark')
COLORS = np.array([[220, 20, 30], [10, 200, 40], [30, 40, 230], [10, 10, 20]], np.uint8)

# Its logits are far apart for the four colors, so that the map is these, pixel for pixel.
CONFIG = """
custom_imports = dict(imports=['mapsage', 'color_model'])
default_scope = 'mmseg'
crop_size = (64, 64)
test_pipeline = [
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), dict(type='PackSegInputs')]
test_dataloader = dict(dataset=dict(
    type='BaseSegDataset', pipeline=test_pipeline,
    metainfo=dict(classes=('red', 'green', 'blue', 'dark'),
                  palette=[[255, 0, 0], [0, 255, 0], [0, 0, 255], [40, 40, 40]])))
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor', mean=[0., 0., 0.], std=[255., 255., 255.], bgr_to_rgb=True),
    backbone=dict(type='Unchanged'),
    decode_head=dict(
        type='FCNHead', in_channels=3, in_index=0, channels=3, num_convs=0, concat_input=False,
        dropout_ratio=0, num_classes=4, align_corners=False),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
"""


@MODELS.register_module()
class Unchanged(BaseModule):
    """Hands the image on. COLOR_SECONDS makes every batch last that long."""

    def forward(self, image: torch.Tensor) -> Tuple[torch.Tensor]:
        time.sleep(float(os.environ.get('COLOR_SECONDS', '0')))
        return (image,)


@MODELS.register_module()
class NormBehindActivation(BaseModule):
    """Hands the image on through a convolution that is folded, and one whose norm comes late."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            *(
                ConvModule(3, 3, 1, norm_cfg=dict(type='BN'), order=order)
                for order in (('conv', 'norm', 'act'), ('conv', 'act', 'norm'))
            )
        )
        for block in self.blocks:
            nn.init.dirac_(block.conv.weight)
            nn.init.constant_(block.norm.bias, 0.1)

    def forward(self, image: torch.Tensor) -> Tuple[torch.Tensor]:
        return (self.blocks(image),)


def write_config(folder: Path, extra: str = '') -> Path:
    """Write the config, with ``extra`` lines of Python at its end."""
    path = folder / 'color.py'
    path.write_text(CONFIG + extra)
    return path


def write_checkpoint(folder: Path) -> Path:
    """Write the weights that turn colors into classes."""
    path = folder / 'color.pth'
    weight = torch.zeros(4, 3, 1, 1)
    for number in range(3):
        weight[number, number] = 20
    bias = torch.tensor([0.0, 0.0, 0.0, 6.0])
    torch.save(
        dict(
            state_dict={'decode_head.conv_seg.weight': weight, 'decode_head.conv_seg.bias': bias},
            meta={},
        ),
        path,
    )
    return path


def paint(height: int, width: int) -> np.ndarray:
    """Return ``(height, width)`` classes: rectangles on dark ground, whose sizes are known."""
    classes = np.full((height, width), 3, np.uint8)
    classes[height // 8 : height // 2, width // 8 : width // 3] = 0
    classes[height // 4 : height * 3 // 4, width // 2 : width * 7 // 8] = 1
    classes[height * 3 // 5 : height * 9 // 10, width // 10 : width * 2 // 5] = 2
    return classes


def write_scene(
    path: Path,
    classes: np.ndarray,
    crs: Optional[str] = None,
    transform: Any = None,
    **options: Any,
) -> Path:
    """Write the scene of a class map as a GeoTIFF of bands red, green, blue; 255 is black."""
    import rasterio

    colors = np.concatenate([COLORS, np.zeros((252, 3), np.uint8)])
    with rasterio.open(
        path,
        'w',
        driver='GTiff',
        height=classes.shape[0],
        width=classes.shape[1],
        count=3,
        dtype='uint8',
        crs=crs,
        transform=transform,
        **options,
    ) as file:
        file.write(colors[classes].transpose(2, 0, 1))
    return path


class PixelModel(nn.Module):
    """A segmentor that answers 4 classes by a convolution; with context 1, from each pixel alone.

    Args:
        context: Side of the convolution's kernel.
    """

    num_classes = out_channels = 4

    def __init__(self, context: int = 1) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 4, context, padding=context // 2)
        if context == 1:
            with torch.no_grad():
                self.convolution.weight.copy_(torch.eye(4, 3)[:, :, None, None] / 64)
                self.convolution.bias.zero_()

    def data_preprocessor(self, data: dict, training: bool) -> dict:
        return dict(data, inputs=torch.stack(data['inputs']).float())

    def encode_decode(self, inputs: torch.Tensor, metas: List[dict]) -> torch.Tensor:
        return self.convolution(inputs)


class MemoryScene:
    """Stands where :class:`mapsage.maps.inputs.Scene` does, over an array."""

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels
        self.valid = np.ones(pixels.shape[1:], bool)
        self.damaged: Optional[Tuple[int, int]] = None

    def read(
        self, column: int, row: int, window: Tuple[int, int]
    ) -> Tuple[np.ndarray, np.ndarray, List[str]]:
        """Return a window as a scene does."""
        part = self.pixels[:, row : row + window[0], column : column + window[1]]
        valid = self.valid[row : row + window[0], column : column + window[1]]
        damage = []
        if self.damaged is not None:
            down, across = self.damaged[0] - row, self.damaged[1] - column
            if 0 <= down < valid.shape[0] and 0 <= across < valid.shape[1]:
                self.valid[self.damaged] = False
                damage = [f'{self.damaged} is damaged']
        missing = [(0, 0)] + [(0, side - have) for side, have in zip(window, valid.shape)]
        return np.pad(part, missing, mode='reflect'), valid, damage
