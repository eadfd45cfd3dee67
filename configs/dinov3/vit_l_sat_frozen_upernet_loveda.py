"""Frozen DINOv3 ViT-L (satellite images) + UPerNet on LoveDA, with the authors' settings.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/dinov3/vit_l_sat_frozen_upernet_loveda.py
Hardware: 8 accelerators, 2 crops each. The authors' batch is 8: train_dataloader.batch_size=1
Score:    not yet run. Expected: about 52 mIoU on val (whu-pzhang/dinov3_geo has 51.98, normalized
          as for web images). The authors report 54.4 on the test server (paper, table 19). Web
          weights are better than satellite weights here and on iSAID; satellite weights are better
          at metric tasks such as canopy height (dinov3 #117)

Differs from vit_l_web_frozen_upernet_loveda.py in the weights. Their mean and std are found from
the file and logged.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/loveda.py',
    '../_base_/dinov3_vit_l_upernet.py',
]

max_iters = 80000
model = dict(
    backbone=dict(
        init_cfg=dict(
            checkpoint='{{$MAPSAGE_DINOV3:weights}}/dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth'
        )
    )
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=1500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=8000)
randomness = dict(seed=0)
