"""Loops, checkpoints, hooks and tests of MMEngine as changes to the tiny config."""

from __future__ import annotations

from feature import EPOCHS, TEST, TRAIN_AND_TEST, Feature
from tiny_host import tiles

LOOPS = (
    Feature('iterations', core=True, stages=TRAIN_AND_TEST, preview=True),
    Feature('epochs', EPOCHS, core=True, stages=TRAIN_AND_TEST),
    Feature(
        'loops_by_epoch_flag',
        {**EPOCHS, 'train_cfg': dict(by_epoch=True, max_epochs=1), 'val_cfg': {}, 'test_cfg': {}},
        TRAIN_AND_TEST,
    ),
    Feature(
        'iterations_of_a_finite_sampler',
        {
            'train_dataloader.sampler': dict(type='DefaultSampler', shuffle=True),
            'train_dataloader.batch_size': 3,
        },
    ),
    Feature(
        'epochs_with_a_short_last_batch',
        {**EPOCHS, 'train_dataloader.batch_size': 3, 'val_dataloader.batch_size': 3},
    ),
    Feature(
        'epochs_that_drop_the_last_batch',
        {**EPOCHS, 'train_dataloader.batch_size': 3, 'train_dataloader.drop_last': True},
    ),
    Feature('epochs_cut_short', {**EPOCHS, 'train_dataloader.num_batch_per_epoch': 2}),
    Feature(
        'epochs_with_iteration_counters',
        {
            **EPOCHS,
            'log_processor.by_epoch': False,
            'param_scheduler': [dict(type='PolyLR', end=8, by_epoch=False)],
            'default_hooks.checkpoint': dict(type='CheckpointHook', interval=3, by_epoch=False),
        },
    ),
    Feature('late_validation', {**EPOCHS, 'train_cfg.max_epochs': 3, 'train_cfg.val_begin': 2}),
    Feature(
        'dynamic_validation_by_iteration',
        {
            'train_cfg': dict(
                type='IterBasedTrainLoop', max_iters=6, val_interval=4, dynamic_intervals=[(3, 1)]
            )
        },
    ),
    Feature(
        'dynamic_validation_by_epoch',
        {
            **EPOCHS,
            'train_cfg.max_epochs': 3,
            'train_cfg.val_interval': 2,
            'train_cfg.dynamic_intervals': [(2, 1)],
        },
    ),
    Feature('no_validation', {'val_cfg': ..., 'val_dataloader': ..., 'val_evaluator': ...}),
    Feature('validation_alone', stages=(({}, 'val'),), core=True, preview=True),
    Feature('test_alone', stages=TEST, core=True, preview=True),
    Feature('tested_before_trained', stages=(({}, 'test train'),), core=True),
    Feature('validated_and_tested_before_trained', stages=(({}, 'val test train'),)),
    Feature(
        'half_precision_validation', {'val_cfg.fp16': True, 'test_cfg.fp16': True}, TRAIN_AND_TEST
    ),
    Feature('a_loop_of_the_users', {'train_cfg.type': 'TwiceAsOftenLoop'}),
    Feature(
        'no_seed_for_cudnn',
        {'randomness': dict(seed=3, deterministic=False), 'env_cfg': dict(cudnn_benchmark=True)},
    ),
    Feature('deterministic', {'randomness': dict(seed=3, deterministic=True)}),
    Feature('seed_by_rank', {'randomness': dict(seed=3, diff_rank_seed=True)}),
    Feature(
        'process_settings',
        {
            'env_cfg': dict(
                mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
                dist_cfg=dict(backend='gloo'),
                resource_limit=4096,
            )
        },
    ),
)

CHECKPOINTS = (
    Feature(
        'kept_checkpoints',
        core=True,
        changes={
            'default_hooks.checkpoint': dict(
                type='CheckpointHook',
                by_epoch=False,
                interval=1,
                max_keep_ckpts=2,
                save_best='mIoU',
                rule='greater',
            ),
            'train_cfg.val_interval': 2,
        },
    ),
    Feature(
        'two_best_checkpoints',
        {
            **EPOCHS,
            'default_hooks.checkpoint': dict(
                type='CheckpointHook',
                interval=1,
                max_keep_ckpts=1,
                save_best=['mIoU', 'aAcc'],
                rule=['greater', 'less'],
                published_keys=['meta', 'state_dict'],
            ),
        },
    ),
    Feature(
        'best_of_any', {'default_hooks.checkpoint.save_best': 'auto', 'train_cfg.val_interval': 2}
    ),
    Feature(
        'no_last_checkpoint',
        {'default_hooks.checkpoint.save_last': False, 'default_hooks.checkpoint.interval': 4},
    ),
    Feature('last_checkpoint_only', {'default_hooks.checkpoint.interval': -1}),
    Feature(
        'late_checkpoints',
        {'default_hooks.checkpoint.save_begin': 4, 'default_hooks.checkpoint.interval': 2},
    ),
    Feature(
        'bare_checkpoints',
        {
            'default_hooks.checkpoint.save_optimizer': False,
            'default_hooks.checkpoint.save_param_scheduler': False,
        },
    ),
    Feature('named_checkpoints', {'default_hooks.checkpoint.filename_tmpl': 'step-{}.pth'}),
    Feature(
        'checkpoints_elsewhere',
        {
            'default_hooks.checkpoint.out_dir': '{work_dir}/../kept',
            'default_hooks.checkpoint.max_keep_ckpts': 1,
        },
    ),
    Feature(
        'checkpoints_through_a_backend',
        {'default_hooks.checkpoint.backend_args': dict(backend='local')},
    ),
    Feature(
        'resumed_iterations',
        core=True,
        stages=(({'train_cfg.max_iters': 3}, 'train'), ({'resume': True}, 'train')),
    ),
    Feature(
        'resumed_epochs',
        {**EPOCHS, 'train_cfg.val_interval': 2},
        core=True,
        stages=(({'train_cfg.max_epochs': 1}, 'train'), ({'resume': True}, 'train')),
    ),
    Feature(
        'resumed_from_a_named_checkpoint',
        stages=(
            ({'train_cfg.max_iters': 4, 'default_hooks.checkpoint.interval': 2}, 'train'),
            ({'resume': True, 'load_from': '{work_dir}/iter_2.pth'}, 'train'),
        ),
    ),
    Feature(
        'resumed_with_a_best_checkpoint',
        {
            'train_cfg.val_interval': 3,
            'default_hooks.checkpoint.save_best': 'mIoU',
            'default_hooks.checkpoint.interval': 1,
            'default_hooks.checkpoint.max_keep_ckpts': 2,
        },
        (({'train_cfg.max_iters': 4}, 'train'), ({'resume': True}, 'train')),
    ),
    Feature('resumed_where_there_is_nothing', {'resume': True}),
    Feature(
        'weights_of_another_run',
        stages=(
            ({'train_cfg.max_iters': 2}, 'train'),
            ({'load_from': '{work_dir}/iter_2.pth', 'optim_wrapper.optimizer.lr': 0.01}, 'train'),
        ),
    ),
    Feature(
        'tested_with_the_weights_of_a_run',
        stages=(({}, 'train'), ({'load_from': '{work_dir}/iter_3.pth'}, 'test')),
    ),
    Feature(
        'weights_by_init_cfg',
        stages=(
            ({'train_cfg.max_iters': 2}, 'train'),
            (
                {'model.init_cfg': dict(type='Pretrained', checkpoint='{work_dir}/iter_2.pth')},
                'train',
            ),
        ),
    ),
    Feature(
        'a_missing_checkpoint', {'load_from': '{work_dir}/none.pth'}, fails='FileNotFoundError'
    ),
    Feature(
        'nested_meta_information',
        {'train_dataloader.dataset.metainfo.sensor': dict(bands=dict(red=(0.6, 0.7)), name='S2')},
    ),
)

HOOKS = (
    Feature(
        'early_stopping',
        core=True,
        changes={
            'train_cfg.val_interval': 1,
            'train_cfg.max_iters': 6,
            'custom_hooks.+': dict(
                type='EarlyStoppingHook', monitor='mIoU', min_delta=100.0, patience=2
            ),
        },
    ),
    Feature(
        'early_stopping_at_a_goal',
        {
            **EPOCHS,
            'train_cfg.max_epochs': 3,
            'custom_hooks.+': dict(
                type='EarlyStoppingHook', monitor='aAcc', rule='greater', stopping_threshold=0.5
            ),
        },
    ),
    Feature(
        'ema',
        core=True,
        stages=TRAIN_AND_TEST,
        changes={'custom_hooks.+': dict(type='EMAHook', momentum=0.2)},
    ),
    Feature(
        'ema_of_buffers',
        {'custom_hooks.+': dict(type='EMAHook', momentum=0.2, update_buffers=True, begin_iter=2)},
        TRAIN_AND_TEST,
    ),
    Feature(
        'ema_with_annealed_momentum',
        {
            'custom_hooks.+': dict(
                type='EMAHook', ema_type='MomentumAnnealingEMA', gamma=3, strict_load=True
            )
        },
    ),
    Feature(
        'stochastic_weight_average',
        {
            **EPOCHS,
            'train_cfg.max_epochs': 3,
            'custom_hooks.+': dict(
                type='EMAHook', ema_type='StochasticWeightAverage', begin_epoch=1
            ),
        },
    ),
    Feature(
        'ema_resumed',
        {'custom_hooks.+': dict(type='EMAHook', momentum=0.2)},
        (({'train_cfg.max_iters': 3}, 'train'), ({'resume': True}, 'train test')),
    ),
    Feature(
        'empty_cache',
        {
            'custom_hooks.+': dict(
                type='EmptyCacheHook', before_epoch=True, after_epoch=True, after_iter=True
            )
        },
    ),
    Feature('synchronized_buffers', {'custom_hooks.+': dict(type='SyncBuffersHook')}),
    Feature(
        'profiler',
        {
            'custom_hooks.+': dict(
                type='ProfilerHook',
                by_epoch=False,
                profile_times=2,
                json_trace_path='{work_dir}/profile.trace',
            )
        },
    ),
    Feature(
        'naive_visualization',
        {'custom_hooks.+': dict(type='NaiveVisualizationHook', interval=100)},
        TRAIN_AND_TEST,
    ),
    Feature(
        'naive_visualization_of_batches_it_cannot_read',
        {'custom_hooks.+': dict(type='NaiveVisualizationHook', interval=1)},
        TEST,
        fails='TypeError',
    ),
    Feature(
        'drawn_predictions',
        {'default_hooks.visualization': dict(type='SegVisualizationHook', draw=True, interval=1)},
        TRAIN_AND_TEST,
    ),
    Feature(
        'default_hooks_by_name',
        {
            'default_hooks.timer': dict(type='IterTimerHook'),
            'default_hooks.runtime_info': dict(type='RuntimeInfoHook'),
            'default_hooks.param_scheduler': dict(type='ParamSchedulerHook'),
            'default_hooks.sampler_seed': dict(type='DistSamplerSeedHook'),
        },
    ),
    Feature(
        'default_hooks_left_out',
        {**EPOCHS, 'default_hooks.sampler_seed': None, 'default_hooks.param_scheduler': None},
    ),
    Feature(
        'a_log_of_epochs',
        {
            **EPOCHS,
            'default_hooks.logger': dict(
                type='LoggerHook',
                interval=3,
                ignore_last=False,
                log_metric_by_epoch=True,
                interval_exp_name=4,
            ),
            'log_processor': dict(
                by_epoch=True,
                window_size=2,
                custom_cfg=[
                    dict(
                        data_src='loss', log_name='loss_max', method_name='max', window_size='epoch'
                    ),
                    dict(
                        data_src='loss',
                        log_name='loss_all',
                        method_name='mean',
                        window_size='global',
                    ),
                ],
            ),
        },
    ),
    Feature(
        'a_log_elsewhere',
        {
            'default_hooks.logger': dict(
                type='LoggerHook',
                interval=2,
                out_dir='{work_dir}/../logs',
                keep_local=False,
                out_suffix=('.json', '.log'),
            )
        },
    ),
    Feature('a_hook_of_the_users', {'custom_hooks.+': dict(type='HalvingHook', priority=30)}),
    Feature(
        'a_hook_that_reads_the_iteration_before_a_test',
        stages=(
            ({}, 'train'),
            (
                {'custom_hooks.+': dict(type='ReadingHook'), 'load_from': '{work_dir}/iter_3.pth'},
                'test',
            ),
        ),
    ),
    Feature(
        'a_hook_that_changes_the_pipeline',
        {**EPOCHS, 'train_cfg.max_epochs': 3, 'custom_hooks.+': dict(type='PipelineSwitchHook')},
    ),
    Feature(
        'a_hook_that_fails',
        {'custom_hooks.+': dict(type='HalvingHook', fail_at=3)},
        fails='ArithmeticError',
    ),
    Feature('an_unknown_hook', {'custom_hooks.+': dict(type='NoSuchHook')}, fails='KeyError'),
)

FLIPS = [
    dict(
        type='TestTimeAug',
        transforms=[
            [
                dict(type='Resize', scale_factor=1.0, keep_ratio=True),
                dict(type='Resize', scale_factor=1.5, keep_ratio=True),
            ],
            [
                dict(type='RandomFlip', prob=0.0, direction='horizontal'),
                dict(type='RandomFlip', prob=1.0, direction='horizontal'),
            ],
            [dict(type='LoadAnnotations')],
            [dict(type='PackSegInputs')],
        ],
    )
]

TESTS = (
    Feature(
        'test_time_augmentation',
        core=True,
        stages=(
            ({}, 'train'),
            (
                {
                    'load_from': '{work_dir}/iter_6.pth',
                    'custom_hooks.+': dict(type='PrepareTTAHook', tta_cfg=dict(type='SegTTAModel')),
                    'test_dataloader.batch_size': 1,
                    'test_dataloader.dataset.pipeline': [dict(type='LoadImageFromFile'), *FLIPS],
                    'model.data_preprocessor.size': ...,
                    'model.data_preprocessor.size_divisor': 4,
                },
                'test',
            ),
        ),
    ),
    Feature(
        'tested_without_training_data',
        {'train_dataloader.dataset.data_root': '/nowhere'},
        TEST,
        preview=True,
        core=True,
    ),
    Feature(
        'sliding_windows',
        {'model.test_cfg': dict(mode='slide', crop_size=(12, 12), stride=(6, 6))},
        TEST,
    ),
    Feature(
        'written_masks',
        {'test_evaluator.output_dir': '{work_dir}/masks', 'test_evaluator.keep_results': True},
        TRAIN_AND_TEST,
        core=True,
    ),
    Feature(
        'written_masks_without_labels',
        {
            'test_evaluator.output_dir': '{work_dir}/masks',
            'test_evaluator.format_only': True,
            'test_dataloader.dataset': tiles(
                data_prefix=dict(img_path='img/val'),
                test_mode=True,
                pipeline=[dict(type='LoadImageFromFile'), dict(type='PackSegInputs')],
            ),
        },
        TEST,
    ),
    Feature(
        'several_metrics',
        {
            'val_evaluator': [
                dict(type='IoUMetric', iou_metrics=['mIoU', 'mDice', 'mFscore']),
                dict(type='IoUMetric', prefix='again'),
            ],
            'test_evaluator': [
                dict(type='IoUMetric', iou_metrics=['mIoU']),
                dict(type='DumpResults', out_file_path='{work_dir}/results.pkl'),
            ],
        },
        TRAIN_AND_TEST,
    ),
    Feature(
        'tensorboard',
        {
            'visualizer.vis_backends': [
                dict(type='LocalVisBackend'),
                dict(type='TensorboardVisBackend'),
            ]
        },
    ),
)
