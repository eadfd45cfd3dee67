"""What the metrics cannot take ends a training before its first step; a trial changes nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from types import ModuleType
from typing import Any, List

import pytest
import torch
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook

from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.guards import ValidationTrialHook, metric_obstacle


class CountingMetric(BaseMetric):
    """Counts what it took, and fails without a key."""

    default_prefix = ''

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key, self.taken = key, 0

    def process(self, data_batch: Any, data_samples: Any) -> None:
        self.taken += len([sample[self.key] for sample in data_samples])
        self.results.append(1)

    def compute_metrics(self, results: List[int]) -> Any:
        return dict(value=len(results))


def test_a_metric_that_fails_ends_the_run_before_its_first_step(
    tmp_path: Path, tiny_run: ModuleType
) -> None:
    model = tiny_run.TinyModel()
    metric = CountingMetric('pred_sem_segs')
    runner = tiny_run.build_runner(
        str(tmp_path), [ValidationTrialHook()], model, val_evaluator=[metric]
    )
    with pytest.raises(ConfigError, match='CountingMetric cannot take .* first sample: KeyError'):
        runner.train()
    assert model.iteration == 0


def test_a_trial_changes_neither_metrics_nor_modes_nor_random_numbers(
    tmp_path: Path, tiny_run: ModuleType
) -> None:
    metric, numbers = CountingMetric('pred_sem_seg'), []

    class Compare(Hook):
        priority = 'LOWEST'

        def before_train(self, runner: Any) -> None:
            numbers.append(
                (torch.rand(1).item(), metric.taken, [m.training for m in model.modules()])
            )

    for hooks in ([Compare()], [ValidationTrialHook(), Compare()]):
        # Only hooks of MapSage, MMEngine and MMSegmentation are known to prepare no validation.
        Compare.__module__ = 'mapsage.tests'
        torch.manual_seed(3)
        model = tiny_run.TinyModel()
        model.add_module('frozen', torch.nn.Dropout().eval())
        runner = tiny_run.build_runner(
            str(tmp_path / str(len(hooks))), hooks, model, val_evaluator=[metric]
        )
        torch.manual_seed(4)
        runner.train()
        metric.taken = 0
    assert numbers[0] == numbers[1] and numbers[0][1] == 0


@pytest.mark.parametrize('setting', ['output_dir', 'lock'])
def test_a_metric_that_writes_or_cannot_be_copied_is_not_tried(setting: str) -> None:
    metric = CountingMetric('nothing')
    assert metric_obstacle([metric], {}, [{}]) is not None
    setattr(metric, setting, 'folder' if setting == 'output_dir' else threading.Lock())
    assert metric_obstacle([metric], {}, [{}]) is None
