"""DINOv3 ViT-L + UPerNet on LoveDA, fine-tuned as a whole: lower rates for lower blocks, bfloat16.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/dinov3/vit_l_web_finetune_upernet_loveda.py
Hardware: 8 accelerators, 2 crops each. If memory is short, set model.backbone.with_cp=True
Score:    not yet run. Expected: above the frozen backbone's 53.7 mIoU on val; fine-tuned ViT-L of
          remote sensing reach 54.2 (MTP) and 55.7 (S5) there

Learning rate 2e-5, layer decay 0.95, weight decay 0.05 and drop path 0.2 are taken from MMSeg's
BEiT-L + UPerNet (beit-large_upernet_8xb1-amp-160k_ade20k-640x640.py), also a ViT of 24 blocks that
is fine-tuned as a whole; its first block learns at 0.29 of the rate. Those of BEiT-B (3e-5, 0.9,
0.1) would leave the first of 24 blocks 0.08. Batch 16, 80k steps, poly, 1,500 steps of warm-up and
crops of 512 are the frozen recipe's, to compare with it. bfloat16 has the range of float32
and needs no loss scaling. Nothing was tuned on LoveDA.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/loveda.py',
    '../_base_/dinov3_vit_l_upernet.py',
]

max_iters = 80000
model = dict(backbone=dict(frozen=False, drop_path_rate=0.2))
optim_wrapper = dict(
    type='AmpOptimWrapper',
    dtype='bfloat16',
    optimizer=dict(type='AdamW', lr=2e-5, weight_decay=0.05),
    constructor='DINOv3LayerDecayConstructor',
    paramwise_cfg=dict(decay_rate=0.95),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=1500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=8000)
randomness = dict(seed=0)
