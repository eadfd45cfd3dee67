"""Counted operations of products against multiplications that are counted one by one."""

from __future__ import annotations

from typing import Callable, Dict

import pytest
import torch
from torch.nn import functional

from mapsage.extras.forensics.operators.recording import OperatorRecorder


def flops_of(step: Callable[[], object]) -> Dict[str, int]:
    recorder = OperatorRecorder(skip_products=False)
    with recorder:
        step()
    return {name: use.flops for name, use in recorder.recording.uses.items() if use.flops}


@pytest.mark.parametrize('groups, channels_out', [(1, 6), (2, 6), (4, 4), (4, 8)])
@pytest.mark.parametrize('stride, padding, dilation', [(1, 0, 1), (2, 1, 1), (1, 2, 2)])
def test_convolutions_of_any_group_count(
    groups: int, channels_out: int, stride: int, padding: int, dilation: int
) -> None:
    image = torch.randn(2, 4, 9, 8, requires_grad=True)
    weight = torch.randn(channels_out, 4 // groups, 3, 3, requires_grad=True)
    output = functional.conv2d(image, weight, None, stride, padding, dilation, groups)
    # An output value is a sum over the channels of its group and the 3 x 3 kernel.
    products = output.numel() * (4 // groups) * 9
    assert flops_of(
        lambda: (
            functional.conv2d(image, weight, None, stride, padding, dilation, groups)
            .sum()
            .backward()
        )
    ) == {'convolution': 2 * products, 'convolution_backward': 4 * products}


def test_an_image_without_gradient_costs_one_product_backward() -> None:
    image, weight = torch.randn(1, 3, 8, 8), torch.randn(4, 3, 3, 3, requires_grad=True)
    flops = flops_of(lambda: functional.conv2d(image, weight).sum().backward())
    assert flops['convolution_backward'] == flops['convolution'] == 2 * 4 * 36 * 27


def test_a_transposed_convolution_uses_each_weight_for_each_input() -> None:
    image = torch.randn(2, 6, 5, 5, requires_grad=True)
    weight = torch.randn(6, 4 // 2, 2, 2, requires_grad=True)
    flops = flops_of(
        lambda: functional.conv_transpose2d(image, weight, stride=2, groups=2).sum().backward()
    )
    assert flops == {'convolution': 2 * 2 * 25 * 48, 'convolution_backward': 4 * 2 * 25 * 48}


def test_matrix_products_and_attention() -> None:
    query = torch.randn(2, 3, 5, 8, requires_grad=True)
    flops = flops_of(
        lambda: functional.scaled_dot_product_attention(query, query, query).sum().backward()
    )
    forward = 2 * 2 * 3 * (5 * 5 * 8) * 2
    assert sorted(flops.values()) == [forward, int(2.5 * forward)]
    assert flops_of(
        lambda: functional.linear(torch.randn(7, 8), torch.randn(5, 8), torch.randn(5))
    ) == {'addmm': 2 * 7 * 8 * 5}
    assert flops_of(lambda: torch.randn(2, 3, 4) @ torch.randn(2, 4, 5)) == {'bmm': 2 * 2 * 60}
