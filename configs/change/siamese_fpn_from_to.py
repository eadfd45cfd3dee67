"""Siamese EfficientNet-Lite0 FPN on made pairs of two dates: from which class to which class.

The classes at both dates become nine from-to classes, such as 'forest > barren'. Leave
`transitions` out for all pairs of classes; num_classes is their number and one for 'unchanged'.

Command:  python tools/make_demo_data.py data/change --change
          python tools/train.py configs/change/siamese_fpn_from_to.py
Hardware: one NVIDIA H200, 2026-11-27
Score:    F1 74.4, SeK 30.0 after 682 steps, seed 0 (docs/benchmarks.md)
"""

_base_ = './siamese_fpn_change.py'

classes_of_both_dates = dict(
    land_classes=('background', 'building', 'road', 'water', 'barren', 'forest', 'agriculture'),
    land_palette=[
        [255, 255, 255],
        [255, 0, 0],
        [255, 255, 0],
        [0, 0, 255],
        [159, 129, 183],
        [0, 255, 0],
        [255, 195, 128],
    ],
    transitions=[
        'background > building',
        'barren > building',
        'forest > building',
        'agriculture > building',
        'forest > barren',
        'background > water',
        'barren > water',
        'forest > water',
        'agriculture > water',
    ],
    # The files hold 1 to 7, and 0 at both dates where nothing has changed, as in SECOND.
    reduce_semantic_zero_label=True,
)
train_pipeline = [
    dict(type='LoadChangePair'),
    dict(type='LoadChangeLabels'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    # No ExchangeDates: nothing here turns from 'building' into 'forest'.
    dict(type='ShiftDate', pixels=2),
    dict(type='JitterDates'),
    dict(type='PackStackInputs'),
]
train_dataloader = dict(
    dataset=dict(
        **classes_of_both_dates,
        data_prefix=dict(
            _delete_=True,
            img_path_from='train/A',
            img_path_to='train/B',
            seg_map_path_from='train/label_A',
            seg_map_path_to='train/label_B',
        ),
        pipeline=train_pipeline,
    )
)
val_dataloader = dict(
    dataset=dict(
        **classes_of_both_dates,
        data_prefix=dict(
            _delete_=True,
            img_path_from='val/A',
            img_path_to='val/B',
            seg_map_path_from='val/label_A',
            seg_map_path_to='val/label_B',
        ),
    )
)
test_dataloader = val_dataloader
val_evaluator = dict(type='ChangeMetric')
test_evaluator = val_evaluator

model = dict(decode_head=dict(num_classes=10))
