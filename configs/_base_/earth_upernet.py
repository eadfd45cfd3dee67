"""An encoder of several bands, sensors and dates with UPerNet, fine-tuned with layer decay.

A config adds the encoder, the sensors, the number of classes and the schedule. The encoder returns
four maps of 768 channels; configs/earth/prithvi_300m_burn_scars.py has another number. It
normalizes, so the data preprocessor has no mean and std.
"""

norm_cfg = dict(type='SyncBN', requires_grad=True)  # becomes BN where the accelerator has no SyncBN
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='StackDataPreProcessor',
        size=(512, 512),
        pad_val=0,
        seg_pad_val=255,
        test_cfg=dict(size_divisor=16),
    ),
    backbone=dict(),
    neck=dict(type='Feature2Pyramid', embed_dim=768, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type='UPerHead',
        in_channels=[768, 768, 768, 768],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=256,
        dropout_ratio=0.1,
        num_classes=2,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='LayerDecayConstructor',
    paramwise_cfg=dict(decay_rate=0.8),
    optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05),
)
randomness = dict(seed=0)
