"""What a device computes, tried on the device itself.

Makes and versions of their software differ, and no interface of PyTorch tells what they lack: some
keep 64-bit numbers in 32 bits, some run missing operators on the CPU without a word. So each
capability is a computation of a few numbers with a known result. No random number is drawn.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional

import torch

from .base import Supports

_SYNC_BN = (
    'batch_norm_stats',
    'batch_norm_gather_stats_with_counts',
    'batch_norm_elemt',
    'batch_norm_backward_reduce',
    'batch_norm_backward_elemt',
)


class Capabilities(NamedTuple):
    """What one device computes itself.

    Attributes:
        supports: Capabilities that decide how a run is built.
        bfloat16: Whether it multiplies matrices of bfloat16.
    """

    supports: Supports
    bfloat16: bool

    def summary(self) -> str:
        """Return the capabilities as one phrase for the log."""
        answers = dict(
            int64=self.supports.int64,
            float64=self.supports.float64,
            bfloat16=self.bfloat16,
            SyncBN=self.supports.sync_bn,
        )
        answers['foreach optimizers'] = self.supports.foreach_optimizer
        answers['fused optimizers'] = self.supports.fused_optimizer
        return ', '.join(f'{name} {"yes" if answer else "no"}' for name, answer in answers.items())


def probe_device(device: torch.device, bfloat16: Optional[bool] = None) -> Capabilities:
    """Return what a device of type PrivateUse1 computes. Takes some dozens of small operators.

    Args:
        device: Device, which must be usable.
        bfloat16: Whether the vendor says that it supports bfloat16; None to try it.
    """
    return Capabilities(
        Supports(
            sync_bn=all(map(has_kernel, _SYNC_BN)),
            float64=_holds(lambda: _keeps_float64(device)),
            int64=_holds(lambda: _keeps_int64(device)),
            # Inductor needs a backend for the device, which no make here has for training.
            compile=False,
            fused_optimizer=has_kernel('_fused_adamw_')
            and _holds(lambda: _steps(device, fused=True)),
            foreach_optimizer=_holds(lambda: _steps(device, foreach=True)),
        ),
        _holds(lambda: _multiplies_bfloat16(device)) if bfloat16 is None else bfloat16,
    )


def has_kernel(operator: str) -> bool:
    """Return whether the plugin has its own kernel of an operator of PyTorch, such as ``'relu'``.

    A fallback to the CPU that a plugin registers for all operators does not count.
    """
    try:
        return bool(
            torch._C._dispatch_has_kernel_for_dispatch_key(f'aten::{operator}', 'PrivateUse1')
        )
    # This version of torch has no such operator.
    except RuntimeError:
        return False


def _holds(experiment: Callable[[], bool]) -> bool:
    """Return the outcome of an experiment; False if the device refuses it."""
    try:
        return experiment()
    except (RuntimeError, TypeError, ValueError):
        return False


def _keeps_int64(device: torch.device) -> bool:
    number = 2**40
    on_device = torch.tensor([number]).to(device)
    return on_device.cpu().tolist() == [number] and (on_device + 1).cpu().tolist() == [number + 1]


def _keeps_float64(device: torch.device) -> bool:
    # The largest odd number that float64 holds, and a sum of which float32 loses the small part.
    number = float(2**53 - 1)
    on_device = torch.tensor([number], dtype=torch.float64).to(device)
    total = torch.tensor([1.0], dtype=torch.float64).to(device) + 2.0**-40
    return on_device.cpu().tolist() == [number] and total.cpu().tolist() == [1 + 2.0**-40]


def _multiplies_bfloat16(device: torch.device) -> bool:
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    on_device = matrix.to(device)
    return (on_device @ on_device).float().cpu().tolist() == [[7.0, 10.0], [15.0, 22.0]]


def _steps(device: torch.device, foreach: bool = False, fused: bool = False) -> bool:
    """Return whether a step of AdamW on the device is right."""
    parameter = torch.nn.Parameter(torch.ones(1, device=device))
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer = torch.optim.AdamW(
        [parameter], lr=0.125, weight_decay=0, foreach=foreach, fused=fused
    )
    optimizer.step()
    # Adam's first step has the length of the learning rate, whatever the gradient.
    return abs(float(parameter.detach().cpu()) - 0.875) < 1e-5
