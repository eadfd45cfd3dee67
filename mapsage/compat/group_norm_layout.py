"""Train a group norm on maps of a frozen encoder that have their channels last.

Gap: on a CPU the backward pass of ``group_norm`` ends the process with SIGSEGV if the input has its
channels last and needs no gradient (torch 2.9 to 2.13).
Remove when: `tests/unit/compat/test_group_norm_layout.py` passes without :func:`apply` with the
oldest torch of the main leg.
"""

from __future__ import annotations

from typing import Optional

import torch
from torch.nn import functional

_group_norm = functional.group_norm


def _contiguous_norm(
    input: torch.Tensor,
    num_groups: int,
    weight: Optional[torch.Tensor] = None,
    bias: Optional[torch.Tensor] = None,
    eps: float = 1e-5,
) -> torch.Tensor:
    if not torch.jit.is_scripting():
        # Only where the process would end: in another layout the last bits of a result differ.
        if torch.is_grad_enabled() and not input.requires_grad and not input.is_cuda:
            input = input.contiguous()
    return _group_norm(input, num_groups, weight, bias, eps)


def apply() -> None:
    """Replace PyTorch's function."""
    functional.group_norm = _contiguous_norm
