"""torch_xla devices through PJRT: TPU, Neuron, or a CPU used in the same way."""

from __future__ import annotations

from typing import Any, Dict, Optional

import torch

from ._vendor import ask_vendor, import_vendor
from .base import Accelerator, Supports
from .xla_batch_norm import replace_batch_norm


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
