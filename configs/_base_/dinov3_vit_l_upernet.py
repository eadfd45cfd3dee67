"""DINOv3 ViT-L, frozen, with UPerNet: the authors' set-up for geospatial tasks (dinov3 #34, #95).

The official files are looked for in weights/, or in the folder that the environment variable
MAPSAGE_DINOV3 names; ``python tools/check_weights.py FILE`` checks one. A Hugging Face folder, a
safetensors file or timm's weights do as well: set ``model.backbone.init_cfg.checkpoint``.

The backbone takes RGB in 0..255 and normalizes it as its weights were trained, so that the data
preprocessor has no mean and std.
"""

norm_cfg = dict(type='SyncBN', requires_grad=True)  # becomes BN where the accelerator has no SyncBN
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
        out_indices=(4, 11, 17, 23),  # as in the paper
        frozen=True,
        init_cfg=dict(
            type='Pretrained',
            checkpoint='{{$MAPSAGE_DINOV3:weights}}/dinov3_vitl16_pretrain_lvd1689m-8aa4cbdd.pth',
        ),
    ),
    neck=dict(type='Feature2Pyramid', embed_dim=1024, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type='UPerHead',
        in_channels=[1024, 1024, 1024, 1024],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=512,
        dropout_ratio=0.1,
        num_classes=7,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True),
    ),
    train_cfg=dict(),
    test_cfg=dict(mode='slide', crop_size=(512, 512), stride=(341, 341)),
)
