"""Fused optimizers make the steps of the others, or are left out with a sentence."""

from __future__ import annotations

import copy
import inspect
from typing import Any, Dict, List

import pytest
import torch
from mmengine.config import ConfigDict
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.accelerator.base import Supports
from mapsage.accelerator.cpu import CpuAccelerator
from mapsage.distributed.wrappers import OptimWrapper
from mapsage.distributed.wrappers import fused as fused_module
from mapsage.distributed.wrappers.fused import (
    watch_fused_steps,
    why_not_fused,
    without_missing_fusion,
)

KINDS: Dict[str, Dict[str, Any]] = dict(
    AdamW={}, Adam=dict(amsgrad=True), SGD=dict(momentum=0.9, weight_decay=0.01)
)
HERE = CpuAccelerator.supports.fused_optimizer
needs_fused = pytest.mark.skipif(not HERE, reason='this torch fuses no optimizer on the CPU')


class Unfused(CpuAccelerator):
    """A device like most: torch has no fused kernels for it."""

    name = 'unfused'
    supports = Supports()


@pytest.fixture(autouse=True)
def _cpu() -> Any:
    set_current_accelerator(resolve_accelerator('cpu'))
    yield
    set_current_accelerator(resolve_accelerator('cpu'))


def weight(last: bool) -> nn.Parameter:
    values = torch.randn(8, 4, 3, 3, generator=torch.Generator().manual_seed(0))
    return nn.Parameter(values.contiguous(memory_format=torch.channels_last) if last else values)


def train(kind: str, last: bool, fused: bool, resumed: bool = False) -> torch.Tensor:
    """Take five steps with gradients of torch's own layout; load a state of it in between."""
    parameter = weight(last)
    options = dict(KINDS[kind], lr=0.01, **(dict(fused=True) if fused else {}))
    wrapper = watch_fused_steps(OptimWrapper(getattr(torch.optim, kind)([parameter], **options)))
    for step in range(5):
        draw = torch.Generator().manual_seed(step)
        parameter.grad = torch.randn(parameter.shape, generator=draw)
        wrapper.step()
        if resumed and step == 2:
            state = copy.deepcopy(wrapper.state_dict())
            for values in state['state'].values():
                for name, value in values.items():
                    values[name] = value.contiguous() if torch.is_tensor(value) else value
            wrapper.load_state_dict(state)
    return parameter.detach()


@needs_fused
@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('last, resumed', [(False, False), (True, False), (True, True)])
def test_fused_steps_are_those_of_the_others_in_any_layout(
    kind: str, last: bool, resumed: bool
) -> None:
    difference = (train(kind, last, True, resumed) - train(kind, False, False)).abs().max()
    assert difference < 1e-6  # without the layouts in order it is 0.03 to 0.3


@needs_fused
def test_torch_alone_mixes_the_layouts_up() -> None:
    """If this fails, torch has mended it, and wrappers/fused.py can go back to the defaults."""
    parameters = [weight(last=True), weight(last=False)]
    for each, fused in zip(parameters, (True, False)):
        each.grad = torch.randn(each.shape, generator=torch.Generator().manual_seed(1))
        torch.optim.SGD([each], lr=0.1, fused=fused).step()
    assert (parameters[0] - parameters[1]).abs().max() > 0.01


@pytest.mark.parametrize(
    'config',
    [
        dict(optimizer=dict(type='AdamW', lr=0.1, fused=True), clip_grad=dict(max_norm=1)),
        ConfigDict(optimizer=dict(type=torch.optim.SGD, lr=0.1, fused=True)),
        dict(
            constructor='Mine',
            one=dict(optimizer=dict(type='SGD', lr=0.1, fused=True)),
            other=dict(optimizer=dict(type='SGD', lr=0.1)),
        ),
    ],
)
def test_where_there_is_none_a_sentence_says_so(config: Any) -> None:
    given = copy.deepcopy(config)
    found, (note,) = without_missing_fusion(config, Unfused())
    assert config == given and repr(found) == repr(given).replace(", 'fused': True", '')
    assert note.startswith('optimizer.fused=True has no effect: torch ')
    assert HERE is False or note.split(': ')[1].startswith(
        f'torch {torch.__version__} has no fused optimizers for unfused'
    )


@pytest.mark.skipif(
    'foreach' not in inspect.signature(torch.optim.SGD).parameters,
    reason='this torch has no steps over lists',
)
def test_where_steps_over_lists_are_wrong_they_are_switched_off() -> None:
    class NoLists(Unfused):
        supports = Supports(foreach_optimizer=False)

    config = dict(optimizer=dict(type='SGD', lr=0.1))
    found, (note,) = without_missing_fusion(config, NoLists())
    assert found == dict(optimizer=dict(type='SGD', lr=0.1, foreach=False))
    assert note.startswith('optimizer.foreach=False is set') and len(config['optimizer']) == 2
    both, notes = without_missing_fusion(dict(optimizer=dict(type='SGD', fused=True)), NoLists())
    assert both == dict(optimizer=dict(type='SGD', foreach=False)) and len(notes) == 2
    off = dict(optimizer=dict(type='SGD', foreach=False))
    assert without_missing_fusion(off, NoLists()) == (off, [])


def test_what_asks_for_nothing_or_can_be_had_is_left_as_it_is() -> None:
    built = torch.optim.SGD([weight(False)], lr=0.1)
    configs: List[Any] = [
        built,
        dict(optimizer=built),
        dict(optimizer=dict(type='SGD', lr=0.1)),
        dict(optimizer=dict(type='SGD', fused=False)),
        None,
    ]
    for each in configs:
        found, notes = without_missing_fusion(each, Unfused())
        assert found == each and notes == []
    asked = dict(optimizer=dict(type='SGD', lr=0.1, fused=True))
    found, notes = without_missing_fusion(asked, CpuAccelerator())
    assert (
        (found == asked and not notes)
        if HERE
        else (
            'fused' not in found['optimizer']
            and notes
            == [
                f'optimizer.fused=True has no effect: torch {torch.__version__} has no fused SGD. '
                f'The steps are the same, by other kernels.'
            ]
        )
    )
    lacking = why_not_fused(torch.optim.Rprop, CpuAccelerator())
    assert lacking == f'torch {torch.__version__} has no fused Rprop'


@needs_fused
def test_a_fused_checkpoint_goes_on_where_there_is_none() -> None:
    fused, plain = weight(False), weight(False)
    source = OptimWrapper(torch.optim.AdamW([fused], lr=0.01, fused=True))
    target = watch_fused_steps(OptimWrapper(torch.optim.AdamW([plain], lr=0.01)))
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert target.optimizer.param_groups[0]['fused'] is True
    set_current_accelerator(Unfused())
    for parameter, wrapper in ((fused, source), (plain, target)):
        parameter.grad = torch.ones_like(parameter)
        wrapper.step()
    assert target.optimizer.param_groups[0]['fused'] is None
    assert torch.allclose(fused, plain, atol=1e-7)


@needs_fused
def test_a_step_costs_no_look_at_the_signature_of_the_optimizer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: List[Any] = []
    signature = inspect.signature
    monkeypatch.setattr(
        inspect,
        'signature',
        lambda kind, *arguments, **options: (
            asked.append(kind),
            signature(kind, *arguments, **options),
        )[1],
    )
    kind = type('UsersSGD', (torch.optim.SGD,), {})
    groups = [dict(params=[weight(False)]) for _ in range(150)]
    wrapper = watch_fused_steps(OptimWrapper(kind(groups, lr=0.1, fused=True)))
    for _ in range(3):
        for group in groups:
            group['params'][0].grad = torch.ones(8, 4, 3, 3)
        wrapper.step()
    assert asked.count(kind) <= 1


@needs_fused
def test_averages_are_looked_at_again_when_a_checkpoint_or_a_layout_may_have_changed_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: List[int] = []
    monkeypatch.setattr(fused_module, '_lay_out_averages', lambda *_: looks.append(1))
    weight = torch.nn.Parameter(torch.ones(4, 3, 2, 2))
    optimizer = torch.optim.AdamW([weight], fused=True)
    prepare = fused_module.FusedStepPreparation()

    def step() -> int:
        looks.clear()
        weight.grad = torch.ones_like(weight)
        prepare(optimizer)
        return len(looks)

    assert [step(), step()] == [1, 0]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [step(), step()] == [1, 0]
    weight.data = weight.data.to(memory_format=torch.channels_last)
    assert [step(), step()] == [1, 0]
