"""Mixed precision trains, clips, accumulates and survives a change of accelerator."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, List

import pytest
import torch
from ranks import run_ranks
from torch import nn

from mapsage.accelerator import AcceleratorError, resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.distributed.wrappers import AmpOptimWrapper, MMDistributedDataParallel, OptimWrapper


@pytest.fixture(autouse=True)
def _cpu() -> None:
    set_current_accelerator(resolve_accelerator('cpu'))


def conv_net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 2, 1))


def wrapper(model: nn.Module, kind: Any = AmpOptimWrapper, **kwargs: Any) -> Any:
    return kind(optimizer=torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9), **kwargs)


def train(model: nn.Module, optim: Any, steps: int) -> List[float]:
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    labels, losses = (images[:, 0] > 0).long(), []
    for _ in range(steps):
        with optim.optim_context(model):
            logits = model(images)
            loss = nn.functional.cross_entropy(logits.float(), labels)
        optim.update_params(loss)
        losses.append(float(loss))
        assert logits.dtype == getattr(optim, 'cast_dtype', torch.float32)
    return losses


@pytest.mark.parametrize('dtype', [None, 'bfloat16', torch.bfloat16])
def test_bfloat16_trains_on_cpu(dtype: Any) -> None:
    model = conv_net()
    losses = train(model, wrapper(model, dtype=dtype), 30)
    assert losses[-1] < losses[0] / 3
    assert all(p.dtype == torch.float32 for p in model.parameters())


def test_float16_on_cpu_says_what_to_set() -> None:
    model = conv_net()
    with pytest.raises(AcceleratorError, match="optim_wrapper.dtype='bfloat16'"):
        train(model, wrapper(model, dtype='float16'), 1)


@pytest.mark.parametrize('kind', [OptimWrapper, AmpOptimWrapper])
def test_gradients_are_clipped(kind: Any) -> None:
    model = conv_net()
    before = copy.deepcopy(model)
    optim = wrapper(model, kind, clip_grad=dict(max_norm=1e-3))
    train(model, optim, 1)
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before.parameters())])
    assert moved.norm().item() == pytest.approx(0.5 * 1e-3, rel=1e-2)


@pytest.mark.parametrize('kind', [OptimWrapper, AmpOptimWrapper])
def test_accumulation_steps_every_second_time_by_the_mean(kind: Any) -> None:
    one, two = conv_net(), conv_net()
    train(one, wrapper(one, kind), 1)
    optim = wrapper(two, kind, accumulative_counts=2)
    optim.initialize_count_status(two, 0, 4)
    train(two, optim, 1)
    assert all(torch.equal(a, b) for a, b in zip(two.parameters(), conv_net().parameters()))
    train(two, optim, 1)
    for a, b in zip(one.parameters(), two.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-4)


def synchronizing_batches() -> List[bool]:
    """Whether ranks average their gradients in each of two batches of a step, by both wrappers."""
    accelerator = set_current_accelerator(resolve_accelerator('cpu'))
    init_process_group(accelerator, timeout=30)
    found = []
    for kind in (OptimWrapper, AmpOptimWrapper):
        model = MMDistributedDataParallel(conv_net())
        optim = wrapper(model, kind, accumulative_counts=2)
        optim.initialize_count_status(model, 0, 2)
        for _ in range(2):
            with optim.optim_context(model):
                found.append(model.require_backward_grad_sync)
                loss = model.module(torch.ones(1, 3, 8, 8)).float().mean()
            optim.update_params(loss)
    return found


def test_ranks_average_their_gradients_once_a_step(tmp_path: Path) -> None:
    assert run_ranks(synchronizing_batches, 1, tmp_path) == [[False, True] * 2]


@pytest.mark.parametrize(
    'first, second',
    [
        (OptimWrapper, AmpOptimWrapper),
        (AmpOptimWrapper, OptimWrapper),
        (AmpOptimWrapper, AmpOptimWrapper),
    ],
)
def test_state_passes_between_kinds(first: Any, second: Any) -> None:
    model = conv_net()
    optim = wrapper(model, first)
    train(model, optim, 2)
    restored = wrapper(conv_net(), second)
    restored.load_state_dict(copy.deepcopy(optim.state_dict()))
    for one, other in zip(optim.optimizer.state.values(), restored.optimizer.state.values()):
        assert torch.equal(one['momentum_buffer'], other['momentum_buffer'])


def with_scaler(model: nn.Module) -> Any:
    """A float16 wrapper whose scaler is enabled, as on a CUDA machine."""
    if not hasattr(getattr(torch, 'amp', None), 'GradScaler'):
        pytest.skip('torch < 2.3 has a gradient scaler for CUDA only')
    return wrapper(model, dtype='float16', loss_scale=dict(init_scale=8.0))


def test_scaler_state_comes_and_goes() -> None:
    scaled, plain = with_scaler(conv_net()), wrapper(conv_net())
    assert scaled.loss_scaler.is_enabled() and not plain.loss_scaler.is_enabled()
    plain.load_state_dict(copy.deepcopy(scaled.state_dict()))
    scaled.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert scaled.loss_scaler.get_scale() == 8.0
    other = with_scaler(conv_net())
    other.loss_scaler.load_state_dict(dict(scaled.loss_scaler.state_dict(), scale=32.0))
    scaled.load_state_dict(other.state_dict())
    assert scaled.loss_scaler.get_scale() == 32.0


@pytest.mark.parametrize('loss_scale', [64.0, 64])
def test_a_constant_scale_stays(loss_scale: Any) -> None:
    with_scaler(conv_net())
    optim = wrapper(conv_net(), dtype='float16', loss_scale=loss_scale)
    assert optim._scale_update_param == 64.0
    assert optim.loss_scaler.get_scale() == 64.0


@pytest.mark.parametrize(
    'dtype, enabled, want',
    [('float16', True, True), ('float16', False, False), ('bfloat16', True, False)],
)
def test_the_scaler_may_be_switched_off(dtype: str, enabled: bool, want: bool) -> None:
    model = conv_net()
    with_scaler(model)
    optim = wrapper(model, dtype=dtype, loss_scale=dict(enabled=enabled, init_scale=8.0))
    assert optim.loss_scaler.is_enabled() is want
    train(model, wrapper(model, dtype='bfloat16', loss_scale=dict(enabled=enabled)), 1)


@pytest.mark.parametrize(
    'arguments, words',
    [
        (dict(dtype='float8'), "expected 'float16' or 'bfloat16'"),
        (dict(dtype=torch.float64), "expected 'float16' or 'bfloat16'"),
        (dict(loss_scale='static'), "expected 'dynamic'"),
        (dict(loss_scale=True), "'dynamic'"),
        (dict(use_fsdp=True), 'use_fsdp=True is not supported'),
    ],
)
def test_bad_arguments(arguments: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        wrapper(conv_net(), **arguments)
