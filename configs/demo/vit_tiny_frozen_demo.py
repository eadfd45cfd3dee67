"""A linear head on a frozen tiny DINOv3 with random weights, to show where features can come from.

Command:  NPROC_PER_NODE=4 ENCODERS=1 bash scripts/start_8card_training.sh \
              configs/demo/vit_tiny_frozen_demo.py
Hardware: 3 head ranks and 1 encoder rank on a 2-core AMD EPYC with other work, 200 steps in 23 s
          (torch 2.13.0, 2026-11-22)
Score:    mIoU 27.6; always predicting the most frequent class gives 4.1, and the demo's own config
          82.5. Random features distinguish only colors and edges
"""

_base_ = ['../_base_/default_runtime.py', '../_base_/datasets/demo.py']

max_iters = 200
train_dataloader = dict(batch_size=2)
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
        frozen=True,
    ),
    decode_head=dict(
        type='LinearHead',
        in_channels=[192, 192, 192, 192],
        in_index=[0, 1, 2, 3],
        input_transform='resize_concat',
        channels=768,
        dropout_ratio=0.0,
        num_classes=7,
        norm_cfg=dict(type='GN', num_groups=32),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=3e-3, weight_decay=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, begin=0, end=20, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=20, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=max_iters))
randomness = dict(seed=0)
