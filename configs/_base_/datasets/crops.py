"""Made places with fields of crops: two sensors at six dates, windows of 64 pixels of 10 m.

At a single date a field is green or bare; the crop shows in the order of the dates.

Write them with ``python tools/make_demo_data.py data/crops --stacks``, or set MAPSAGE_CROPS to
where they are. docs/how-to/scene-stacks.md says what to change for places of your own.
"""

data_root = '{{$MAPSAGE_CROPS:data/crops}}'
sensors = dict(
    s2=dict(
        scenes='s2/{place}_{date}.tif',
        bands=['B03', 'B04', 'B08', 'B11'],
        max_dates=6,
        # clouds are 9 in the masks, which have pixels of 20 m
        clouds=dict(mask='scl/{place}_{date}.tif', clear=[4, 5]),
    ),
    s1=dict(scenes='s1/{place}_{date}.tif', bands=['vv', 'vh'], max_dates=6),
)
dataset = dict(
    type='SceneStackDataset',
    sensors=sensors,
    labels='labels',
    metainfo=dict(
        classes=('fallow', 'winter wheat', 'maize', 'two crops', 'meadow', 'rapeseed'),
        palette=[
            [170, 140, 110],
            [225, 190, 60],
            [240, 230, 40],
            [190, 90, 170],
            [60, 150, 60],
            [150, 200, 40],
        ],
    ),
)
train_pipeline = [
    dict(type='LoadSceneStack'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='DropDates', prob=0.1),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PackStackInputs'),
]
test_pipeline = [
    dict(type='LoadSceneStack'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='PackStackInputs'),
]
tta_pipeline = [
    dict(type='LoadSceneStack'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=p, direction='horizontal') for p in (0.0, 1.0)],
            [dict(type='LoadGeoTiffLabels')],
            [dict(type='PackStackInputs')],
        ],
    ),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        **dataset,
        data_root=data_root + '/train',
        window=64,
        windows=dict(type='random', balance='classes'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, data_root=data_root + '/val', window=64, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = [
    dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU']),
    dict(type='SingleClassBaseline'),  # baseline for the mIoU
]
test_evaluator = val_evaluator
