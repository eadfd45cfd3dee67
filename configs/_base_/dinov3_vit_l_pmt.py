"""DINOv3 ViT-L, frozen, with PMT: model and training of the published ADE20K model.

Source: tue-mps/pmt@54d73c9, image/configs/ade20k/semantic/pmt_l_512.yaml: AdamW 2e-4, weight decay
0.05, linear warm-up of 6,000 steps, cosine to 1e-9, gradient norm 0.01, batch 16, 20.2k steps; the
masks of the six blocks fade out one after the other.

The encoder's weights are looked for as in dinov3_vit_l_upernet.py. A published decoder is loaded by
``model.decode_head.init_cfg=dict(type='Pretrained', checkpoint=..., class_head=False)``.
"""

model = dict(
    type='EncoderDecoder',
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
        out_indices=(5, 11, 17, 23),
        prefix_tokens=True,
        frozen=True,
        init_cfg=dict(
            type='Pretrained',
            checkpoint='{{$MAPSAGE_DINOV3:weights}}/dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth',
        ),
    ),
    decode_head=dict(
        type='PMTHead',
        in_channels=[1024, 1024, 1024, 1024],
        num_heads=16,
        num_blocks=6,
        num_queries=100,
        num_classes=7,
        norm_cfg=dict(type='SyncBN'),  # becomes BN where the accelerator has no SyncBN
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
)
param_scheduler = [
    dict(type='LinearLR', start_factor=1e-6, begin=0, end=6000, by_epoch=False),
    dict(type='CosineAnnealingLR', eta_min=1e-9, begin=6000, end=20000, by_epoch=False),
]
custom_hooks = [
    dict(
        type='MaskAnnealingHook',
        starts=[0, 5384, 7403, 9422, 11442, 13461],
        ends=[3000, 8749, 10769, 12788, 14807, 16826],
    )
]
