"""The formula of attention against PyTorch's kernel for the CPU, and cards' operators with it."""

from __future__ import annotations

import pytest
import torch

from mapsage.extras.forensics.operators.attention import attention_results, has_formula
from mapsage.extras.forensics.operators.comparison import OperatorComparison
from mapsage.extras.forensics.operators.host_calls import HostCall

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def tensors(count: int):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, 5, 8, dtype=torch.float64, generator=generator) for _ in range(count)]


@pytest.mark.parametrize('causal', [False, True])
@pytest.mark.parametrize('scale', [None, 0.7])
@pytest.mark.parametrize('masked', [False, True])
def test_output_and_gradients_are_those_of_the_kernel(
    causal: bool, scale: float, masked: bool
) -> None:
    query, key, value, gradient = tensors(4)
    kwargs = dict(
        attn_mask=torch.randn(5, 5).double() if masked and not causal else None, scale=scale
    )
    args = (query, key, value, 0.0, causal)
    output, sums = FORWARD(*args, **kwargs)
    assert torch.allclose(attention_results(FORWARD, args, kwargs)[0], output)
    backward = (gradient, query, key, value, output, sums, 0.0, causal)
    for actual, expected in zip(
        attention_results(BACKWARD, backward, kwargs), BACKWARD(*backward, **kwargs)
    ):
        assert torch.allclose(actual, expected)


def test_dropout_is_not_determined() -> None:
    assert attention_results(FORWARD, (*tensors(3), 0.5), {}) is None


def test_operators_of_cards_are_computed_by_the_formula() -> None:
    query, key, value, gradient = tensors(4)
    output = FORWARD(query, key, value)[0]
    efficient = aten._scaled_dot_product_efficient_attention.default
    assert has_formula(efficient) and not has_formula(aten.mm.default)
    call = HostCall(efficient, (query, key, value, None, True), {})
    assert torch.allclose(call.run()[0][0], output)
    assert call.run(torch.float32)[0][0].dtype == torch.float32
    flash = HostCall(aten._scaled_dot_product_flash_attention.default, (query, key, value), {})
    assert torch.allclose(flash.run()[0][0], output)


def test_an_operator_without_a_kernel_on_the_cpu_is_not_compared() -> None:
    comparison = OperatorComparison('gcu', lambda: None)
    call = HostCall(
        aten._cudnn_ctc_loss.default,
        (torch.zeros(2, 1, 3), torch.ones(1, dtype=torch.int32), [2], [1], 0, False, False),
        {},
    )
    assert comparison._errors(call, call.args, {}, (torch.zeros(1), torch.zeros(1))) is None
