"""Random configs of the kinds that MMEngine's and MMSegmentation's own configs are of."""

from __future__ import annotations

import random
from typing import Any, List, Tuple

from feature import EPOCHS, Changes
from tiny_host import LOAD, tiles
from training_features import IGNORE_254, SCHEDULES, TILES_254, scheduler


class StockConfig:
    """A random config that MMEngine runs to its end.

    Args:
        seed: Number that decides everything.

    Attributes:
        changes: Changes to the tiny config; see :func:`tiny_host.changed`.
        stages: Runners that are built one after the other, and their methods to call.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.by_epoch = self._chance(0.5)
        self.changes: Changes = dict(EPOCHS) if self.by_epoch else {}
        self.changes['randomness'] = dict(seed=self._random.randrange(1000))
        self._add_loop()
        self._add_data()
        self._add_optimization()
        self._add_schedule()
        self._add_hooks()
        self.stages = self._draw_stages()

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _one(self, *choices: Any) -> Any:
        return self._random.choice(choices)

    def _maybe(self, probability: float, **given: Any) -> Changes:
        """Return each of the arguments with a probability."""
        return {name: value for name, value in given.items() if self._chance(probability)}

    def _add_loop(self) -> None:
        if self.by_epoch:
            self._length = self._one(1, 2, 3)
            loop = dict(
                type='EpochBasedTrainLoop',
                max_epochs=self._length,
                **self._maybe(0.3, val_begin=2, val_interval=2),
            )
        else:
            self._length = self._random.randint(2, 7)
            loop = dict(
                type='IterBasedTrainLoop',
                max_iters=self._length,
                val_interval=self._random.randint(1, 7),
                **self._maybe(0.2, dynamic_intervals=[(2, 1)]),
            )
        self.changes['train_cfg'] = loop
        self.changes['log_processor'] = dict(
            by_epoch=self.by_epoch, window_size=self._one(1, 2, 10)
        )

    def _add_data(self) -> None:
        ignores_254 = self._chance(0.2)
        one = dict(TILES_254) if ignores_254 else tiles()
        self.changes.update(IGNORE_254 if ignores_254 else {})
        plain = dict(one, pipeline=list(LOAD))
        two = dict(type='ConcatDataset', datasets=[one, dict(one, indices=3)])
        dataset = self._one(
            one,
            dict(one, indices=5),
            dict(one, serialize_data=False),
            two,
            dict(type='RepeatDataset', times=2, dataset=one),
            dict(type='RepeatDataset', times=2, dataset=two),
            dict(
                type='ClassBalancedDataset',
                oversample_thr=0.9,
                dataset=dict(one, type='CategoryDataset'),
            ),
            dict(
                type='MultiImageMixDataset',
                dataset=dict(type='ConcatDataset', datasets=[plain, plain]),
                pipeline=[dict(type='Resize', scale=(16, 16)), dict(type='PackSegInputs')],
            ),
        )
        finite = [
            dict(
                type='DefaultSampler',
                shuffle=self._chance(0.7),
                **self._maybe(0.3, round_up=False, seed=4),
            ),
            dict(type='EveryOtherSampler'),
        ]
        endless = dict(type='InfiniteSampler', shuffle=self._chance(0.7))
        sampler = self._one(*(finite if self.by_epoch else [endless, endless, finite[0]]))
        self.changes['train_dataloader'] = dict(
            dataset=dataset,
            sampler=sampler,
            batch_size=self._one(1, 2, 3),
            num_workers=0,
            **self._maybe(0.3, drop_last=True),
        )
        if sampler is not endless and self._chance(0.25):
            self.changes['train_dataloader']['batch_sampler'] = dict(type='GrowingBatchSampler')
            self.changes['train_dataloader'].pop('drop_last', None)
            self.changes['train_dataloader']['batch_size'] = 2
        for split in ('val', 'test'):
            self.changes[f'{split}_dataloader.batch_size'] = self._one(1, 2, 3)
        if self._chance(0.2):
            self.changes['model.test_cfg'] = dict(mode='slide', crop_size=(12, 12), stride=(6, 6))

    def _add_optimization(self) -> None:
        self._optimizer = self._one('SGD', 'SGD', 'Adam', 'AdamW')
        optimizer = dict(
            type=self._optimizer, lr=self._one(0.05, 0.01, 0.001), weight_decay=self._one(0.0, 0.01)
        )
        if self._optimizer == 'SGD':
            optimizer['momentum'] = 0.9
        wrapper: Changes = dict(type='OptimWrapper', optimizer=optimizer)
        if self._chance(0.25):
            wrapper.update(type='AmpOptimWrapper', dtype='bfloat16')
        wrapper.update(
            self._maybe(
                0.3,
                accumulative_counts=self._one(2, 3),
                clip_grad=self._one(dict(max_norm=0.1), dict(type='value', clip_value=0.02)),
                paramwise_cfg=dict(
                    norm_decay_mult=0.0, custom_keys=dict(decode_head=dict(lr_mult=10.0))
                ),
            )
        )
        self.changes['optim_wrapper'] = wrapper

    def _add_schedule(self) -> None:
        whole: List[Changes] = []
        for of in ('LR', 'Momentum', 'weight_decay'):
            if not self._chance(0.8 if of == 'LR' else 0.2):
                continue
            kinds = [kind for kind in SCHEDULES if kind not in ('OneCycle', 'CosineRestart')]
            kind = self._one(*kinds)
            on_metrics = kind == 'ReduceOnPlateau'
            whole.append(scheduler(kind, of, by_epoch=on_metrics or self.by_epoch))
            if self.by_epoch and kind in ('CosineAnnealing', 'Poly') and of == 'LR':
                whole[-1].update(self._maybe(0.5, convert_to_iter_based=True))
        if self._chance(0.2):  # a warm-up, as in most of MMSegmentation's configs
            whole.insert(0, dict(type='LinearLR', start_factor=0.1, by_epoch=False, end=2))
        self.changes['param_scheduler'] = whole or ...

    def _add_hooks(self) -> None:
        by_epoch = self.by_epoch and self._chance(0.8)
        self.changes['default_hooks.checkpoint'] = dict(
            type='CheckpointHook',
            by_epoch=by_epoch,
            interval=self._one(1, 2, 3),
            **self._maybe(
                0.3,
                max_keep_ckpts=self._one(1, 2),
                save_best=self._one('mIoU', 'auto', ['mIoU', 'aAcc']),
                save_last=False,
                save_begin=2,
            ),
            **self._maybe(0.1, save_optimizer=False),
        )
        if 'save_best' in self.changes['default_hooks.checkpoint']:
            self.changes['default_hooks.checkpoint']['rule'] = 'greater'
        self.changes['default_hooks.logger'] = dict(
            type='LoggerHook',
            interval=self._one(1, 2, 5),
            log_metric_by_epoch=self.by_epoch,
            **self._maybe(0.3, ignore_last=False),
        )
        ema = dict(
            type='EMAHook',
            ema_type=self._one(
                'ExponentialMovingAverage', 'StochasticWeightAverage', 'MomentumAnnealingEMA'
            ),
            **self._maybe(0.5, update_buffers=True),
            **self._maybe(0.3, begin_iter=2),
        )
        hooks: List[Changes] = [dict(type='RecordHook')]
        hooks += self._maybe(0.3, hook=ema).values()
        hooks += self._maybe(
            0.2, hook=dict(type='EarlyStoppingHook', monitor='mIoU', min_delta=1.0, patience=1)
        ).values()
        hooks += self._maybe(0.1, hook=dict(type='EmptyCacheHook', after_iter=True)).values()
        hooks += self._maybe(0.1, hook=dict(type='SyncBuffersHook')).values()
        hooks += self._maybe(0.1, hook=dict(type='HalvingHook')).values()
        self.changes['custom_hooks'] = hooks
        if self._chance(0.1):
            self.changes['default_hooks.visualization'] = dict(
                type='SegVisualizationHook', draw=True, interval=2
            )
        if self._chance(0.2):
            self.changes['test_evaluator.output_dir'] = '{work_dir}/masks'

    def _draw_stages(self) -> Tuple[Tuple[Changes, str], ...]:
        methods = self._one('train', 'train', 'train test', 'train val', 'test', 'val')
        saves = self.changes['default_hooks.checkpoint']
        if methods == 'val' and 'save_best' in saves:
            methods = 'test'  # MMEngine's CheckpointHook is not ready for a validation alone
        can_stop = (
            self._length > 1
            and saves.get('save_last', True)
            and 'save_begin' not in saves
            and saves.get('save_optimizer', True)
            and saves['by_epoch'] == self.by_epoch
            and 'accumulative_counts' not in self.changes['optim_wrapper']
        )
        if 'train' in methods and can_stop and self._chance(0.3):
            unit = 'max_epochs' if self.by_epoch else 'max_iters'
            return (
                ({f'train_cfg.{unit}': self._random.randint(1, self._length - 1)}, 'train'),
                ({'resume': True}, methods),
            )
        return (({}, methods),)
