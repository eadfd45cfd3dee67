"""The segmentors that the benchmarks compare, small enough to be trained on a CPU."""

from __future__ import annotations

from typing import Any, Dict

NORM = dict(type='SyncBN', requires_grad=True)  # becomes BN where the accelerator has no SyncBN
CROSS_ENTROPY = dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True)
# The ViT of configs/demo/eomt_tiny_demo.py and configs/dinov3/vit_tiny_nwpu.py.
DIMS, LAYERS, HEADS = 96, 4, 3
LEVELS = [24, 40, 112, 320]  # channels of EfficientNet-Lite0

# Each is a backbone and a head; 'fixed' and 'hungarian' say how queries are matched to classes.
VARIANTS = (
    'vit linear',
    'vit fpn',
    'vit upernet',
    'vit pmt fixed',
    'vit pmt hungarian',
    'vit eomt fixed',
    'vit eomt hungarian',
    'lite0 linear',
    'lite0 fpn',
    'lite0 upernet',
)


def takes_queries(variant: str) -> bool:
    """Return whether a variant predicts masks by queries."""
    return 'pmt' in variant or 'eomt' in variant


def model_of(variant: str, num_classes: int, crop: int) -> Dict[str, Any]:
    """Return the config of a model.

    Args:
        variant: One of ``VARIANTS``.
        num_classes: Number of classes.
        crop: Side of the training crops in pixels, a multiple of 32.

    Raises:
        ValueError: If there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f'variant {variant!r}, expected one of {", ".join(VARIANTS)}')
    backbone, _, head = variant.partition(' ')
    model = _vit_model(head) if backbone == 'vit' else _lite0_model(head)
    model['decode_head'].update(num_classes=num_classes, align_corners=False)
    if takes_queries(variant):
        matching = head.split()[1]
        model['decode_head'].update(
            num_queries=num_classes * (1 if matching == 'fixed' else 2),
            loss_decode=dict(type='MaskClassLoss', matching=matching),
        )
    model['data_preprocessor'].update(
        type='SegDataPreProcessor', bgr_to_rgb=True, pad_val=0, seg_pad_val=255, size=(crop, crop)
    )
    model.setdefault('type', 'EncoderDecoder')
    return dict(model, train_cfg=dict(), test_cfg=dict(mode='whole'))


def _vit_model(head: str) -> Dict[str, Any]:
    kind = head.split()[0]
    model = dict(
        data_preprocessor=dict(test_cfg=dict(size_divisor=16)),
        backbone=dict(
            type='DINOv3ViT',
            arch=dict(
                embed_dims=DIMS, num_layers=LAYERS, num_heads=HEADS, feedforward_channels=4 * DIMS
            ),
            out_indices=(0, 1, 2, 3),
        ),
    )
    pyramid = dict(
        type='Feature2Pyramid',
        embed_dim=DIMS,
        rescales=[4, 2, 1, 0.5],
        norm_cfg=dict(type='GN', num_groups=8),
    )
    if kind == 'linear':
        return dict(model, decode_head=_linear([DIMS] * LAYERS, 32))
    if kind == 'fpn':  # as in configs/dinov3/vit_tiny_nwpu.py
        return dict(model, neck=pyramid, decode_head=_concatenated([DIMS] * LAYERS))
    if kind == 'upernet':
        return dict(
            model, neck=dict(pyramid, norm_cfg=NORM), decode_head=_upernet([DIMS] * LAYERS, DIMS)
        )
    if kind == 'pmt':
        model['backbone']['prefix_tokens'] = True
        return dict(
            model,
            decode_head=dict(
                type='PMTHead',
                in_channels=[DIMS] * LAYERS,
                num_heads=HEADS,
                num_blocks=2,
                norm_cfg=NORM,
            ),
        )
    return dict(
        model, type='EoMT', decode_head=dict(type='EoMTHead', in_channels=DIMS, num_blocks=2)
    )


def _lite0_model(head: str) -> Dict[str, Any]:
    """Return a model on ImageNet's features, as in configs/_base_/efficientnet_lite0_fpn.py."""
    model = dict(
        data_preprocessor=dict(mean=[127.0] * 3, std=[128.0] * 3, test_cfg=dict(size_divisor=32)),
        backbone=dict(
            type='EfficientNetLite',
            norm_eval=True,
            frozen_stages=2,
            init_cfg=dict(type='Pretrained', checkpoint='efficientnet_lite0'),
        ),
    )
    if head == 'linear':
        return dict(model, decode_head=_linear(LEVELS, 16))
    if head == 'fpn':
        return dict(
            model,
            neck=dict(type='FPN', in_channels=LEVELS, out_channels=64, num_outs=4),
            decode_head=_concatenated([64] * 4),
        )
    return dict(model, decode_head=_upernet(LEVELS, 64))


def _linear(channels: Any, groups: int) -> Dict[str, Any]:
    return dict(
        type='LinearHead',
        in_channels=channels,
        in_index=[0, 1, 2, 3],
        input_transform='resize_concat',
        channels=sum(channels),
        dropout_ratio=0.0,
        norm_cfg=dict(type='GN', num_groups=groups),
        loss_decode=CROSS_ENTROPY,
    )


def _concatenated(channels: Any) -> Dict[str, Any]:
    return dict(
        type='FCNHead',
        in_channels=channels,
        in_index=[0, 1, 2, 3],
        input_transform='resize_concat',
        channels=sum(channels),
        num_convs=0,
        concat_input=False,
        dropout_ratio=0.0,
        loss_decode=CROSS_ENTROPY,
    )


def _upernet(channels: Any, width: int) -> Dict[str, Any]:
    return dict(
        type='UPerHead',
        in_channels=channels,
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=width,
        dropout_ratio=0.1,
        norm_cfg=NORM,
        loss_decode=CROSS_ENTROPY,
    )
