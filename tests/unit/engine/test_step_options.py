"""Runs with channels last, fused optimizers and bfloat16: what they share with plain ones."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from checkpoint_bits import checkpoint_bits
from mmengine.model import BaseModel
from mmengine.registry import MODELS
from ranks import run_ranks
from support import no_simulated_cards
from torch import nn
from toy_runs import log_of, same_weights, toy_runner, toy_train

from mapsage.accelerator.cpu import CpuAccelerator
from mapsage.engine.env_cfg import ConfigError
from mapsage.engine.run_extension import RunExtension

LAST: Dict[str, Any] = {'env_cfg.channels_last': True}
FUSED: Dict[str, Any] = {
    'optim_wrapper.optimizer': dict(type='AdamW', lr=0.02, fused=True, _delete_=True)
}
ADAM: Dict[str, Any] = {'optim_wrapper.optimizer': dict(type='AdamW', lr=0.02, _delete_=True)}
BFLOAT16: Dict[str, Any] = {
    'optim_wrapper.type': 'AmpOptimWrapper',
    'optim_wrapper.dtype': 'bfloat16',
}
CONVOLUTIONS: Dict[str, Any] = {
    'model.type': 'ToyConvolutions',
    'custom_hooks': [dict(type='EMAHook', momentum=0.3)],
}
TOLERANCE = dict(rel=1e-5, abs=1e-7)


@MODELS.register_module(force=True)
class ToyConvolutions(BaseModel):
    """The toy regression by convolutions over 2 x 2 pixels of two channels, without dropout."""

    def __init__(self) -> None:
        super().__init__()
        # Without a bias, whose gradient before the norm is rounding alone, which Adam scales up.
        self.layers = nn.Sequential(
            nn.Conv2d(2, 6, 3, padding=1, bias=False),
            nn.BatchNorm2d(6),
            nn.ReLU(),
            nn.Conv2d(6, 4, 3, padding=1),
            nn.Conv2d(4, 1, 1),
        )

    def init_weights(self) -> None:
        for each in self.layers:
            if isinstance(each, nn.Conv2d):
                nn.init.normal_(each.weight, std=0.3)

    def forward(self, inputs: Any, data_samples: Any = None, mode: str = 'tensor') -> Any:
        values = self.layers(torch.stack(list(inputs)).view(-1, 2, 2, 2)).mean(dim=(1, 2, 3))
        if mode == 'loss':
            target = torch.cat([sample.target for sample in data_samples])
            return dict(loss=((values - target) ** 2).mean() / 100)
        for sample, value in zip(data_samples, values):
            sample.value = value.detach()[None]
        return data_samples


def train(folder: Path, *options: Dict[str, Any], **changes: Any) -> Any:
    for each in (CONVOLUTIONS, *options):
        changes.update(each)
    return toy_train(folder, **changes)


def strides(module: nn.Module) -> List[Any]:
    return [each.stride() for each in module.parameters()]


@pytest.mark.parametrize(
    'options', [(LAST,), (FUSED,), (LAST, FUSED)], ids=['channels_last', 'fused', 'both']
)
@pytest.mark.parametrize('virtual_ranks', [1, 3])
def test_losses_are_those_of_a_plain_run(options: Any, virtual_ranks: int, tmp_path: Path) -> None:
    ranks = {'env_cfg.virtual_ranks': virtual_ranks}
    _, plain = train(tmp_path / 'plain', ADAM, ranks)
    runner, record = train(tmp_path / 'run', ADAM, *options, ranks)
    # Not the same bits: the layouts have kernels of their own, which add up in another order.
    assert record.losses == pytest.approx(plain.losses, **TOLERANCE)
    assert record.figures == pytest.approx(plain.figures, **TOLERANCE)
    first = runner.model.module.layers[0] if virtual_ranks > 1 else runner.model.layers[0]
    assert first.weight.is_contiguous(memory_format=torch.channels_last) == (LAST in options)
    averaged = next(hook for hook in runner.hooks if type(hook).__name__ == 'EMAHook').ema_model
    assert strides(averaged.module) == strides(
        runner.model.module if virtual_ranks > 1 else runner.model
    )
    said = 'optimizer.fused=True has no effect' in log_of(runner)
    assert said == (FUSED in options and not CpuAccelerator.supports.fused_optimizer)


def test_by_default_nothing_changes(tmp_path: Path) -> None:
    runner, plain = train(tmp_path / 'plain')
    other, record = train(tmp_path / 'other', {'env_cfg.channels_last': False})
    assert record.losses == plain.losses
    assert same_weights(runner.model.state_dict(), other.model.state_dict())
    assert all(each.is_contiguous() for each in runner.model.parameters())


@pytest.mark.parametrize('virtual_ranks', [1, 3])
def test_a_resumed_run_has_the_same_bits(virtual_ranks: int, tmp_path: Path) -> None:
    options = (LAST, FUSED, BFLOAT16, {'env_cfg.virtual_ranks': virtual_ranks})
    _, whole = train(tmp_path / 'whole', *options)
    (tmp_path / 'rest').mkdir()
    shutil.copy(str(tmp_path / 'whole' / 'iter_4.pth'), str(tmp_path / 'rest'))
    _, rest = train(tmp_path / 'rest', *options, resume=True)
    assert rest.losses == whole.losses[4:]
    assert checkpoint_bits(tmp_path / 'rest' / 'iter_8.pth') == checkpoint_bits(
        tmp_path / 'whole' / 'iter_8.pth'
    )


def test_a_run_goes_on_from_a_checkpoint_of_another_layout(tmp_path: Path) -> None:
    """Its averages lie next to weights of another order: a fused step must not mix them up."""
    _, plain = train(tmp_path / 'first', FUSED)
    (tmp_path / 'last').mkdir()
    shutil.copy(str(tmp_path / 'first' / 'iter_4.pth'), str(tmp_path / 'last'))
    runner, record = train(tmp_path / 'last', FUSED, LAST, resume=True)
    assert not runner.model.layers[0].weight.is_contiguous()
    assert record.losses == pytest.approx(plain.losses[4:], **TOLERANCE)
    (tmp_path / 'back').mkdir()
    shutil.copy(str(tmp_path / 'last' / 'iter_8.pth'), str(tmp_path / 'back'))
    back, _ = toy_runner(
        tmp_path / 'back',
        load_from=str(tmp_path / 'back' / 'iter_8.pth'),
        **{**CONVOLUTIONS, 'custom_hooks': []},
    )
    back.load_or_resume()
    saved = torch.load(
        str(tmp_path / 'last' / 'iter_8.pth'),
        **({} if torch.__version__ < '2' else dict(weights_only=False)),
    )
    assert same_weights(back.model.state_dict(), saved['state_dict'])
    assert all(each.is_contiguous() for each in back.model.parameters())


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a device on which the fast settings pay."""
    monkeypatch.setattr(CpuAccelerator, 'fast_by_default', True)


def is_fast(runner: Any) -> Dict[str, bool]:
    groups = runner.optim_wrapper.optimizer.param_groups
    log = log_of(runner)
    return dict(
        last=not runner.model.layers[0].weight.is_contiguous(),
        fused=bool(groups[0].get('fused')),
        said='fast on cpu: channels last' in log and 'env_cfg.fast=False' in log,
    )


FAST = dict(last=True, fused=CpuAccelerator.supports.fused_optimizer, said=True)
SLOW = dict(last=False, fused=False, said=False)


@pytest.mark.usefixtures('card')
@pytest.mark.parametrize(
    'changes, expected',
    [
        ({}, FAST),
        ({'env_cfg.fast': False}, SLOW),
        ({'randomness': dict(seed=0, deterministic=True)}, SLOW),
        ({'env_cfg.channels_last': False}, dict(FAST, last=False, said=False)),
        ({'optim_wrapper.optimizer.foreach': True}, dict(FAST, fused=False)),
    ],
    ids=['default', 'off', 'deterministic', 'channels first', 'foreach'],
)
def test_a_card_is_fast_unless_the_config_says_otherwise(
    changes: Dict[str, Any], expected: Dict[str, bool], tmp_path: Path
) -> None:
    if any('foreach' in key for key in changes) and torch.__version__ < '1.12':
        pytest.skip('this torch has no argument foreach')
    try:
        runner, _ = train(tmp_path, ADAM, changes)
    finally:
        torch.use_deterministic_algorithms(False)
    assert is_fast(runner) == expected


@pytest.mark.usefixtures('card')
def test_other_processes_may_fix_the_layout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunExtension, 'fixes_layout', lambda self, cfg: True)
    runner, _ = train(tmp_path, ADAM)
    assert is_fast(runner) == dict(FAST, last=False, said=False)


def test_a_cpu_is_not_fast(tmp_path: Path) -> None:
    runner, _ = train(tmp_path, ADAM, {'env_cfg.fast': True})
    assert is_fast(runner) == SLOW


@pytest.mark.usefixtures('card')
@pytest.mark.parametrize('began', [True, False])
def test_a_run_resumes_with_what_it_began_with(began: bool, tmp_path: Path) -> None:
    before = {} if began else {'env_cfg.fast': False}
    _, whole = train(tmp_path / 'whole', ADAM, before)
    (tmp_path / 'rest').mkdir()
    shutil.copy(str(tmp_path / 'whole' / 'iter_4.pth'), str(tmp_path / 'rest'))
    runner, rest = train(tmp_path / 'rest', ADAM, resume=True)
    assert is_fast(runner) == (FAST if began else SLOW)
    assert rest.losses == whole.losses[4:]


def of_rank(folder: Path, accelerator: str, *options: Dict[str, Any]) -> Any:
    import os

    runner, record = train(
        folder / os.environ['RANK'], *options, {'env_cfg.accelerator': accelerator}
    )
    return (
        record.losses,
        str(next(runner.model.parameters()).device),
        log_of(runner) if runner.rank == 0 else '',
    )


@pytest.mark.parametrize(
    'accelerator',
    [
        'cpu',
        pytest.param(
            'sim',
            marks=pytest.mark.skipif(no_simulated_cards() is not None, reason='no simulated cards'),
        ),
    ],
)
def test_three_ranks_train_as_without(accelerator: str, tmp_path: Path) -> None:
    plain = run_ranks(of_rank, 3, tmp_path / 'a', tmp_path / 'plain', 'cpu', ADAM)
    found = run_ranks(of_rank, 3, tmp_path / 'b', tmp_path / 'run', accelerator, LAST, FUSED)
    for rank, ((losses, _, _), (others, device, log)) in enumerate(zip(plain, found)):
        assert others == pytest.approx(losses, **TOLERANCE)
        assert device == (f'gcu:{rank}' if accelerator == 'sim' else 'cpu')
        assert rank or ('has no effect' in log) == (
            accelerator == 'sim' or not CpuAccelerator.supports.fused_optimizer
        )


@pytest.mark.parametrize('value', [1, 'yes', 0, 'channels_last'])
def test_channels_last_is_true_or_false(value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='expected True .* or False'):
        toy_runner(tmp_path, **{'env_cfg.channels_last': value})
