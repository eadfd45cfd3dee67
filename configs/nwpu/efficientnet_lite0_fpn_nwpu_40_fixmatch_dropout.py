"""FixMatch on 40 of 160 images, with complementary channel dropout of the features (UniMatch V2).

Command:  MAPSAGE_NWPU=<folder> bash scripts/start_8card_training.sh \
              configs/nwpu/efficientnet_lite0_fpn_nwpu_40_fixmatch_dropout.py
Hardware: 2 CPU ranks on a 2-core AMD EPYC with much other work, the first 8 steps at 9.5 s a step
          (torch 2.13.0, 2026-11-23)
Score:    not yet run over its 300 steps
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
    dict(type='PackUnlabeledInputs')
]
# On one rank four labeled and four unlabeled crops; an epoch is 30 steps there.
train_dataloader = dict(
    batch_size=8,
    sampler=dict(_delete_=True, type='LabeledUnlabeledSampler', labeled=4, unlabeled=4),
    dataset=dict(
        _delete_=True,
        type='SemiSupervisedDataset',
        labeled=dict(
            type='NamedSamples',
            names=labeled_names,
            dataset={{_base_.train_dataloader.dataset}}),
        unlabeled=dict(
            type='NamedSamples',
            names=labeled_names,
            exclude=True,
            dataset=dict(
                type={{_base_.dataset_type}},
                data_root={{_base_.data_root}},
                ann_file='train.json',
                data_prefix=dict(img_path='images'),
                pipeline=weak_pipeline))))
custom_hooks = [dict(type='FixMatchHook', threshold=0.95, channel_dropout=True)]
