"""Runs whose steps another rank cannot compute again are refused before their first step."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
import torch
from mmengine.model import BaseModel
from mmengine.optim import OptimWrapper, OptimWrapperDict
from mmengine.registry import MODELS, OPTIM_WRAPPER_CONSTRUCTORS
from toy_runs import ToyRegression, toy_runner, toy_train

from mapsage.accelerator.xla import XlaAccelerator
from mapsage.engine.env_cfg import ConfigError
from mapsage.extras.forensics.cross_checks import cross_check_obstacle
from mapsage.sampling.hooks import DynamicSamplingHook

CHECKED: Dict[str, Any] = {'env_cfg.cross_check': dict(interval=2)}


@MODELS.register_module(force=True)
class OwnStepToy(ToyRegression):
    def train_step(self, data: Any, optim_wrapper: Any) -> Any:
        return BaseModel.train_step(self, data, optim_wrapper)


@OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
class TwoOptimizers:
    def __init__(self, **_: Any) -> None:
        pass

    def __call__(self, model: torch.nn.Module) -> OptimWrapperDict:
        return OptimWrapperDict(
            **{
                name: OptimWrapper(torch.optim.SGD(part.parameters(), lr=0.1))
                for name, part in model.layers.named_children()
                if list(part.parameters())
            }
        )


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'model.type': 'OwnStepToy'}, 'OwnStepToy, which has a train_step of its own'),
        (
            {'optim_wrapper.constructor': 'TwoOptimizers'},
            'OptimWrapperDict: expected one optimizer',
        ),
    ],
)
def test_refused_before_the_first_step(changes: Dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f'env_cfg.cross_check with .*{words}'):
        toy_train(tmp_path, **changes, **CHECKED)
    assert not list(tmp_path.glob('*.pth'))


def test_obstacles_of_a_config(tmp_path: Path) -> None:
    runner, _ = toy_runner(tmp_path, **CHECKED)
    assert cross_check_obstacle(runner) == ''
    label = dict(type='LabelScore')
    for settings, weighs in (
        (dict(shortfall='pad'), False),
        (dict(shortfall='shrink'), True),
        (dict(unbiased=True, keep_fraction=0.5), True),
    ):
        runner.register_hook(DynamicSamplingHook(label, dict(low=0), **settings))
        assert ('shrink' in cross_check_obstacle(runner)) is weighs
    runner._hooks = [hook for hook in runner._hooks if not isinstance(hook, DynamicSamplingHook)]
    runner.cfg.compile = dict(layers=True)
    assert cross_check_obstacle(runner) == ''
    runner.cfg.compile = True
    assert 'compile, which compiles the whole step' in cross_check_obstacle(runner)
    runner.cfg.feature_source = dict(type='Local')
    assert 'feature_source, whose features' in cross_check_obstacle(runner)


reason = XlaAccelerator.why_unavailable()


@pytest.mark.skipif(reason is not None, reason=str(reason))
def test_lazy_devices_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='cross_check with the lazy device xla'):
        toy_train(tmp_path, **{'env_cfg.accelerator': 'xla'}, **CHECKED)
