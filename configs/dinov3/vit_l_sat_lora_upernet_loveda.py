"""DINOv3 ViT-L (satellite) with LoRA adapters + UPerNet on LoveDA.

Command:  MAPSAGE_DINOV3=<folder of weights> bash scripts/start_8card_training.sh \
              configs/dinov3/vit_l_sat_lora_upernet_loveda.py
Hardware: 8 accelerators, 2 crops each. Weights, gradients and optimizer state of the backbone take
          1.18 GB in place of 4.63 GB; if activations are too many, set model.backbone.with_cp=True
Score:    not yet run. Expected: above the frozen encoder's 52.0 mIoU on val (whu-pzhang/dinov3_geo)

Rank 16 on queries and values trains 1.57 of the backbone's 303 million parameters. Adapters begin
at zero and have weights of their own, so that they take a higher rate than a pretrained encoder;
the head's rate, 6e-5, is used for both. At 1e-4 adapters have collapsed a DINOv2-L
(Earth-Adapter). Checkpoints hold the adapters, the neck and the heads alone. Nothing was tuned on
LoveDA.
"""

_base_ = [
    '../_base_/default_runtime.py',
    '../_base_/datasets/loveda.py',
    '../_base_/dinov3_vit_l_upernet.py',
]

max_iters = 80000
model = dict(
    backbone=dict(
        frozen=False,
        lora=dict(rank=16, targets=('q', 'v')),
        init_cfg=dict(
            checkpoint='{{$MAPSAGE_DINOV3:weights}}/dinov3_vitl16_pretrain_sat493m-eadcf0ff.pth'
        ),
    )
)
optim_wrapper = dict(
    type='AmpOptimWrapper',
    dtype='bfloat16',
    optimizer=dict(type='AdamW', lr=6e-5, weight_decay=0.05),
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=1500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=1500, end=max_iters, by_epoch=False),
]
train_cfg = dict(max_iters=max_iters, val_interval=8000)
custom_hooks = [dict(type='TrainedWeightsHook')]
randomness = dict(seed=0)
