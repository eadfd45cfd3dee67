"""torch_xla devices through PJRT: TPU, Neuron, or a CPU used in the same way.

torch_xla 2.9 computes the forward pass of a batch norm with running statistics (``norm_eval=True``,
a frozen backbone) and fails in the backward pass: "The size of mean should be compatible with
feature count, but the size of offset factor is 0". The T20 line of torch_gcu is built on the same
code. The accelerators with XLA devices call :func:`replace_batch_norm`. Remove it when its test
passes without it.

Source of the formula: ``torch.nn.BatchNorm2d``, y = (x - mean) / sqrt(var + eps) * weight + bias.
"""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch
from torch.nn import functional

from ._vendor import ask_vendor, import_vendor
from .base import Accelerator, Supports

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


class XlaAccelerator(Accelerator):
    """The lazy XLA device of this process.

    Under torchrun every process has one PJRT client, so ``device()`` is the same string on every
    rank. Gradients are staged through host memory, because a gloo group that gets an XLA tensor
    returns without reducing it.
    """

    name = 'xla'
    device_type = 'xla'
    communication = 'staged'
    lazy = True
    # The output shape depends on values.
    native_bincount = False
    supports = Supports(sync_bn=False)

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        if import_vendor('torch_xla') is None:
            return 'torch_xla is not installed'
        return None

    @classmethod
    def is_cpu_stand_in(cls) -> bool:
        """Return whether PJRT computes on the CPU, which ``auto`` never chooses."""
        return ask_vendor('torch_xla', lambda: _runtime().device_type()) == 'CPU'

    @property
    def _xla(self) -> Any:
        return import_vendor('torch_xla')

    def device_count(self) -> int:
        return int(_runtime().addressable_device_count())

    def card_count(self) -> int:
        return 0 if self.is_cpu_stand_in() else self.device_count()

    def device(self, local_rank: int = 0) -> torch.device:
        return self._xla.device()

    def set_device(self, local_rank: int) -> None:
        return None

    def replace_operations(self) -> None:
        replace_batch_norm()

    def synchronize(self) -> None:
        self._xla.sync()
        _xla_model().wait_device_ops()

    def flush(self) -> None:
        self._xla.sync()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self._xla.manual_seed(seed)

    def card_model(self, local_rank: int = 0) -> str:
        return f'{self.name} {_runtime().device_type()}'

    def software(self) -> Dict[str, str]:
        return {'torch_xla': str(self._xla.__version__)}

    def memory_allocated(self) -> Optional[int]:
        if self.is_cpu_stand_in():
            return None  # PJRT's CPU client does not record it
        return int(_xla_model().get_memory_info(self.device())['bytes_used'])

    def max_memory_allocated(self) -> Optional[int]:
        if self.is_cpu_stand_in():
            return None
        info = _xla_model().get_memory_info(self.device())
        return int(info['peak_bytes_used']) if 'peak_bytes_used' in info else None


def _runtime() -> Any:
    return import_vendor('torch_xla.runtime')


def _xla_model() -> Any:
    return import_vendor('torch_xla.core.xla_model')
