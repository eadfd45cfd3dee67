"""Numbers of simulated cards: the CPU's bits, but for the attention that PyTorch composes."""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Sequence

import pytest
import torch
from support import no_simulated_cards
from torch import nn
from torch.nn import functional as F

from mapsage.accelerator import resolve_accelerator

reason = no_simulated_cards()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

# What docs/reference/simulator.md excepts: PyTorch chooses an implementation by the kind of device.
COMPOSED: Dict[str, Callable[..., Any]] = dict(
    scaled_dot_product_attention=lambda x, y: F.scaled_dot_product_attention(x, y, y + x)
)
EQUAL: Dict[str, Callable[..., Any]] = dict(
    layer_norm=lambda x, y: F.layer_norm(x, (16,), y[0, 0, 0], y[0, 0, 1]),
    group_norm=lambda x, y: F.group_norm(x, 2, y[0, 0, 0, :4], y[0, 0, 1, :4]),
    mish=lambda x, y: F.mish(x),
    stack=lambda x, y: torch.stack([x, y]) ** 2,
    addr=lambda x, y: torch.addr(x[0, 0], y[0, 0, 0], y[0, 0, 1]),
    norm=lambda x, y: torch.linalg.vector_norm(x, 3, -1) * y[..., 0],
    channel_shuffle=lambda x, y: F.channel_shuffle(x, 2) * y,
    add=lambda x, y: x + y,
    divide=lambda x, y: x / (y**2 + 1),
    matmul=lambda x, y: x @ y.mT,
    linear=lambda x, y: F.linear(x, y[0, 0]),
    conv2d=lambda x, y: F.conv2d(x, y[:, :, :3, :3], padding=1),
    depthwise=lambda x, y: F.conv2d(x, y[:, :1, :3, :3], groups=4),
    conv_transpose=lambda x, y: F.conv_transpose2d(x, y[:, :, :3, :3], stride=2),
    batch_norm=lambda x, y: F.batch_norm(x, None, None, training=True),
    instance_norm=lambda x, y: F.instance_norm(x),
    softmax=lambda x, y: F.softmax(x, -1) * y,
    log_softmax=lambda x, y: F.log_softmax(x, 1) * y,
    gelu=lambda x, y: F.gelu(x),
    silu=lambda x, y: F.silu(x),
    relu=lambda x, y: F.relu(x),
    sigmoid=lambda x, y: x.sigmoid(),
    bilinear=lambda x, y: F.interpolate(x, size=(19, 23), mode='bilinear') ** 2,
    nearest=lambda x, y: F.interpolate(x, scale_factor=2) ** 2,
    max_pool=lambda x, y: F.max_pool2d(x, 3, 2),
    mean_pool=lambda x, y: F.avg_pool2d(x, 2) ** 2,
    adaptive_pool=lambda x, y: F.adaptive_avg_pool2d(x, 3) ** 2,
    sum=lambda x, y: x.sum(1) ** 2,
    mean=lambda x, y: x.mean((2, 3)) ** 2,
    variance=lambda x, y: x.var(1),
    cross_entropy=lambda x, y: F.cross_entropy(x, y.detach().argmax(1)),
    bce=lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid()),
    cat=lambda x, y: torch.cat([x, y]) ** 2,
    gather=lambda x, y: x.flatten()[::3] ** 2,
)


def results(compute: Callable[..., Any], device: str) -> List[torch.Tensor]:
    """Return the output and the gradients, on the CPU, of an operator on a device."""
    generator = torch.Generator().manual_seed(3)
    inputs: Sequence[Any] = [
        torch.randn(4, 4, 16, 16, generator=generator).to(device).requires_grad_() for _ in range(2)
    ]
    output = compute(*inputs)
    (output * torch.linspace(-1, 1, output.numel(), device=device).view_as(output)).sum().backward()
    return [output.detach().cpu(), *(each.grad.cpu() for each in inputs if each.grad is not None)]


@pytest.fixture(scope='module', autouse=True)
def sim() -> Any:
    return resolve_accelerator('sim')


@pytest.mark.parametrize('name', EQUAL)
def test_most_operators_have_the_bits_of_the_cpu(name: str) -> None:
    expected, found = (results(EQUAL[name], device) for device in ('cpu', 'gcu:1'))
    assert len(expected) == len(found) >= 2
    for one, other in zip(expected, found):
        assert torch.equal(one, other)


@pytest.mark.parametrize('name', COMPOSED)
def test_attention_has_other_last_bits(name: str) -> None:
    """As the docs say. If it is equal one day, the docs and this list lose it."""
    expected, found = (results(COMPOSED[name], device) for device in ('cpu', 'gcu:1'))
    assert not all(torch.equal(one, other) for one, other in zip(expected, found))
    for one, other in zip(expected, found):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)


def test_every_operator_with_a_kernel_of_the_cpu_has_it_here() -> None:
    """By PyTorch's table: a composition would be computed where this device has no kernel."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composed = ('CompositeImplicitAutograd', 'CompositeExplicitAutograd')
    names = [
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith('aten::')
        and has(name, 'CPU')
        and any(has(name, key) for key in composed)
    ]
    assert 'aten::native_layer_norm' in names
    # A variant that writes into a given tensor calls the plain operator.
    missing = [
        name
        for name in names
        if not has(name, 'PrivateUse1') and not name.endswith(('.out', '_out'))
    ]
    assert missing == []


def test_a_network_without_attention_has_the_bits_of_the_cpu() -> None:
    def train(device: str) -> torch.Tensor:
        torch.manual_seed(1)
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 5, 1),
            nn.GroupNorm(5, 5),
            nn.SiLU(),
        )
        images = torch.randn(2, 3, 16, 16).to(device)
        model.to(device)
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(model(images), images[:, 0, 1:-1, 1:-1].gt(0).long()).backward()
            optimizer.step()
        return torch.cat(
            [value.detach().flatten().cpu().float() for value in model.state_dict().values()]
        )

    assert torch.equal(train('cpu'), train('gcu:2'))
