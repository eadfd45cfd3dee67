"""Small EoMT and PMT, and batches for them."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence

import torch
from mmengine.config import ConfigDict
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import MODELS, DefaultScope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

import mapsage  # noqa: F401  (registers the models)

ARCH = dict(embed_dims=32, num_layers=4, num_heads=2, feedforward_channels=48)
CLASSES, QUERIES = 5, 9


def eomt_config(
    arch: Dict[str, Any] = ARCH, backbone: Any = (), loss: Any = (), size: int = 64, **head: Any
) -> Dict[str, Any]:
    head = dict(dict(num_classes=CLASSES, num_queries=QUERIES, num_blocks=2), **head)
    return dict(
        type='EoMT',
        data_preprocessor=dict(
            type='SegDataPreProcessor',
            bgr_to_rgb=True,
            pad_val=0,
            seg_pad_val=255,
            size=(size, size),
            test_cfg=dict(size_divisor=16),
        ),
        backbone=dict(
            dict(type='DINOv3ViT', arch=arch, out_indices=(arch['num_layers'] - 1,)),
            **dict(backbone),
        ),
        decode_head=dict(
            type='EoMTHead',
            in_channels=arch['embed_dims'],
            align_corners=False,
            loss_decode=dict(type='MaskClassLoss', **dict(loss)),
            **head,
        ),
        train_cfg=dict(),
        test_cfg=dict(mode='whole'),
    )


def pmt_config(arch: Dict[str, Any] = ARCH, size: int = 64, **head: Any) -> Dict[str, Any]:
    config = eomt_config(arch, size=size)
    head = dict(
        dict(num_classes=CLASSES, num_queries=QUERIES, num_blocks=2, norm_cfg=dict(type='BN1d')),
        **head,
    )
    levels = tuple(range(arch['num_layers']))[-4:]
    config.update(
        type='EncoderDecoder',
        backbone=dict(
            type='DINOv3ViT', arch=arch, out_indices=levels, prefix_tokens=True, frozen=True
        ),
        decode_head=dict(
            type='PMTHead',
            in_channels=[arch['embed_dims']] * len(levels),
            num_heads=arch['num_heads'],
            align_corners=False,
            **head,
        ),
    )
    return config


def build(config: Dict[str, Any], seed: int = 0) -> Any:
    """Return the model with weights at which every part matters."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        torch.manual_seed(seed)
        model = revert_sync_batchnorm(MODELS.build(ConfigDict(config)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(('gamma_1', 'gamma_2')):
                parameter.normal_(std=0.3)
    return model


def labels_of(
    count: int,
    side: int = 64,
    seed: int = 0,
    block: int = 8,
    void: float = 0.0,
    classes: int = CLASSES,
) -> torch.Tensor:
    """Label maps of square blocks, (count, side, side)."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, classes, (count, side // block, side // block), generator=generator)
    hidden = torch.rand(labels.shape, generator=generator) < void
    labels[hidden] = 255
    return labels.repeat_interleave(block, 1).repeat_interleave(block, 2)


def samples_of(labels: Sequence[torch.Tensor]) -> List[SegDataSample]:
    shape = tuple(labels[0].shape)
    return [
        SegDataSample(
            gt_sem_seg=PixelData(data=each[None]),
            metainfo=dict(
                img_path=f'tile_{number}.png',
                img_shape=shape,
                ori_shape=shape,
                pad_shape=shape,
                padding_size=[0] * 4,
            ),
        )
        for number, each in enumerate(labels)
    ]


def images_of(count: int, side: int = 64, seed: int = 0) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(0, 256, (3, side, side), generator=generator, dtype=torch.uint8)
        for _ in range(count)
    ]


def losses_of(model: Any, labels: torch.Tensor, seed: int = 0) -> Dict[str, torch.Tensor]:
    """The losses of a step on random images."""
    images = images_of(len(labels), labels.shape[-1], seed)
    data = model.data_preprocessor(
        dict(inputs=images, data_samples=samples_of(labels)), training=True
    )
    return model(**data, mode='loss')
