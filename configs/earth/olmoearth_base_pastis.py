"""OlmoEarth v1.2 Base, fine-tuned with UPerNet on PASTIS-R: crops from 12 dates of two sensors.

Set MAPSAGE_PASTIS to a folder with train/ (folds 1 to 3) and val/ (fold 4), made from the arrays as
docs/how-to/earth-encoders.md says. Weights: MAPSAGE_EARTH/weights.pth of OlmoEarth-v1_2-Base.

Command:  bash scripts/start_8card_training.sh configs/earth/olmoearth_base_pastis.py
Hardware: not yet run
Score:    not yet run. U-TAE reaches 63.1 mIoU on fold 5 of PASTIS with all dates
"""
_base_ = ['../_base_/default_runtime.py']

data_root = '{{$MAPSAGE_PASTIS:data/pastis}}'
max_iters = 20000
# The dataset reads bands by their number, because the files do not name them; the encoder needs the
# names, in the same order.
files = dict(
    s2=dict(scenes='s2/{place}_{date}.tif', bands=list(range(1, 11)), max_dates=12),
    s1=dict(scenes='s1/{place}_{date}.tif', bands=[1, 2], max_dates=12))
sensors = dict(
    s2=dict(bands=['B02', 'B03', 'B04', 'B05', 'B06', 'B07', 'B08', 'B8A', 'B11', 'B12'],
            max_dates=12),
    s1=dict(bands=['VV', 'VH'], max_dates=12))
dataset = dict(
    type='SceneStackDataset',
    sensors=files,
    labels='labels/{place}.tif',
    window=64,
    metainfo=dict(
        classes=(
            'background', 'meadow', 'soft winter wheat', 'corn', 'winter barley',
            'winter rapeseed', 'spring barley', 'sunflower', 'grapevine', 'beet',
            'winter triticale', 'winter durum wheat', 'fruits, vegetables, flowers', 'potatoes',
            'leguminous fodder', 'soybeans', 'orchard', 'mixed cereal', 'sorghum'),
        palette=[
            [127, 127, 127], [184, 90, 46], [242, 175, 60], [127, 122, 31], [148, 184, 46],
            [137, 242, 60], [41, 127, 31], [46, 184, 75], [60, 242, 156], [31, 127, 112],
            [46, 162, 184], [60, 156, 242], [31, 52, 127], [60, 46, 184], [137, 60, 242],
            [102, 31, 127], [184, 46, 177], [242, 60, 175], [127, 31, 62]]))
train_pipeline = [
    dict(type='LoadSceneStack'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='DropDates', prob=0.2),
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
    batch_size=4,
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
        size=(64, 64),
        pad_val=0,
        seg_pad_val=255,
        test_cfg=dict(size_divisor=16)),
    backbone=dict(
        type='OlmoEarth',
        sensors=sensors,
        patch_size=4,
        arch='base',
        init_cfg=dict(
            type='Pretrained', checkpoint='{{$MAPSAGE_EARTH:weights}}/weights.pth')),
    neck=dict(
        type='Feature2Pyramid', embed_dim=768, rescales=[4, 2, 1, 0.5], norm_cfg=norm_cfg),
    decode_head=dict(
        type='UPerHead',
        in_channels=[768, 768, 768, 768],
        in_index=[0, 1, 2, 3],
        pool_scales=(1, 2, 3, 6),
        channels=256,
        dropout_ratio=0.1,
        num_classes=19,
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
