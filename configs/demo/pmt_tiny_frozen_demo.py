"""A tiny PMT on a frozen DINOv3 with random weights, to show that mask queries read such features.

Command:  python tools/train.py configs/demo/pmt_tiny_frozen_demo.py
Hardware: one CPU process with one thread on a 2-core Intel Xeon with other work, 400 steps in some
          4 min 50 s (torch 2.13.0, 2026-11-23)
Score:    mIoU 21.3; always predicting the most frequent class gives 4.1, and a linear head on such
          features 27.6 (vit_tiny_frozen_demo.py): queries learn slower than a head per pixel
"""

_base_ = ['../_base_/default_runtime.py', '../_base_/datasets/demo.py']

max_iters = 400
train_dataloader = dict(batch_size=4)
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(128, 128),
        test_cfg=dict(size_divisor=16),
    ),
    backbone=dict(
        type='DINOv3ViT',
        arch=dict(embed_dims=192, num_layers=4, num_heads=3, feedforward_channels=768),
        out_indices=(0, 1, 2, 3),
        prefix_tokens=True,
        frozen=True,
    ),
    decode_head=dict(
        type='PMTHead',
        in_channels=[192, 192, 192, 192],
        num_heads=3,
        num_blocks=2,
        num_queries=14,  # twice the classes
        num_classes=7,
        norm_cfg=dict(type='SyncBN'),  # becomes BN where the accelerator has no SyncBN
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
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=max_iters))
randomness = dict(seed=0)
