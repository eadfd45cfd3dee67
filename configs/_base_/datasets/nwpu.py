"""NWPU VHR-10 as 11-class segmentation, from COCO polygons: 256x256 crops of half-size images.

Tested on whole images, also at half size; the scores are at full size.

Expects ``images/``, ``train.json`` and ``val.json`` in data/nwpu_polygons, or in the folder that
the environment variable MAPSAGE_NWPU names.
"""

dataset_type = 'NWPUPolygonDataset'
data_root = '{{$MAPSAGE_NWPU:data/nwpu_polygons}}'
crop_size = (256, 256)
train_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadPolygonAnnotations'),
    dict(type='RandomResize', scale=(667, 400), ratio_range=(0.75, 1.5), keep_ratio=True),
    # 95 % of the pixels are background, so crops are drawn until one holds an object
    dict(type='RandomCrop', crop_size=crop_size, cat_max_ratio=0.9),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PhotoMetricDistortion'),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='Resize', scale=(667, 400), keep_ratio=True),
    dict(type='LoadPolygonAnnotations'),
    dict(type='PackSegInputs'),
]
tta_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='Resize', scale_factor=r, keep_ratio=True) for r in (0.5, 0.75)],
            [dict(type='RandomFlip', prob=p, direction='horizontal') for p in (0.0, 1.0)],
            [dict(type='LoadPolygonAnnotations')],
            [dict(type='PackSegInputs')],
        ],
    ),
]
train_dataloader = dict(
    batch_size=4,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file='train.json',
        data_prefix=dict(img_path='images'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type=dataset_type,
        data_root=data_root,
        ann_file='val.json',
        data_prefix=dict(img_path='images'),
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = [
    dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU']),
    dict(type='SingleClassBaseline'),  # baseline for the mIoU
]
test_evaluator = val_evaluator
