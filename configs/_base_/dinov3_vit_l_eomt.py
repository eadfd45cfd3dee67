"""DINOv3 ViT-L as EoMT, fine-tuned as a whole: model and training of the published ADE20K model.

Source: tue-mps/eomt@7bd19dd, configs/dinov3/ade20k/semantic/eomt_large_512.yaml: AdamW 2e-4 for all
parameters, weight decay 0.05, warm-ups of 2,000 and 3,000 steps, polynomial 0.9, gradient norm
0.01, batch 16, 20.2k steps; the masks of the last four blocks fade out one after the other.

The encoder's weights are looked for as in dinov3_vit_l_upernet.py. A published EoMT is loaded by
``model.init_cfg=dict(type='Pretrained', checkpoint=..., class_head=False)``
(docs/how-to/models.md).
"""

model = dict(
    type='EoMT',
    data_preprocessor=dict(
        type='SegDataPreProcessor',
        bgr_to_rgb=True,
        pad_val=0,
        seg_pad_val=255,
        size=(512, 512),
        test_cfg=dict(size_divisor=16),
    ),
    backbone=dict(
        type='DINOv3ViT',
        arch='large',
        out_indices=(23,),
        init_cfg=dict(
            type='Pretrained',
            checkpoint='{{$MAPSAGE_DINOV3:weights}}/dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth',
        ),
    ),
    decode_head=dict(
        type='EoMTHead',
        in_channels=1024,
        num_blocks=4,
        num_queries=100,
        num_classes=7,
        align_corners=False,
        loss_decode=dict(type='MaskClassLoss'),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)),
)
optim_wrapper = dict(
    type='AmpOptimWrapper',
    dtype='bfloat16',
    optimizer=dict(type='AdamW', lr=2e-4, weight_decay=0.05),
    clip_grad=dict(max_norm=0.01),
    constructor='TwoStageConstructor',
    paramwise_cfg=dict(decay_rate=1.0),
)
param_scheduler = [dict(type='TwoStagePolyLR', warmup=(2000, 3000), power=0.9, begin=0, end=20000)]
custom_hooks = [
    dict(type='MaskAnnealingHook', starts=[0, 6520, 9780, 13040], ends=[3000, 9780, 13040, 16300])
]
