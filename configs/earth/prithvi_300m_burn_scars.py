"""Prithvi-EO-2.0 300M TL, fine-tuned with UPerNet on HLS Burn Scars.

Set MAPSAGE_BURN_SCARS to the folder with training/ and validation/. Its files have reflectance in
0..1, which the preprocessor multiplies by 10000. Weights: MAPSAGE_EARTH/Prithvi_EO_V2_300M_TL.pt.

Command:  bash scripts/start_8card_training.sh configs/earth/prithvi_300m_burn_scars.py
Hardware: not yet run
Score:    not yet run. GEO-Bench-2 reports 88.4 mIoU for this encoder
"""
_base_ = ['../_base_/default_runtime.py']

data_root = '{{$MAPSAGE_BURN_SCARS:data/burn_scars}}'
max_iters = 4000
# The dataset reads bands by their number, because the files do not name them; the encoder needs the
# names, in the same order.
files = dict(hls=dict(scenes='{place}_merged.tif', bands=[1, 2, 3, 4, 5, 6]))
sensors = dict(hls=dict(bands=['B02', 'B03', 'B04', 'B8A', 'B11', 'B12']))
dataset = dict(
    type='SceneStackDataset',
    sensors=files,
    labels='{place}.mask.tif',
    window=512,
    metainfo=dict(classes=('not burned', 'burn scar'), palette=[[120, 150, 90], [200, 60, 30]]))
train_pipeline = [
    dict(type='LoadSceneStack'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PackStackInputs')
]
test_pipeline = [
    dict(type='LoadSceneStack'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='PackStackInputs')
]
tta_pipeline = [
    dict(type='LoadSceneStack'),
    dict(
        type='TestTimeAug',
        transforms=[[dict(type='RandomFlip', prob=p, direction='horizontal') for p in (0., 1.)],
                    [dict(type='LoadGeoTiffLabels')], [dict(type='PackStackInputs')]])
]
train_dataloader = dict(
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(**dataset, data_root=data_root + '/training', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, data_root=data_root + '/validation', pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = [dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU'])]
test_evaluator = val_evaluator
norm_cfg = dict(type='SyncBN', requires_grad=True)  # becomes BN where the accelerator has no SyncBN
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='StackDataPreProcessor',
        sensors=sensors,
        mean=dict(hls=[0.] * 6),
        std=dict(hls=[1e-4] * 6),
        size=(512, 512),
        pad_val=0,
        seg_pad_val=255,
        test_cfg=dict(size_divisor=16)),
    backbone=dict(
        type='PrithviEO',
        sensors=sensors,
        arch='300M_TL',
        init_cfg=dict(
            type='Pretrained', checkpoint='{{$MAPSAGE_EARTH:weights}}/Prithvi_EO_V2_300M_TL.pt')),
    neck=dict(
        type='Feature2Pyramid', embed_dim=1024, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type='UPerHead',
        in_channels=[1024, 1024, 1024, 1024],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=256,
        dropout_ratio=0.1,
        num_classes=2,
        norm_cfg=norm_cfg,
        align_corners=False,
        loss_decode=dict(type='CrossEntropyLoss', loss_weight=1.0, avg_non_ignore=True)),
    train_cfg=dict(),
    test_cfg=dict(mode='whole'))
optim_wrapper = dict(
    type='OptimWrapper',
    constructor='LayerDecayConstructor',
    paramwise_cfg=dict(decay_rate=0.8),
    optimizer=dict(type='AdamW', lr=1e-4, weight_decay=0.05))
param_scheduler = [
    dict(type='LinearLR', start_factor=0.01, begin=0, end=500, by_epoch=False),
    dict(type='PolyLR', power=1.0, eta_min=0.0, begin=500, end=max_iters, by_epoch=False)
]
train_cfg = dict(max_iters=max_iters, val_interval=max_iters // 10)
default_hooks = dict(logger=dict(interval=50), checkpoint=dict(interval=max_iters // 10))
randomness = dict(seed=0)
