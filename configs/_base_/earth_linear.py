"""A tiny encoder of several bands, sensors and dates with a linear head; a config adds the encoder.

The encoder returns four maps of 96 channels. It normalizes, so the data preprocessor has no mean
and std, and only hides what is missing.
"""

model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='StackDataPreProcessor',
        size=(64, 64),
        pad_val=0,
        seg_pad_val=255,
        test_cfg=dict(size_divisor=16),
    ),
    backbone=dict(out_indices=(0, 1, 2, 3)),
    decode_head=dict(
        type='LinearHead',
        in_channels=[96, 96, 96, 96],
        in_index=[0, 1, 2, 3],
        input_transform='resize_concat',
        channels=384,
        dropout_ratio=0.0,
        num_classes=6,
        norm_cfg=dict(type='GN', num_groups=32),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, begin=0, end=20, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=20, end=300, by_epoch=False),
]
randomness = dict(seed=0)
