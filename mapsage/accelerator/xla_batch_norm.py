"""Batch norm with running statistics that can be trained through on XLA devices.

torch_xla 2.9 computes the forward pass of such a layer (``norm_eval=True``, a frozen backbone) and
fails in the backward pass: "The size of mean should be compatible with feature count, but the size
of offset factor is 0". The T20 line of torch_gcu is built on the same code. The accelerators with
XLA devices call :func:`replace_batch_norm`. Remove this file when its test passes without it.

Source of the formula: ``torch.nn.BatchNorm2d``, y = (x - mean) / sqrt(var + eps) * weight + bias.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch.nn import functional

_batch_norm = functional.batch_norm


def _batch_norm_by_formula(
    input: torch.Tensor,
    running_mean: Optional[torch.Tensor],
    running_var: Optional[torch.Tensor],
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    if (
        training
        or running_mean is None
        or running_var is None
        or input.device.type != 'xla'
        or not torch.is_grad_enabled()
    ):
        return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = [1, -1] + [1] * (input.dim() - 2)
    return (input * scale.reshape(shape) + shift.reshape(shape)).to(input.dtype)


def replace_batch_norm() -> None:
    """Replace ``torch.nn.functional.batch_norm``; on other devices it computes as before."""
    functional.batch_norm = _batch_norm_by_formula
