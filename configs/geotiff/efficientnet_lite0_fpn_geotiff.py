"""EfficientNet-Lite0 FPN on scenes with four bands of 16 bits, labeled with polygons.

docs/tutorials/scenes.md goes from these scenes, or from your own, to a map in QGIS.

Command:  python tools/make_demo_data.py data/geotiff --geotiff
          python tools/train.py configs/geotiff/efficientnet_lite0_fpn_geotiff.py
Hardware: one CPU process with one thread and two workers on a 2-core Intel Xeon, 2 min 6 s of
          processor time with start and validation (torch 2.13.0, 2026-11-23)
Score:    mIoU 85.6 on the validation blocks; always predicting the most frequent class gives 4.9.
          Weakest: building 73, road 76;
          best: water 98
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/geotiff.py',
    '../_base_/efficientnet_lite0_fpn.py',
]

max_iters = 200
model = dict(
    data_preprocessor=dict(
        _delete_=True,
        type='BandDataPreProcessor',
        # of python tools/geotiff_statistics.py data/geotiff/scenes --bands 1 2 3 4
        mean=[4005.46, 4091.38, 2876.75, 5052.28],
        std=[1478.34, 1168.2, 1011.62, 1638.92],
        size=(256, 256),
        pad_val=0,
        seg_pad_val=255,
        test_cfg=dict(size_divisor=32),
    ),
    # The pretrained kernels go to red, green and blue; near infrared starts from their mean.
    backbone=dict(in_channels=4, bands=dict(rgb=(0, 1, 2))),
    decode_head=dict(num_classes=7),
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.05, begin=0, end=20, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-5, begin=20, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters)
default_hooks = dict(logger=dict(interval=20), checkpoint=dict(interval=max_iters // 2))
randomness = dict(seed=0)
