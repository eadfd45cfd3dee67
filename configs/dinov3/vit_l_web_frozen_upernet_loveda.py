"""Frozen DINOv3 ViT-L (web images) + UPerNet on LoveDA, with the authors' settings.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/dinov3/vit_l_web_frozen_upernet_loveda.py
Hardware: 8 accelerators, 2 crops each. The authors' batch is 8: train_dataloader.batch_size=1
Score:    not yet run. Expected: about 53.7 mIoU on val (whu-pzhang/dinov3_geo has 53.72: MMSeg, 80k
          steps of 8 crops, blocks 7, 11, 15, 23, weight decay 0.05). The authors report figures of
          the test server only: 56.2 for the 7B model (paper, table 19)

Settings of facebookresearch/dinov3 #112: AdamW 6e-5, weight decay 0.01, 1,500 steps of warm-up, 80k
steps, poly, crops of 512, cross entropy, normed features.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/loveda.py',
    '../_base_/dinov3_vit_l_upernet.py',
]

max_iters = 80000
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=1500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=8000)
randomness = dict(seed=0)
