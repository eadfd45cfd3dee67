"""A tiny TerraMind with random weights on made crops of two sensors, to show that it trains.

docs/how-to/earth-encoders.md says where the published weights are, and which encoder is for what.

Command:  python tools/make_demo_data.py data/crops --stacks
          python tools/train.py configs/earth/terramind_tiny_crops.py
Hardware: not yet run
Score:    not yet run
"""
_base_ = ['../_base_/default_runtime.py', '../_base_/datasets/crops.py']

max_iters = 300
sensors = _base_.sensors
model = dict(
    type='EncoderDecoder',
    # The encoder normalizes; the preprocessor only hides what is missing.
    data_preprocessor=dict(
        type='StackDataPreProcessor',
        sensors=sensors,
        size=(64, 64),
        pad_val=0,
        seg_pad_val=255,
        test_cfg=dict(size_divisor=16)),
    backbone=dict(
        type='TerraMind',
        sensors=sensors,
        arch=dict(embed_dims=96, num_layers=4, num_heads=4),
        out_indices=(0, 1, 2, 3)),
    decode_head=dict(
        type='LinearHead',
        in_channels=[96, 96, 96, 96],
        in_index=[0, 1, 2, 3],
        input_transform='resize_concat',
        channels=384,
        dropout_ratio=0.,
        num_classes=6,
        norm_cfg=dict(type='GN', num_groups=32),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True)),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'))
optim_wrapper = dict(
    type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, begin=0, end=20, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=20, end=max_iters, by_epoch=False)
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=max_iters // 2))
randomness = dict(seed=0)
