"""A narrow ResNet-18 date by date, with attention over dates, on made crops of two sensors.

docs/how-to/scene-stacks.md goes from these places, or from your own, to a map.

Command:  python tools/make_demo_data.py data/crops --stacks
          python tools/train.py configs/stacks/resnet18_attention_crops.py
Hardware: not yet run
Score:    not yet run
"""

_base_ = ['../_base_/default_runtime.py', '../_base_/datasets/crops.py']

max_iters = 300
sensors = _base_.sensors
encoder = dict(
    type='ResNetV1c',
    depth=18,
    base_channels=16,
    num_stages=3,
    strides=(1, 2, 2),
    dilations=(1, 1, 1),
    out_indices=(0, 1, 2),
    # A missing date is an image of zeros, which would change the statistics of a batch norm.
    norm_cfg=dict(type='GN', num_groups=8),
)
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='StackDataPreProcessor',
        sensors=sensors,
        # of python tools/geotiff_statistics.py --config configs/stacks/resnet18_attention_crops.py
        mean=dict(s2=[972.805, 1060.13, 3154.82, 2389.36], s1=[-10.3703, -17.5928]),
        std=dict(s2=[192.494, 416.598, 751.709, 511.225], s1=[1.23979, 1.87579]),
        size=(64, 64),
        pad_val=0,
        seg_pad_val=255,
        test_cfg=dict(size_divisor=32),
    ),
    backbone=dict(
        type='StackBackbone',
        sensors=sensors,
        encoder=dict(s2=dict(**encoder, in_channels=4), s1=dict(**encoder, in_channels=2)),
    ),
    neck=dict(
        type='TemporalPool',
        sensors=sensors,
        channels=[16, 32, 64],
        pool='attention',
        attention=dict(heads=8, width=64),
    ),
    decode_head=dict(
        type='FCNHead',
        # both sensors
        in_channels=[32, 64, 128],
        in_index=[0, 1, 2],
        input_transform='resize_concat',
        channels=64,
        num_convs=1,
        concat_input=False,
        dropout_ratio=0.0,
        num_classes=6,
        norm_cfg=dict(type='GN', num_groups=8),
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'),
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=2e-3, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, begin=0, end=20, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=20, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=max_iters // 2))
randomness = dict(seed=0)
