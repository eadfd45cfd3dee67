"""A tiny EoMT from scratch on NWPU VHR-10 polygons, to show that it runs on real images.

Command:  MAPSAGE_NWPU=<folder> python tools/train.py configs/mask_transformers/eomt_tiny_nwpu.py
Hardware: one CPU process of an AMD EPYC with other work on it, 8 min (4.5 min of processor time)
Score:    mIoU 11.29, 2026-11-23, torch 2.13.0; the background alone is 8.8. Random weights find
          large shapes only (ground track fields, IoU 26.6): the same ViT with a head per pixel
          reaches mIoU 14.1 (configs/dinov3/vit_tiny_nwpu.py)
"""

_base_ = ['../_base_/default_runtime.py', '../_base_/datasets/nwpu.py']

max_iters = 900
model = dict(
    type='EoMT',
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
        out_indices=(3,),
    ),
    decode_head=dict(
        type='EoMTHead',
        in_channels=96,
        num_blocks=2,
        num_queries=22,  # twice the classes
        num_classes=11,
        align_corners=False,
        loss_decode=dict(type='MaskClassLoss'),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
optim_wrapper = dict(
    type='OptimWrapper',
    optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.05),
    clip_grad=dict(max_norm=0.01),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, begin=0, end=20, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=20, end=max_iters, by_epoch=False),
]
custom_hooks = [dict(type='MaskAnnealingHook')]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=max_iters // 2))
randomness = dict(seed=0)
