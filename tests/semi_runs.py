"""Whole runs of FixMatch on tiny tiles of 32 pixels, in this process or on forked ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Dict, List

import cv2
import quick_host  # noqa: F401
import torch
from frozen_config import FROZEN
from mmengine.config import Config
from mmengine.hooks import Hook
from support import write_tiny_config, write_tiny_data

from mapsage.engine import MapSageRunner

LABELED = 5
# BatchNorm and dropout: buffers that differ from rank to rank, and random draws behind the views.
SEMI = """
model['backbone']['norm_cfg'] = dict(type='BN')
model['data_preprocessor']['size'] = (32, 32)
model['decode_head'].update(dropout_ratio=0.1, loss_decode=dict(type='SegFocalLoss', gamma=0.))
names = {names!r}
weak_pipeline = [
    dict(type='LoadImageFromFile'),
    dict(type='LoadAnnotations', reduce_zero_label=True),
    dict(type='HideLabels'),
    dict(type='RandomFlip', prob=0.5),
    dict(type='PackUnlabeledInputs')]
labeled_dataset = train_dataloader['dataset']
train_dataloader = dict(
    batch_size=3, num_workers=0,
    sampler=dict(type='LabeledUnlabeledSampler', labeled=1, unlabeled=2),
    dataset=dict(
        type='SemiSupervisedDataset',
        labeled=dict(type='NamedSamples', names=names, dataset=labeled_dataset),
        unlabeled=dict(type='NamedSamples', names=names, exclude=True,
                       dataset=dict(labeled_dataset, pipeline=weak_pipeline))))
custom_hooks = [dict(type='FixMatchHook', threshold=0.15)]
env_cfg['accelerator'] = 'cpu'
train_cfg = dict(type='IterBasedTrainLoop', max_iters=6, val_interval=6)
default_hooks.update(preview=None)
default_hooks['checkpoint']['interval'] = 1
default_hooks['logger']['interval'] = 2
"""
OF_FEATURES = (
    FROZEN
    + """
model['data_preprocessor']['size'] = (32, 32)
model['decode_head']['dropout_ratio'] = 0.1
custom_hooks = [dict(type='FixMatchHook', threshold=0.15, views='features')]
"""
)


def write_semi_data(root: Path) -> Path:
    """Write 16 tiles of which some are smaller and some have pixels without a class."""
    write_tiny_data(root, train=16, val=3, size=32)
    for number in range(16):
        for kind in ('img_dir', 'ann_dir'):
            path = str(root / kind / 'train' / f'{number}.png')
            tile = cv2.imread(path, cv2.IMREAD_UNCHANGED)
            if kind == 'ann_dir':
                tile[: 2 * number] = 0
            cv2.imwrite(path, tile[:, : 32 - 4 * (number % 3)])
    (root / 'labeled.txt').write_text('\n'.join(str(3 * each) for each in range(LABELED)))
    return root


def write_semi_config(path: Path, data: Path, extra: str = '') -> Path:
    return write_tiny_config(path, data, SEMI.format(names=str(data / 'labeled.txt')) + extra)


class Followed(Hook):
    """Keeps the losses and the model's weights behind each step, and those that are evaluated."""

    priority = 'VERY_HIGH'

    def __init__(self) -> None:
        self.losses: List[float] = []
        self.students: List[Dict[str, torch.Tensor]] = []
        self.figures: List[float] = []
        self.evaluated: List[Dict[str, torch.Tensor]] = []

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(float(outputs['loss']))
        self.students.append(_state(runner))

    def after_val_epoch(self, runner: Any, metrics: Any = None) -> None:
        self.figures.append(metrics['mIoU'])
        self.evaluated.append(_state(runner))

    def after_test_epoch(self, runner: Any, metrics: Any = None) -> None:
        self.evaluated.append(_state(runner))


def _state(runner: Any) -> Dict[str, torch.Tensor]:
    model = getattr(runner.model, 'module', runner.model)
    return {name: each.clone() for name, each in model.state_dict().items()}


def semi_config(data: Path, folder: Path, extra: str = '', **changes: Any) -> Config:
    folder.mkdir(parents=True, exist_ok=True)
    cfg = Config.fromfile(str(write_semi_config(folder / 'semi.py', data, extra)))
    cfg.merge_from_dict(
        {
            'work_dir': str(folder),
            'launcher': 'pytorch' if 'RANK' in os.environ else 'none',
            'experiment_name': f'{folder.parent.name}_{folder.name}_{os.getpid()}',
            **changes,
        }
    )
    return cfg


def semi_train(data: Path, folder: Path, hooks: Any = (), extra: str = '', **changes: Any) -> Any:
    """Train; return the runner and its :class:`Followed`."""
    runner: Any = MapSageRunner.from_cfg(semi_config(data, folder, extra, **changes))
    followed = Followed()
    for hook in (*hooks, followed):
        if isinstance(runner, MapSageRunner):
            runner.register_hook(hook)
    runner.train()
    return runner, followed
