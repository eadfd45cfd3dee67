"""EfficientNet-Lite0 FPN on iSAID, 80k steps of 16 tiles: MMSeg's schedule for this dataset.

Command:  bash scripts/start_8card_training.sh configs/isaid/efficientnet_lite0_fpn_isaid.py
Hardware: 8 accelerators, 2 tiles of 896x896 each
Score:    not yet run. MMSeg's HRNet-W48 reaches 67.8 and PSPNet-R50 65.4 mIoU on val; a network of
          3 M parameters should stay below.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/isaid.py',
    '../_base_/efficientnet_lite0_fpn.py',
]

max_iters = 80000
model = dict(
    data_preprocessor=dict(size=(896, 896)),
    backbone=dict(drop_path_rate=0.1),
    decode_head=dict(num_classes=16),
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=5e-4, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-3, begin=0, end=1500, by_epoch=False),
    dict(type='PolyLR', power=0.9, eta_min=1e-6, begin=1500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=8000)
randomness = dict(seed=0)
