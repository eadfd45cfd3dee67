"""Whole runs of small EoMT and PMT on the tiny data."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List

import torch
from mask_models import eomt_config, pmt_config
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import RUNNERS
from support import write_tiny_config

CONFIGS = dict(eomt=eomt_config, pmt=pmt_config)
TESTS = (
    'val_cfg',
    'val_dataloader',
    'val_evaluator',
    'test_cfg',
    'test_dataloader',
    'test_evaluator',
)


class Recorder(Hook):
    """Keeps the loss of each step, and the masks' probabilities at its forward passes."""

    priority = 'LOWEST'

    def __init__(self) -> None:
        self.losses: List[float] = []
        self.masked: List[List[float]] = []

    def before_train(self, runner: Any) -> None:
        head = next(each for each in runner.model.modules() if hasattr(each, 'attn_mask_probs'))
        decode = head.decode

        def recorded(*arguments: Any) -> Any:
            self.masked.append(head.attn_mask_probs.tolist())
            return decode(*arguments)

        head.decode = recorded

    def after_train_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None
    ) -> None:
        self.losses.append(float(outputs['loss']))


def config_of(
    kind: str,
    data: Path,
    folder: Path,
    steps: int = 6,
    plain: bool = False,
    custom_hooks: Any = (dict(type='MaskAnnealingHook'),),
    **changes: Any,
) -> Config:
    """Return the config of a run, ``plain`` without random transforms."""
    folder.mkdir(parents=True, exist_ok=True)
    cfg = Config.fromfile(str(write_tiny_config(folder / 'tiny.py', data)))
    norm: Dict[str, Any] = {} if kind == 'eomt' else dict(norm_cfg=dict(type='SyncBN'))
    optimizer = dict(
        type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-3), clip_grad=dict(max_norm=0.01)
    )
    scheduler: Dict[str, Any] = dict(
        type='LinearLR', start_factor=0.5, begin=0, end=steps, by_epoch=False
    )
    if kind == 'eomt':
        optimizer.update(constructor='TwoStageConstructor', paramwise_cfg=dict(decay_rate=0.8))
        scheduler = dict(type='TwoStagePolyLR', warmup=(1, 1), end=steps)
    cfg.merge_from_dict(
        {
            'work_dir': str(folder),
            'experiment_name': f'{folder.parent.name}_{folder.name}',
            'train_cfg.max_iters': steps,
            'default_hooks.checkpoint.interval': steps // 2,
            'env_cfg.accelerator': 'cpu',
            **changes,
        }
    )
    cfg.model = CONFIGS[kind](num_classes=7, **norm)
    cfg.optim_wrapper, cfg.param_scheduler = optimizer, [scheduler]
    cfg.custom_hooks = list(custom_hooks)
    if plain:
        del cfg.train_dataloader.dataset.pipeline[2:4]
    for key in TESTS:
        cfg[key] = None
    return cfg


def run_of(kind: str, data: Path, folder: Path, **changes: Any) -> Any:
    """Return the runner and the recorder of a run that has not begun."""
    runner, recorder = RUNNERS.build(config_of(kind, data, folder, **changes)), Recorder()
    runner.register_hook(recorder)
    return runner, recorder


def weights_of(model: Any) -> Dict[str, torch.Tensor]:
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}
