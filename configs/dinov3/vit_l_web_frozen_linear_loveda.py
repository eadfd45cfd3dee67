"""Frozen DINOv3 ViT-L + a linear layer on LoveDA, to measure the features as they are.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/dinov3/vit_l_web_frozen_linear_loveda.py
Hardware: 8 accelerators, 2 crops each, as used by the authors
Score:    not yet run. No figure for LoveDA is published; on ADE20K the authors' linear ViT-L
          reaches 54.9 mIoU, 2.3 more than a frozen ViT-L + UPerNet by dinov3_geo (52.65)

Settings of dinov3/eval/segmentation/configs/config-ade20k-linear-training.yaml: 40k steps of 16
crops of 512, AdamW 1e-3, weight decay 1e-3, batch norm, the last block's normed features.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/loveda.py',
    '../_base_/dinov3_vit_l_upernet.py',
]

max_iters = 40000
model = dict(
    backbone=dict(out_indices=(23,)),
    neck=None,
    decode_head=dict(
        _delete_=True,
        type='LinearHead',
        in_channels=1024,
        channels=1024,
        dropout_ratio=0.1,
        num_classes=7,
        norm_cfg=dict(type='SyncBN', requires_grad=True),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True),
    ),
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3, weight_decay=1e-3))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=1500, by_epoch=False),
    dict(type='CosineAnnealingLR', eta_min=0.0, begin=1500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=8000)
randomness = dict(seed=0)
