"""NWPU VHR-10 with labels for 40 of 160 images: FixMatch lets the other 120 teach.

Command:  MAPSAGE_NWPU=<folder> bash scripts/start_8card_training.sh \
              configs/nwpu/efficientnet_lite0_fpn_nwpu_40_fixmatch.py
Hardware: one CPU process on a 2-core AMD EPYC with other work, 206 s of processor
          time for the 131 steps (torch 2.13.0, 2026-11-23)
Score:    mIoU 24.9 (20.7 to 32.1) in one process, 131 steps of 4 labeled and 4 unlabeled images
          (three seeds, other images labeled: docs/how-to/few-labels.md); not yet run at 8 ranks
"""

_base_ = './efficientnet_lite0_fpn_nwpu.py'

labeled_names = '{{ fileDirname }}/splits/labeled_40.txt'
# Of an unlabeled image, the log alone sees the mask. Colors change in the strong view, not here.
weak_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadPolygonAnnotations'),
    dict(type='HideLabels'),
    dict(type='RandomResize', scale=(667, 400), ratio_range=(0.75, 1.5), keep_ratio=True),
    dict(type='RandomCrop', crop_size={{_base_.crop_size}}),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PackUnlabeledInputs'),
]
# On one rank four labeled and four unlabeled crops; an epoch is 30 steps there.
train_dataloader = dict(
    batch_size=8,
    sampler=dict(_delete_=True, type='LabeledUnlabeledSampler', labeled=4, unlabeled=4),
    dataset=dict(
        _delete_=True,
        type='SemiSupervisedDataset',
        labeled=dict(
            type='NamedSamples', names=labeled_names, dataset={{_base_.train_dataloader.dataset}}
        ),
        unlabeled=dict(
            type='NamedSamples',
            names=labeled_names,
            exclude=True,
            dataset=dict(
                type={{_base_.dataset_type}},
                data_root={{_base_.data_root}},
                ann_file='train.json',
                data_prefix=dict(img_path='images'),
                pipeline=weak_pipeline,
            ),
        ),
    ),
)
# The teacher is an average of some 50 steps; 0.996, the default, is for thousands of them.
custom_hooks = [dict(type='FixMatchHook', threshold=0.95, momentum=0.98)]
