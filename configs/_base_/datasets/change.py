"""Made pairs of two dates in Open-CD's folders, 128x128: 600 to train on, 200 from other scenes.

Houses are built, forest is felled, land is flooded; sun, camera and crops differ, too, and are no
change. Write them with ``python tools/make_demo_data.py data/change --change``, or set
MAPSAGE_CHANGE to where they are. docs/how-to/change.md says what to change for pairs of your own.
"""

# One sensor with two dates. Dataset, data_preprocessor and backbone have the same sensors.
sensors = dict(image=dict(bands=[1, 2, 3], max_dates=2))
dataset = dict(
    type='ChangeDataset',
    data_root='{{$MAPSAGE_CHANGE:data/change}}',
    sensors=sensors,
    max_shift=1.0,  # pixels; a larger shift between the dates is a warning
)
train_pipeline = [
    dict(type='LoadChangePair'),
    dict(type='LoadChangeLabels'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    # Without a meaning that depends on the direction, the dates are exchanged in half of the pairs.
    dict(type='ExchangeDates', prob=0.5),
    dict(type='ShiftDate', pixels=2),
    dict(type='JitterDates'),
    dict(type='PackStackInputs'),
]
test_pipeline = [
    dict(type='LoadChangePair'),
    dict(type='LoadChangeLabels'),
    dict(type='PackStackInputs'),
]
tta_pipeline = [
    dict(type='LoadChangePair'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=p, direction='horizontal') for p in (0.0, 1.0)],
            [dict(type='LoadChangeLabels')],
            [dict(type='PackStackInputs')],
        ],
    ),
]
train_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        **dataset,
        data_prefix=dict(
            img_path_from='train/A', img_path_to='train/B', seg_map_path='train/label'
        ),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=8,
    num_workers=0,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        **dataset,
        data_prefix=dict(img_path_from='val/A', img_path_to='val/B', seg_map_path='val/label'),
        test_mode=True,
        pipeline=test_pipeline,
    ),
)
test_dataloader = val_dataloader
val_evaluator = dict(type='ChangeMetric')
test_evaluator = val_evaluator
