"""DINOv3 ViT-L + UPerNet on LoveDA, fine-tuned as a whole: lower rates for lower blocks, bfloat16.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/dinov3/vit_l_web_finetune_upernet_loveda.py
Hardware: 8 accelerators, 2 crops each. If memory is short, set model.backbone.with_cp=True
Score:    not yet run. Expected: above the frozen backbone's 53.7 mIoU on val; fine-tuned ViT-L of
          remote sensing reach 54.2 (MTP) and 55.7 (S5) there

Learning rate, both decays and drop path are those of MMSeg's BEiT-B + UPerNet. They were not tuned
on LoveDA.
"""
_base_ = [
    '../_base_/default_runtime.py', '../_base_/datasets/loveda.py',
    '../_base_/dinov3_vit_l_upernet.py'
]

max_iters = 80000
model = dict(backbone=dict(frozen=False, drop_path_rate=0.1))
optim_wrapper = dict(
    type='AmpOptimWrapper',
    dtype='bfloat16',
    optimizer=dict(type='AdamW', lr=3e-5, weight_decay=0.05),
    constructor='DINOv3LayerDecayConstructor',
    paramwise_cfg=dict(decay_rate=0.9))
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=1500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=max_iters, by_epoch=False)
]
train_cfg = dict(max_iters=max_iters, val_interval=8000)
randomness = dict(seed=0)
