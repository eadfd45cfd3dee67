"""Optimization, schedules, datasets, loaders and other models as changes to the tiny config."""

from __future__ import annotations

from typing import Any, Dict

from feature import EPOCHS, TRAIN_AND_TEST, Changes, Feature
from tiny_host import IGNORED, LOAD, tiles

OPTIMIZATION = (
    Feature(
        'bfloat16',
        core=True,
        changes={'optim_wrapper.type': 'AmpOptimWrapper', 'optim_wrapper.dtype': 'bfloat16'},
    ),
    Feature(
        'bfloat16_with_clipping_and_accumulation',
        {
            'optim_wrapper': dict(
                type='AmpOptimWrapper',
                dtype='bfloat16',
                accumulative_counts=2,
                clip_grad=dict(max_norm=0.1),
                optimizer=dict(type='AdamW', lr=1e-2),
            )
        },
    ),
    Feature('accumulation', {'optim_wrapper.accumulative_counts': 2}, core=True),
    Feature('uneven_accumulation', {**EPOCHS, 'optim_wrapper.accumulative_counts': 3}),
    Feature(
        'resumed_after_an_accumulation',
        {'optim_wrapper.accumulative_counts': 2},
        (({'train_cfg.max_iters': 4}, 'train'), ({'resume': True}, 'train')),
    ),
    Feature('clipped_norm', {'optim_wrapper.clip_grad': dict(max_norm=0.05, norm_type=2)}),
    Feature('clipped_values', {'optim_wrapper.clip_grad': dict(type='value', clip_value=0.01)}),
    Feature(
        'adam_by_parts',
        {
            'optim_wrapper.optimizer': dict(type='AdamW', lr=1e-2, weight_decay=0.05),
            'optim_wrapper.paramwise_cfg': dict(
                norm_decay_mult=0.0,
                bias_lr_mult=2.0,
                bypass_duplicate=True,
                custom_keys=dict(decode_head=dict(lr_mult=10.0)),
            ),
        },
    ),
    Feature('scaled_rate', {'auto_scale_lr': dict(enable=True, base_batch_size=16)}),
    Feature(
        'two_optimizers',
        {
            'model': dict(type='TwoOptimizers'),
            'optim_wrapper': dict(
                constructor='OneForEachPart', optimizer=dict(type='SGD', lr=0.05)
            ),
            'param_scheduler': dict(
                first=[dict(type='StepLR', step_size=2, by_epoch=False)],
                second=[dict(type='ExponentialLR', gamma=0.9, by_epoch=False)],
            ),
            'val_cfg': ...,
            'val_dataloader': ...,
            'val_evaluator': ...,
        },
    ),
)

# The kinds of schedulers with their arguments: one run has one for the rate, one for the momentum
# (or the first beta) and one for the weight decay.
SCHEDULES: Dict[str, Changes] = dict(
    Constant=dict(factor=0.3, end=3),
    CosineAnnealing=dict(T_max=4, eta_min=1e-4),
    Exponential=dict(gamma=0.8),
    Linear=dict(start_factor=0.2, end=4),
    MultiStep=dict(milestones=[2, 4], gamma=0.5),
    Step=dict(step_size=2, gamma=0.5),
    Poly=dict(power=0.9, eta_min=1e-4, end=6),
    CosineRestart=dict(periods=[2, 4], restart_weights=[1, 0.5], eta_min=1e-4),
    OneCycle=dict(eta_max=0.2, total_steps=6),
    ReduceOnPlateau=dict(monitor='mIoU', rule='less', patience=0),
)


def scheduler(kind: str, of: str, **changes: Any) -> Changes:
    """Return the config of a scheduler of a kind, of ``'LR'``, ``'Momentum'`` or a parameter."""
    suffix = of if of in ('LR', 'Momentum') else 'ParamScheduler'
    named = dict(param_name=of) if suffix == 'ParamScheduler' else {}
    return dict(SCHEDULES[kind], type=kind + suffix, **named, **changes)


def _schedule(kind: str, adam: bool) -> Feature:
    # OneCycle has no kind for the momentum, and no other parameter than the rate.
    parts = ('LR', 'lr') if kind == 'OneCycle' else ('LR', 'Momentum', 'weight_decay')
    everything = [scheduler(kind, of, by_epoch=False) for of in parts]
    optimizer: Changes = dict(type='SGD', lr=0.05, momentum=0.9, weight_decay=0.01)
    if adam:  # a momentum scheduler sets the first of the betas
        optimizer = dict(type='AdamW', lr=0.01, weight_decay=0.01)
    changes = {'param_scheduler': everything, 'optim_wrapper.optimizer': optimizer}
    if kind == 'ReduceOnPlateau':
        changes['train_cfg.val_interval'] = 1
        for each in everything:
            each.update(by_epoch=True)
    return Feature(f'schedule_{kind}', changes, core=kind == 'Poly')


SCHEDULERS = (
    *(_schedule(kind, adam=index % 2 == 1) for index, kind in enumerate(SCHEDULES)),
    Feature(
        'schedule_warmup_then_cosine',
        {
            'param_scheduler': [
                dict(type='LinearLR', start_factor=0.01, by_epoch=False, begin=0, end=2),
                dict(type='CosineAnnealingLR', T_max=4, by_epoch=False, begin=2, end=6),
            ]
        },
    ),
    Feature(
        'schedule_of_epochs_by_iteration',
        {
            **EPOCHS,
            'param_scheduler': [
                dict(type='CosineAnnealingLR', T_max=2, by_epoch=True, convert_to_iter_based=True)
            ],
        },
    ),
    Feature(
        'schedule_PolyLRRatio',
        {
            'param_scheduler': [
                dict(type='PolyLRRatio', eta_min_ratio=0.1, power=0.9, by_epoch=False, end=6)
            ]
        },
    ),
    Feature(
        'schedule_resumed',
        {'param_scheduler': [scheduler('OneCycle', 'LR', by_epoch=False)]},
        (({'train_cfg.max_iters': 3}, 'train'), ({'resume': True}, 'train')),
    ),
    Feature('no_schedule', {'param_scheduler': ...}),
)


MAPPED: Changes = dict(backend='mapped', path_mapping={'/nowhere/': '{data}/'})
MAPPED_TILES = tiles(
    data_root='/nowhere',
    backend_args=MAPPED,
    pipeline=[dict(step, backend_args=MAPPED) for step in LOAD] + [dict(type='PackSegInputs')],
)
TILES_254 = tiles(
    ignore_index=IGNORED, data_prefix=dict(img_path='img/train', seg_map_path='ann254/train')
)
IGNORE_254: Changes = {
    'model.decode_head.ignore_index': IGNORED,
    'model.data_preprocessor.seg_pad_val': IGNORED,
}

DATASETS = (
    Feature(
        'repeated',
        core=True,
        changes={'train_dataloader.dataset': dict(type='RepeatDataset', times=3, dataset=tiles())},
    ),
    Feature(
        'concatenated',
        core=True,
        changes={
            **EPOCHS,
            'train_dataloader.dataset': dict(type='ConcatDataset', datasets=[tiles(), tiles()]),
        },
    ),
    Feature(
        'balanced',
        {
            **EPOCHS,
            'train_dataloader.dataset': dict(
                type='ClassBalancedDataset',
                oversample_thr=0.9,
                dataset=tiles(type='CategoryDataset'),
            ),
        },
    ),
    Feature(
        'mixed',
        {
            'train_dataloader.dataset': dict(
                type='MultiImageMixDataset',
                dataset=dict(type='ConcatDataset', datasets=[tiles(pipeline=list(LOAD))] * 2),
                pipeline=[dict(type='Resize', scale=(24, 16)), dict(type='PackSegInputs')],
            )
        },
    ),
    Feature(
        'wrapped_twice',
        {
            'train_dataloader.dataset': dict(
                type='RepeatDataset',
                times=2,
                dataset=dict(type='ConcatDataset', datasets=[tiles(), tiles(indices=3)]),
            )
        },
    ),
    Feature(
        'concatenated_validation',
        {
            'val_dataloader.dataset': dict(
                type='ConcatDataset', datasets=[tiles('val'), tiles('train')]
            )
        },
    ),
    Feature('another_ignore_index', {**IGNORE_254, 'train_dataloader.dataset': TILES_254}),
    Feature(
        'repeated_with_another_ignore_index',
        {
            **IGNORE_254,
            'train_dataloader.dataset': dict(type='RepeatDataset', times=2, dataset=TILES_254),
        },
    ),
    Feature(
        'concatenated_with_another_ignore_index',
        {
            **IGNORE_254,
            'train_dataloader.dataset': dict(type='ConcatDataset', datasets=[TILES_254, TILES_254]),
        },
    ),
    Feature(
        'balanced_with_another_ignore_index',
        {
            **IGNORE_254,
            'train_dataloader.dataset': dict(
                type='ClassBalancedDataset',
                oversample_thr=0.9,
                dataset=dict(TILES_254, type='CategoryDataset'),
            ),
        },
    ),
    Feature(
        'repeated_with_a_mapped_folder',
        {'train_dataloader.dataset': dict(type='RepeatDataset', times=2, dataset=MAPPED_TILES)},
    ),
    Feature(
        'concatenated_with_a_mapped_folder',
        {
            'train_dataloader.dataset': dict(
                type='ConcatDataset', datasets=[MAPPED_TILES, MAPPED_TILES]
            )
        },
    ),
    Feature(
        'repeated_very_often',
        {
            'train_dataloader.dataset': dict(type='RepeatDataset', times=40000, dataset=tiles()),
            'train_dataloader.sampler.shuffle': False,
        },
    ),
    Feature(
        'some_indices',
        {'train_dataloader.dataset.indices': [0, 2, 3, 5], 'val_dataloader.dataset.indices': 2},
    ),
    Feature(
        'initialized_late',
        {
            'train_dataloader.dataset.lazy_init': True,
            'train_dataloader.dataset.serialize_data': False,
        },
    ),
    Feature('an_annotation_file', {'train_dataloader.dataset.ann_file': 'train.txt'}),
    Feature(
        'a_stream',
        {
            'train_dataloader.dataset': dict(type='Stream', dataset=tiles()),
            'train_dataloader.sampler': None,
        },
    ),
    Feature(
        'an_unknown_dataset', {'train_dataloader.dataset.type': 'NoSuchDataset'}, fails='KeyError'
    ),
)

LOADERS = (
    Feature(
        'a_sampler_of_the_users',
        {**EPOCHS, 'train_dataloader.sampler': dict(type='EveryOtherSampler', turns=2)},
        core=True,
    ),
    Feature(
        'a_sampler_of_pairs',
        {
            **EPOCHS,
            'train_dataloader.dataset.type': 'PairDataset',
            'train_dataloader.sampler': dict(type='PairSampler'),
        },
    ),
    Feature(
        'a_batch_sampler',
        {**EPOCHS, 'train_dataloader.batch_sampler': dict(type='GrowingBatchSampler')},
    ),
    Feature(
        'batches_of_one_by_default',
        {'val_dataloader.batch_size': ..., 'test_dataloader.batch_size': ...},
        TRAIN_AND_TEST,
    ),
    Feature(
        'one_loader_process',
        {'train_dataloader.num_workers': 1, 'train_dataloader.persistent_workers': True},
    ),
    Feature('an_order_without_shuffling', {'train_dataloader.sampler.shuffle': False}),
    Feature(
        'a_rounded_sampler',
        {
            **EPOCHS,
            'train_dataloader.sampler': dict(
                type='DefaultSampler', shuffle=True, round_up=False, seed=11
            ),
        },
    ),
    Feature('a_mapped_folder', {'train_dataloader.dataset': MAPPED_TILES}),
    Feature(
        'local_backend',
        {
            'train_dataloader.dataset.pipeline.0': dict(
                type='LoadImageFromFile', backend_args=dict(backend='local')
            ),
            'train_dataloader.dataset.backend_args': dict(backend='local'),
        },
    ),
    Feature(
        'a_collate_function',
        {
            'train_dataloader.collate_fn': dict(type='pseudo_collate'),
            'train_dataloader.pin_memory': False,
        },
    ),
)

REGRESSION: Changes = {
    'model': dict(type='Regressor'),
    'train_dataloader.dataset': dict(type='Line'),
    'val_dataloader.dataset': dict(type='Line'),
    'test_dataloader.dataset': dict(type='Line'),
    'val_evaluator': dict(type='CountMetric'),
    'test_evaluator': dict(type='CountMetric'),
}

OTHER_MODELS = (
    Feature('a_model_that_returns_tensors', REGRESSION, TRAIN_AND_TEST, core=True, preview=True),
    Feature(
        'a_model_that_returns_dicts',
        {**REGRESSION, 'model.returns': 'dicts'},
        TRAIN_AND_TEST,
        preview=True,
    ),
    Feature(
        'a_model_that_returns_one_dict',
        {**REGRESSION, 'model.returns': 'dict'},
        TRAIN_AND_TEST,
        preview=True,
        fails='KeyError',
    ),  # MMEngine's loop takes outputs[-1]
    Feature(
        'batches_that_are_tuples',
        {
            **EPOCHS,
            **REGRESSION,
            'train_dataloader.dataset.kind': 'tuple',
            'val_dataloader.dataset.kind': 'tuple',
        },
        preview=True,
    ),
)
