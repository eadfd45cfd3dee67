"""Frozen DINOv3 ViT-L (satellite images) + UPerNet on LoveDA, on eight Enflame T20 cards.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/dinov3/vit_l_sat_frozen_upernet_loveda_t20.py
Hardware: 8 Enflame T20, 2 crops each. Not yet run on such cards; the T20 software line is tested
          with a stand-in for its torch_gcu
Score:    not yet run. Expected: about 52 mIoU on val, as with vit_l_sat_frozen_upernet_loveda.py

Differs from vit_l_sat_frozen_upernet_loveda.py where the T20 needs it. Norms are group norms, since
SyncBN does not compute there and two crops are too few for batch norm. Validation takes whole
1024x1024 images, which is one graph to compile; each of nine crops would be padded into its place
by another graph. Mixed precision is off, since a user's run of such a model ended with 'free():
invalid pointer' with it. LoveDA has masks; the image-text set MMRS-1M has none.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/loveda.py',
    '../_base_/dinov3_vit_l_upernet.py',
]

max_iters = 80000
norm_cfg = dict(_delete_=True, type='GN', num_groups=32, requires_grad=True)
env_cfg = dict(accelerator='gcu_t20')
model = dict(
    backbone=dict(
        init_cfg=dict(
            checkpoint='{{$MAPSAGE_DINOV3:weights}}/dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth'
        )
    ),
    neck=dict(norm_cfg=norm_cfg),
    decode_head=dict(norm_cfg=norm_cfg),
    test_cfg=dict(_delete_=True, mode='whole'),
)
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.01))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=1500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=8000)
randomness = dict(seed=0)
