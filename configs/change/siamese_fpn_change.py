"""Siamese EfficientNet-Lite0 FPN on made pairs of two dates: what has changed.

docs/how-to/change.md goes from these pairs, or from your own, to polygons of change in QGIS.

Command:  python tools/make_demo_data.py data/change --change
          python tools/train.py configs/change/siamese_fpn_change.py
Hardware: one NVIDIA H200, 2026-11-27
Score:    F1 78.8 ± 1.2, three seeds (docs/benchmarks.md)
"""

_base_ = [
    '../_base_/datasets/change.py',
    '../_base_/efficientnet_lite0_fpn.py',
    '../_base_/default_runtime.py',
    '../_base_/change_schedule.py',
]

sensors = dict(image=dict(bands=[1, 2, 3], max_dates=2))
model = dict(
    data_preprocessor=dict(
        _delete_=True,
        type='StackDataPreProcessor',
        sensors=sensors,
        mean=dict(image=[127.0, 127.0, 127.0]),  # as in the training of EfficientNet-Lite, 0..255
        std=dict(image=[128.0, 128.0, 128.0]),
        size=(128, 128),
        seg_pad_val=255,
        test_cfg=dict(size_divisor=32),
    ),
    backbone=dict(
        _delete_=True,
        type='SiameseBackbone',
        sensors=sensors,
        fusion='concat_abs_diff',
        encoder=dict(
            type='EfficientNetLite',
            norm_eval=True,
            init_cfg=dict(type='Pretrained', checkpoint='efficientnet_lite0'),
        ),
    ),
    # Three times the channels of the encoder: both dates and their absolute difference.
    neck=dict(in_channels=[72, 120, 336, 960]),
    decode_head=dict(num_classes=2),
)
train_cfg = dict(max_iters=_base_.max_iters, val_interval=_base_.max_iters)
default_hooks = dict(
    logger=dict(interval=20),
    checkpoint=dict(interval=_base_.max_iters // 2, save_best='F1', rule='greater'),
)
