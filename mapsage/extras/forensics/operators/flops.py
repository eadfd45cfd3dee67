"""Floating-point operations of products: matrix products, convolutions and attention.

They are counted from the shapes, an addition and a multiplication as two operations. All other
operators count as zero here: they take as long as moving their bytes (`verdict.py`).
``torch.utils.flop_counter`` of torch 2.13 multiplies the weight's gradient of a grouped convolution
by its number of groups, hundreds for depthwise ones; here it costs what the forward pass costs.
"""

from __future__ import annotations

import math
from typing import Any, Sequence

import torch

# Products of scaled_dot_product_attention in units of its forward pass, which has two: the backward
# pass has four, and computes the scores again (Dao et al. 2022, FlashAttention, algorithm 4).
_ATTENTION_BACKWARD = 2.5


def product_flops(name: str, arguments: Sequence[Any]) -> int:
    """Return the floating-point operations of a call; 0 if the operator is no product.

    Args:
        name: Name of the operator, as `dispatch.operator_name` returns it.
        arguments: Its positional arguments.
    """
    base = name.split('.')[0].rstrip('_')
    if base in ('mm', 'bmm', 'mv', 'dot', 'vdot'):
        return _matrix_product(arguments[0], arguments[1])
    if base in ('addmm', 'baddbmm', 'addmv', 'addbmm'):
        return _matrix_product(arguments[1], arguments[2])
    if base in ('convolution', 'convolution_overrideable', '_convolution'):
        return _convolution(arguments[0], arguments[1], arguments[3:9])
    if base in ('convolution_backward', 'convolution_backward_overrideable'):
        with_bias = base == 'convolution_backward'
        settings = arguments[3 + with_bias :]
        positions = arguments[1] if settings[3] else arguments[0]
        passes = int(bool(settings[6][0])) + int(bool(settings[6][1]))
        return passes * 2 * arguments[2].numel() * _positions(positions)
    if base.startswith('_scaled_dot_product') or base in (
        '_flash_attention_forward',
        '_efficient_attention_forward',
    ):
        return _attention(arguments, backward='backward' in base)
    return 0


def _matrix_product(left: torch.Tensor, right: torch.Tensor) -> int:
    columns = right.shape[-1] if right.dim() > 1 else 1
    return 2 * left.numel() * columns


def _convolution(image: torch.Tensor, weight: torch.Tensor, settings: Sequence[Any]) -> int:
    """Return the operations of a forward pass.

    Args:
        image: Tensor (N, C, ...).
        weight: Tensor (C_out, C / groups, ...), or (C, C_out / groups, ...) if it is transposed.
        settings: Stride, padding, dilation, transposed, output_padding, groups.
    """
    stride, padding, dilation, transposed = settings[:4]
    # Each weight is used once for each position: of the output, or if it is transposed, of the
    # input. Groups are in the weight's shape already.
    if transposed:
        return 2 * weight.numel() * _positions(image)
    dims = weight.dim() - 2
    positions = image.shape[0] if image.dim() == weight.dim() else 1
    for axis in range(dims):
        step, pad, gap = (
            values[axis] if len(values) > 1 else values[0] for values in (stride, padding, dilation)
        )
        length = image.shape[image.dim() - dims + axis] + 2 * pad
        positions *= (length - gap * (weight.shape[2 + axis] - 1) - 1) // step + 1
    return 2 * weight.numel() * positions


def _positions(image: torch.Tensor) -> int:
    return image.shape[0] * math.prod(image.shape[2:])


def _attention(arguments: Sequence[Any], backward: bool) -> int:
    """Return the operations of attention on queries (B, H, L, E), keys and values (B, H, S, E)."""
    query, key, value = arguments[1:4] if backward else arguments[:3]
    batch_heads = math.prod(query.shape[:2])
    forward = 2 * batch_heads * query.shape[2] * key.shape[2] * (query.shape[3] + value.shape[3])
    return int(_ATTENTION_BACKWARD * forward) if backward else forward
