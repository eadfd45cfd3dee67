"""Train through batch norm that uses its running statistics, on XLA devices.

Gap: torch_xla 2.9 computes the forward pass of such a layer (``norm_eval=True``, a frozen backbone)
and fails in the backward pass: "The size of mean should be compatible with feature count, but the
size of offset factor is 0". The T20 line of torch_gcu is built on the same code.
Remove when: the test of this file passes with torch_xla alone.
"""
from __future__ import annotations

import importlib.util
from typing import Any, Optional

import torch
from torch.nn import functional

_batch_norm = functional.batch_norm


def _batch_norm_by_formula(input: torch.Tensor, running_mean: Optional[torch.Tensor],
                           running_var: Optional[torch.Tensor],
                           weight: Optional[torch.Tensor] = None,
                           bias: Optional[torch.Tensor] = None, training: bool = False,
                           momentum: float = 0.1, eps: float = 1e-5) -> Any:
    if (training or running_mean is None or running_var is None or input.device.type != 'xla'
            or not torch.is_grad_enabled()):
        return _batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    scale = torch.rsqrt(running_var + eps)
    if weight is not None:
        scale = scale * weight
    shift = -running_mean * scale if bias is None else bias - running_mean * scale
    shape = [1, -1] + [1] * (input.dim() - 2)
    return (input * scale.reshape(shape) + shift.reshape(shape)).to(input.dtype)


def apply() -> None:
    """Replace PyTorch's function where there may be an XLA device."""
    if any(importlib.util.find_spec(name) for name in ('torch_xla', 'torch_gcu')):
        functional.batch_norm = _batch_norm_by_formula
