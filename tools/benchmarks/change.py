"""F1 of change of several configs at equal processor time, on pairs shifted by 0, 1 and 2 pixels.

    python tools/make_demo_data.py data/change --change
    python tools/benchmarks/change.py configs/change/*.py --seeds 0 1 2 --seconds 60
    python tools/benchmarks/change.py configs/change/unet_change.py --seconds 60 --without ShiftDate

Each line is one training, in one process with one thread. The number of steps is the processor time
divided by that of a step, which is measured first; loading and augmentation count, start and
evaluation do not. The second date of the validation pairs is shifted to the right by whole pixels;
the labels stay with the first date.
"""
from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Dict, List

import numpy as np
import torch
from mmengine.config import Config
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, DefaultScope

import mapsage  # noqa: F401
from mapsage.engine import MapSageRunner

_CALIBRATION_STEPS, _SKIPPED_STEPS = 10, 3
_SHIFTS = (0, 1, 2)
# Pairs of the validation that are evaluated: the first four scenes of the demo.
_PAIRS = 100


@HOOKS.register_module()
class ProcessTimeHook(Hook):
    """Records the processor time at the start of each step."""

    def __init__(self) -> None:
        self.times: List[float] = []

    def before_train_iter(self, *_: Any, **__: Any) -> None:
        """Record the time."""
        self.times.append(time.process_time())

    def after_train(self, runner: Any) -> None:
        """Record the end of the last step."""
        self.times.append(time.process_time())


def read_config(path: str, seed: int, steps: int, without: List[str], work_dir: str) -> Config:
    """Return a config that trains for some steps and validates at the end only."""
    cfg = Config.fromfile(path)
    cfg.work_dir, cfg.randomness = work_dir, dict(seed=seed)
    cfg.train_cfg = dict(type='IterBasedTrainLoop', max_iters=steps, val_interval=10**9)
    cfg.train_dataloader.dataset.pipeline = [
        step for step in cfg.train_dataloader.dataset.pipeline if step['type'] not in without]
    warmup = min(20, steps // 5)
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=.05, begin=0, end=warmup, by_epoch=False),
        dict(type='PolyLR', power=.9, eta_min=1e-5, begin=warmup, end=steps, by_epoch=False)]
    cfg.default_hooks.checkpoint = dict(type='CheckpointHook', by_epoch=False, interval=10**9,
                                        save_last=False)
    cfg.visualizer = dict(type='SegLocalVisualizer', vis_backends=[], name=f'{seed}{steps}')
    cfg.log_level = 'WARNING'
    return cfg


def train(path: str, seed: int, steps: int, without: List[str]) -> Any:
    """Train a config; return the runner and the processor time of each step in seconds."""
    with tempfile.TemporaryDirectory() as work_dir:
        cfg = read_config(path, seed, steps, without, work_dir)
        cfg.experiment_name = f'{Path(path).stem}_{seed}_{steps}_{time.monotonic_ns()}'
        runner = MapSageRunner.from_cfg(cfg)
        hook = ProcessTimeHook()
        runner.register_hook(hook)
        runner.train()
    return runner, np.diff(hook.times)


def evaluate(runner: Any, shift: int) -> Dict[str, float]:
    """Return the scores on the validation pairs, with the second date shifted to the right."""
    cfg = runner.cfg.copy()
    loader = cfg.val_dataloader
    pipeline = list(loader.dataset.pipeline)
    pipeline.insert(len(pipeline) - 1, dict(type='ShiftDate', fixed=(shift, 0)))
    loader.dataset.pipeline, loader.dataset.indices = pipeline, _PAIRS
    with DefaultScope.overwrite_default_scope('mmseg'):
        data = runner.build_dataloader(loader, seed=0)
        evaluator = runner.build_evaluator(cfg.val_evaluator)
    evaluator.dataset_meta = data.dataset.metainfo
    runner.model.eval()
    for batch in data:
        with torch.no_grad():
            evaluator.process(data_samples=runner.model.val_step(batch), data_batch=batch)
    return evaluator.evaluate(len(data.dataset))


def main() -> None:
    """Train and evaluate, and print a line of JSON for each training."""
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('configs', nargs='+')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2])
    parser.add_argument('--seconds', type=float, default=60, help='processor time of a training')
    parser.add_argument('--without', nargs='*', default=[], metavar='TRANSFORM',
                        help='transforms of the training that are left out')
    args = parser.parse_args()
    torch.set_num_threads(1)
    for path in args.configs:
        times = train(path, 0, _CALIBRATION_STEPS, args.without)[1][_SKIPPED_STEPS:]
        steps = max(20, round(args.seconds / float(np.median(times))))
        for seed in args.seeds:
            runner, times = train(path, seed, steps, args.without)
            scores = {shift: evaluate(runner, shift) for shift in _SHIFTS}
            print(json.dumps(dict(
                config=Path(path).stem, seed=seed, without=args.without, steps=steps,
                seconds=round(float(times.sum()), 1),
                parameters=sum(value.numel() for value in runner.model.parameters()),
                F1={shift: result['F1'] for shift, result in scores.items()},
                IoU=scores[0]['IoU'])), flush=True)


if __name__ == '__main__':
    main()
