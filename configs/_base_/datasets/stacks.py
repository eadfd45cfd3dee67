"""Windows of places with several sensors and dates; a config adds the places and the classes.

Set ``sensors``, ``labels``, ``window``, ``metainfo`` and the folders of the datasets, as
configs/earth/olmoearth_base_pastis.py does. docs/how-to/scene-stacks.md explains them.
"""

train_pipeline = [
    dict(type='LoadSceneStack'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='DropDates', prob=0.1),  # one date of a sensor always stays
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
    batch_size=2,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(type='SceneStackDataset', pipeline=train_pipeline),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=4,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(type='SceneStackDataset', pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = [dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU'])]
test_evaluator = val_evaluator
