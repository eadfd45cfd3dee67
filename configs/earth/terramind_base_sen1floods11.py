"""TerraMind Base, fine-tuned with UPerNet on Sen1Floods11: water from Sentinel-1 and Sentinel-2.

Set MAPSAGE_SEN1FLOODS11 to the folder HandLabeled, whose images and labels were put into train/ and
val/ by the published split. Weights: MAPSAGE_EARTH/TerraMind_v1_base.pt.

Command:  bash scripts/start_8card_training.sh configs/earth/terramind_base_sen1floods11.py
Hardware: not yet run
Score:    not yet run. PANGAEA reports 90.6 mIoU for a frozen TerraMind Base
"""
_base_ = ['../_base_/default_runtime.py']

data_root = '{{$MAPSAGE_SEN1FLOODS11:data/sen1floods11}}'
max_iters = 4000
# The dataset reads bands by their number, because the files do not name them; the encoder needs the
# names, in the same order.
files = dict(
    s2=dict(scenes='S2Hand/{place}_S2Hand.tif', bands=list(range(1, 14))),
    s1=dict(scenes='S1Hand/{place}_S1Hand.tif', bands=[1, 2]))
sensors = dict(
    s2=dict(bands=['B01', 'B02', 'B03', 'B04', 'B05', 'B06', 'B07', 'B08', 'B8A', 'B09', 'B10',
                   'B11', 'B12']),
    s1=dict(bands=['VV', 'VH']))
dataset = dict(
    type='SceneStackDataset',
    sensors=files,
    labels='LabelHand/{place}_LabelHand.tif',
    window=512,
    metainfo=dict(classes=('land', 'water'), palette=[[200, 190, 160], [40, 90, 200]]))
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
    dataset=dict(**dataset, data_root=data_root + '/train', pipeline=train_pipeline))
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, data_root=data_root + '/val', pipeline=test_pipeline))
test_dataloader = val_dataloader
val_evaluator = [dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU'])]
test_evaluator = val_evaluator
norm_cfg = dict(type='SyncBN', requires_grad=True)  # becomes BN where the accelerator has no SyncBN
model = dict(
    type='EncoderDecoder',
    data_preprocessor=dict(
        type='StackDataPreProcessor',
        sensors=sensors,
        size=(512, 512),
        pad_val=0,
        seg_pad_val=255,
        test_cfg=dict(size_divisor=16)),
    backbone=dict(
        type='TerraMind',
        sensors=sensors,
        modalities=dict(s2='S2L1C', s1='S1GRD'),
        arch='base',
        init_cfg=dict(
            type='Pretrained', checkpoint='{{$MAPSAGE_EARTH:weights}}/TerraMind_v1_base.pt')),
    neck=dict(
        type='Feature2Pyramid', embed_dim=768, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type='UPerHead',
        in_channels=[768, 768, 768, 768],
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
