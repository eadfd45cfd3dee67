"""Six made scenes with red, green, blue and near infrared, uint16, and polygons: windows of 256.

The scenes are neighbors that overlap. Training and validation are blocks of the ground, so that no
pixel of one is in the other.

Write them with ``python tools/make_demo_data.py data/geotiff --geotiff``, or set MAPSAGE_GEOTIFF to
where they are. docs/tutorials/scenes.md says what to change for scenes of your own.
"""

dataset = dict(
    type='GeoTiffDataset',
    data_root='{{$MAPSAGE_GEOTIFF:data/geotiff}}',
    scenes='scenes',
    labels='labels.gpkg',
    bands=[1, 2, 3, 4],
    window=256,
    outside=255,  # pixels without a polygon have no label; 0 would make them background
    metainfo=dict(
        classes=('background', 'building', 'road', 'water', 'barren', 'forest', 'agricultural'),
        palette=[
            [255, 255, 255],
            [255, 0, 0],
            [255, 255, 0],
            [0, 0, 255],
            [159, 129, 183],
            [0, 255, 0],
            [255, 195, 128],
        ],
    ),
)
train_pipeline = [
    dict(type='LoadGeoTiffWindow'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PackSegInputs'),
]
test_pipeline = [
    dict(type='LoadGeoTiffWindow'),
    dict(type='LoadGeoTiffLabels'),
    dict(type='PackSegInputs'),
]
tta_pipeline = [
    dict(type='LoadGeoTiffWindow'),
    dict(
        type='TestTimeAug',
        transforms=[
            [dict(type='RandomFlip', prob=p, direction='horizontal') for p in (0.0, 1.0)],
            [dict(type='LoadGeoTiffLabels')],
            [dict(type='PackSegInputs')],
        ],
    ),
]
# A block of 150 m is for training or for validation, whatever scene shows it; 16 m around one for
# validation are for neither. A margin of half a window would be 64 m; the log warns of that. In
# these few small scenes it would leave 45 % of the pixels for training, where 16 m leave 70 %.
split = dict(by='blocks', size=150, unit='meters', share=0.2, margin=16)
train_dataloader = dict(
    batch_size=4,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='InfiniteSampler', shuffle=True),
    dataset=dict(
        **dataset,
        split=dict(**split, part='train'),
        windows=dict(type='random', balance='classes'),
        pipeline=train_pipeline,
    ),
)
val_dataloader = dict(
    batch_size=1,
    num_workers=2,
    persistent_workers=True,
    sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(**dataset, split=dict(**split, part='val'), stride=192, pipeline=test_pipeline),
)
test_dataloader = val_dataloader
val_evaluator = [
    dict(type='ConfusionMatrixMetric', iou_metrics=['mIoU']),
    dict(type='SingleClassBaseline'),  # baseline for the mIoU
]
test_evaluator = val_evaluator
