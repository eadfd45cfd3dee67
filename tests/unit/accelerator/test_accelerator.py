"""What every accelerator of this machine answers, and the CPU's arithmetic."""

from __future__ import annotations

from typing import List

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapsage.accelerator import (
    ACCELERATORS,
    Accelerator,
    AcceleratorError,
    derived_seed,
    resolve_accelerator,
)

PRESENT = [kind.name for kind in ACCELERATORS if kind.why_unavailable() is None]


@pytest.fixture(params=PRESENT)
def accelerator(request: pytest.FixtureRequest) -> Accelerator:
    return resolve_accelerator(request.param)


def test_device_holds_tensors(accelerator: Accelerator) -> None:
    accelerator.set_device(0)
    tensor = torch.arange(6.0, device=accelerator.device(0))
    accelerator.flush()
    accelerator.synchronize()
    assert tensor.device.type == accelerator.device_type
    assert accelerator.device_count() >= 1 and tensor.sum().item() == 15


def test_autocast_computes_in_the_accelerators_dtype(accelerator: Accelerator) -> None:
    weight = torch.ones(4, 4, device=accelerator.device(0))
    with accelerator.autocast():
        assert (weight @ weight).dtype == accelerator.amp_dtype
    assert (weight @ weight).dtype == torch.float32


def test_scaler_scales_float16_only(accelerator: Accelerator) -> None:
    scaler = accelerator.grad_scaler(torch.bfloat16, init_scale=4.0)
    assert not scaler.is_enabled()
    loss = torch.ones(1, requires_grad=True)
    assert scaler.scale(loss) is loss
    if accelerator.name == 'cuda' or hasattr(getattr(torch, 'amp', None), 'GradScaler'):
        assert accelerator.grad_scaler(torch.float16).is_enabled()


def test_seeds_are_reproducible(accelerator: Accelerator) -> None:
    def draw(seed: int) -> List[float]:
        accelerator.seed(seed)
        on_device = torch.nn.functional.dropout(torch.ones(64, device=accelerator.device(0)))
        return on_device.cpu().tolist() + torch.rand(4).tolist()

    assert draw(3) == draw(3) != draw(4)
    assert draw(2**32 - 1) == draw(2**32 - 1)


def test_cpu_autocast_refuses_float16() -> None:
    with pytest.raises(AcceleratorError, match="optim_wrapper.dtype='bfloat16'"):
        resolve_accelerator('cpu').autocast(torch.float16)


def test_memory_is_bytes_or_unknown(accelerator: Accelerator) -> None:
    for answer in (accelerator.memory_allocated(), accelerator.max_memory_allocated()):
        assert answer is None or (isinstance(answer, int) and answer >= 0)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=4))
def test_derived_seed_is_a_function_into_32_bits(entropy: List[int]) -> None:
    assert derived_seed(*entropy) == derived_seed(*entropy)
    assert 0 <= derived_seed(*entropy) < 2**32


def test_near_entropy_gives_other_seeds() -> None:
    seeds = {
        derived_seed(seed, rank, step)
        for seed in range(5)
        for rank in range(8)
        for step in range(50)
    }
    assert len(seeds) == 5 * 8 * 50
    assert derived_seed(1, 2, 3) != derived_seed(3, 2, 1)
