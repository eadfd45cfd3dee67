"""Training a small network on the double: optimizers, autocast and GradScaler, against the CPU."""

from __future__ import annotations

from typing import Any, Dict, List, NamedTuple, Optional

import pytest
import torch
from torch import Tensor, nn

CPU, CUDA = torch.device('cpu'), torch.device('cuda', 1)


class Training(NamedTuple):
    """What is left of a training."""

    losses: List[float]
    state: Dict[str, Tensor]
    scales: List[float]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.SiLU(),
        nn.Conv2d(8, 8, 3, groups=8, stride=2),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Upsample(scale_factor=2, mode='bilinear'),
        nn.Conv2d(8, 5, 1),
    )


def train(
    device: torch.device,
    make_optimizer: Any = torch.optim.AdamW,
    dtype: Optional[torch.dtype] = None,
    overflow_in_step: Optional[int] = None,
    **options: Any,
) -> Training:
    model = network().to(device)
    optimizer = make_optimizer(model.parameters(), lr=0.01, **options)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == torch.float16)
    random = torch.Generator().manual_seed(1)
    losses, scales = [], []
    for step in range(4):
        images = torch.randn(4, 3, 17, 17, generator=random).to(device)
        labels = torch.randint(0, 5, (4, 16, 16), generator=random).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=dtype, enabled=dtype is not None):
            logits = model(images)
            loss = nn.functional.cross_entropy(logits, labels)
        assert logits.dtype == (dtype or torch.float32) and loss.dtype == torch.float32
        scaler.scale(loss * (float('inf') if step == overflow_in_step else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    state = {name: tensor.detach().cpu() for name, tensor in model.state_dict().items()}
    return Training(losses, state, scales)


@pytest.mark.parametrize(
    'options',
    [
        dict(make_optimizer=torch.optim.AdamW),
        dict(make_optimizer=torch.optim.AdamW, foreach=True),
        dict(make_optimizer=torch.optim.AdamW, fused=True),
        dict(make_optimizer=torch.optim.SGD, momentum=0.9, nesterov=True),
        dict(make_optimizer=torch.optim.SGD, momentum=0.9, fused=True),
    ],
)
def test_training_equals_the_cpus(options: Any) -> None:
    result, expected = train(CUDA, **options), train(CPU, **options)
    assert result.losses == expected.losses
    assert all(torch.equal(result.state[name], expected.state[name]) for name in expected.state)


def test_parameters_stay_on_their_device_in_fused_steps() -> None:
    model = network().to(CUDA)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model(torch.ones(2, 3, 17, 17, device=CUDA)).sum().backward()
    optimizer.step()
    state = optimizer.state[model[0].weight]
    assert {tensor.device for tensor in state.values()} == {CUDA}


# CUDA's autocast chooses other operators for 16 bits than the CPU's, so that only float32 is equal.
@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16])
@pytest.mark.parametrize('options', [{}, dict(fused=True)])
def test_autocast_training_is_near_that_in_float32(dtype: torch.dtype, options: Any) -> None:
    result, expected = train(CUDA, dtype=dtype, **options), train(CPU, **options)
    differences = [abs(a - b) for a, b in zip(result.losses, expected.losses)]
    assert max(differences) < 0.01
    assert result.losses != expected.losses
    assert all(tensor.dtype in (torch.float32, torch.long) for tensor in result.state.values())


@pytest.mark.parametrize('options', [{}, dict(fused=True), dict(foreach=True)])
def test_grad_scaler_skips_the_step_that_overflows(options: Any) -> None:
    result = train(CUDA, dtype=torch.float16, overflow_in_step=2, **options)
    expected = train(CPU, dtype=torch.float16, overflow_in_step=2, **options)
    assert result.scales == expected.scales == [65536, 65536, 32768, 32768]
    # running means continue, and nothing has become infinite
    assert all(bool(tensor.isfinite().all()) for tensor in result.state.values())
    assert result.state['1.num_batches_tracked'] == 4
