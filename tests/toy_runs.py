"""Whole runs of milliseconds: eight numbers a sample, BatchNorm, dropout, random augmentation."""

from __future__ import annotations

import itertools
import os
from pathlib import Path
from typing import Any, Dict, List, Optional

import quick_host  # noqa: F401
import torch
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.logging import MMLogger
from mmengine.model import BaseModel
from mmengine.registry import DATASETS, METRICS, MODELS
from mmengine.structures import BaseDataElement
from torch import nn
from torch.utils.data import Dataset

from mapsage.engine import MapSageRunner

_count = itertools.count()


@DATASETS.register_module(force=True)
class ToyNumbers(Dataset):
    """Sample ``i`` is drawn from a generator seeded with ``i``; training adds noise."""

    METAINFO = dict(classes=('low', 'high'))

    def __init__(self, length: int, noise: float = 0.0) -> None:
        self.metainfo = dict(self.METAINFO)
        self.length, self.noise = length, noise

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Dict[str, Any]:
        values = torch.randn(8, generator=torch.Generator().manual_seed(int(index))) + int(index)
        sample = BaseDataElement(metainfo=dict(number=int(index)))
        sample.target = values.sum()[None] / 8
        return dict(inputs=values + self.noise * torch.randn(8), data_samples=sample)


@MODELS.register_module(force=True)
class ToyRegression(BaseModel):
    def __init__(self, dropout: float = 0.2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Dropout(dropout), nn.Linear(6, 1)
        )

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        values = self.layers(torch.stack(list(inputs)))[:, 0]
        if mode == 'loss':
            target = torch.cat([sample.target for sample in data_samples])
            return dict(loss=((values - target) ** 2).mean() / 100)
        for sample, value in zip(data_samples, values):
            sample.value = value.detach()[None]
        return data_samples


@MODELS.register_module(force=True)
class CountedToy(ToyRegression):
    """Its loss is the mean over the samples above 3 of all virtual ranks, not of its own."""

    def count_batch(self, data_samples: Any) -> torch.Tensor:
        return torch.tensor([float(sum(float(sample.target) > 3 for sample in data_samples)), 1.0])

    sum_over_ranks = staticmethod(lambda count: count)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        if mode != 'loss':
            return super().forward(inputs, data_samples, mode)
        values = self.layers[4](self.layers[0](torch.stack(list(inputs))))[:, 0]
        targets = torch.cat([sample.target for sample in data_samples])
        above, ranks = self.sum_over_ranks(self.count_batch(data_samples))
        squares = (values - targets) ** 2
        return dict(loss=(squares * (targets > 3)).sum() * ranks / above / 100)


@METRICS.register_module(force=True)
class MeanValue(BaseMetric):
    """The mean of the outputs, in float64, so that ranks add up to what one process says."""

    default_prefix = ''

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.results += [float(sample['value']) for sample in data_samples]

    def compute_metrics(self, results: list) -> Dict[str, float]:
        return dict(value=sum(results) / len(results))


class Record(Hook):
    """Keeps losses, learning rates, samples and figures of a run, and the lines of its log."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.losses: List[float] = []
        self.rates: List[float] = []
        self.samples: List[List[int]] = []
        self.batch_idx: List[int] = []
        self.figures: List[float] = []

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        self.samples.append([sample.number for sample in data_batch['data_samples']])
        self.rates.append(runner.optim_wrapper.get_lr()['lr'][0])
        self.batch_idx.append(batch_idx)

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(float(outputs['loss']))

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self.figures.append(metrics['value'])

    after_test_epoch = after_val_epoch


def toy_config(work_dir: Path, **changes: Any) -> Config:
    """Return the config of a run of 8 iterations with a checkpoint after every 4th."""

    def loader(length: int, noise: float, shuffle: bool, kind: str) -> dict:
        return dict(
            batch_size=2,
            num_workers=0,
            sampler=dict(type=kind, shuffle=shuffle),
            collate_fn=dict(type='pseudo_collate'),
            dataset=dict(type='ToyNumbers', length=length, noise=noise),
        )

    cfg = Config(
        dict(
            default_scope='mmengine',
            env_cfg=dict(accelerator='cpu'),
            randomness=dict(seed=3),
            model=dict(type='ToyRegression'),
            work_dir=str(work_dir),
            train_dataloader=loader(16, 0.5, True, 'InfiniteSampler'),
            val_dataloader=loader(8, 0.0, False, 'DefaultSampler'),
            test_dataloader=loader(8, 0.0, False, 'DefaultSampler'),
            val_evaluator=dict(type='MeanValue'),
            test_evaluator=dict(type='MeanValue'),
            train_cfg=dict(by_epoch=False, max_iters=8, val_interval=8),
            val_cfg=dict(),
            test_cfg=dict(),
            optim_wrapper=dict(
                type='OptimWrapper', optimizer=dict(type='SGD', lr=0.05, momentum=0.9)
            ),
            default_hooks=dict(
                checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=4),
                logger=dict(type='LoggerHook', interval=1),
            ),
            custom_hooks=[dict(type='DeviceCheckHook', interval=0)],
            log_processor=dict(by_epoch=False),
            visualizer=dict(type='Visualizer'),
            launcher='pytorch' if 'RANK' in os.environ else 'none',
            experiment_name=f'{Path(work_dir).name}{os.getpid()}_{next(_count)}',
        )
    )
    if 'train_cfg' in changes:
        cfg.train_cfg = changes.pop('train_cfg')
    cfg.merge_from_dict(changes)
    return cfg


def toy_runner(
    work_dir: Path, runner_class: Any = MapSageRunner, hooks: Any = (), **changes: Any
) -> Any:
    """Return the runner and its :class:`Record`."""
    cfg = toy_config(work_dir, **changes)
    if issubclass(runner_class, MapSageRunner):
        # A report takes longer than the run.
        cfg.default_hooks.setdefault('report', None)
    runner = runner_class.from_cfg(cfg)
    for hook in hooks:
        runner.register_hook(hook)
    record = Record()
    runner.register_hook(record)
    return runner, record


def toy_train(
    work_dir: Path, runner_class: Any = MapSageRunner, hooks: Any = (), **changes: Any
) -> Any:
    """Train; return the runner and its :class:`Record`."""
    runner, record = toy_runner(work_dir, runner_class, hooks, **changes)
    runner.train()
    return runner, record


def log_of(runner: Any) -> str:
    """Return the text of the run's log file."""
    logger: Optional[Any] = MMLogger.get_instance(runner.logger.instance_name)
    for handler in logger.handlers:
        handler.flush()
    return next(Path(runner.work_dir).glob(f'{runner.timestamp}/*.log')).read_text()


def same_weights(one: Any, other: Any) -> bool:
    """Return whether two state dicts have equal bits."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
