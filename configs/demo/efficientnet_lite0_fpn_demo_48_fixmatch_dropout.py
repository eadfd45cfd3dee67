"""FixMatch on 48 of 600 tiles, with complementary channel dropout of the features (UniMatch V2).

Command:  bash scripts/start_8card_training.sh \
              configs/demo/efficientnet_lite0_fpn_demo_48_fixmatch_dropout.py
Hardware: 8 simulated cards on a 2-core AMD EPYC with much other work, the first 6 steps at 2.6 s a
          step (torch 2.13.0, 2026-11-23)
Score:    not yet run over its 200 steps
"""
_base_ = './efficientnet_lite0_fpn_demo.py'

labeled_names = '{{ fileDirname }}/splits/labeled_48.txt'
# Of an unlabeled tile, the log alone sees the mask. Colors change in the strong view, not here.
weak_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations'),
    dict(type='HideLabels'),
    dict(type='RandomFlip', prob=0.5, direction='horizontal'),
    dict(type='RandomFlip', prob=0.5, direction='vertical'),
    dict(type='PackUnlabeledInputs')
]
# Global batch 32 at 8 ranks: 16 labeled and 16 unlabeled. An epoch is 35 steps.
train_dataloader = dict(
    batch_size=4,
    sampler=dict(_delete_=True, type='LabeledUnlabeledSampler', labeled=2, unlabeled=2),
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
                data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'),
                pipeline=weak_pipeline))))
custom_hooks = [dict(type='FixMatchHook', threshold=0.95, channel_dropout=True)]
