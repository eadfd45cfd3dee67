"""A tiny DINOv3 ViT without pretrained weights on NWPU VHR-10 polygons, to show that it runs.

Command:  MAPSAGE_NWPU=<folder> python tools/train.py configs/dinov3/vit_tiny_nwpu.py
Hardware: one CPU process with one thread on a 2-core AMD EPYC with other work, 10 min with start
          and validation (torch 2.13.0, 2026-11-21)
Score:    mIoU 14.1 on 40 images, whose masks had outlines drawn in until 2026-11-22; predicting
          background everywhere gives 8.7. Random weights and 900 steps find large shapes only
          (ground track field 34); a pretrained EfficientNet-Lite0 reaches 54.2 in a third of the
          time (efficientnet_lite0_fpn_nwpu.py)
"""

_base_ = ['../_base_/default_runtime.py', '../_base_/datasets/nwpu.py']

max_iters = 900
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(256, 256),
        test_cfg=dict(size_divisor=16),
    ),
    backbone=dict(
        type='DINOv3ViT',
        arch=dict(embed_dims=96, num_layers=4, num_heads=3, feedforward_channels=384),
        out_indices=(0, 1, 2, 3),
    ),
    neck=dict(
        type='Feature2Pyramid',
        embed_dim=96,
        rescales=[4, 2, 1, 0.5],
        norm_cfg=dict(type='GN', num_groups=8),
    ),
    decode_head=dict(
        type='FCNHead',
        in_channels=[96, 96, 96, 96],
        in_index=[0, 1, 2, 3],
        input_transform='resize_concat',
        channels=384,
        num_convs=0,
        concat_input=False,
        dropout_ratio=0.0,
        num_classes=11,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.05),
    constructor='DINOv3LayerDecayConstructor',
    # 1: equal rates, but groups without weight decay
    paramwise_cfg=dict(decay_rate=1.0),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, begin=0, end=20, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=20, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=max_iters // 2))
randomness = dict(seed=0)
