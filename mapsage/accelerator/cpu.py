"""Plain CPU processes, which are always available and the reference for every other stack."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Optional

import torch

from .base import Accelerator, AcceleratorError, Supports

_FUSES = tuple(map(int, torch.__version__.split('.')[:2])) >= (2, 4)  # first with such kernels


class CpuAccelerator(Accelerator):
    """CPU processes that communicate over gloo; any number of ranks may share the machine."""

    name = 'cpu'
    device_type = 'cpu'
    communication = 'gloo'
    supports = Supports(compile=hasattr(torch, 'compile'), fused_optimizer=_FUSES)

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        return None

    def device_count(self) -> int:
        return 1

    def card_count(self) -> int:
        return 0

    def device(self, local_rank: int = 0) -> torch.device:
        return torch.device('cpu')

    def set_device(self, local_rank: int) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    def card_model(self, local_rank: int = 0) -> str:
        return f'cpu {cpu_capability()}'

    def native_bfloat16(self) -> Optional[bool]:
        try:
            text = Path('/proc/cpuinfo').read_text()
        except OSError:  # not Linux
            return None
        flags = re.search(r'^(?:flags|Features)\s*:(.*)$', text, re.MULTILINE)
        # x86 says avx512_bf16 or amx_bf16, 64-bit Arm says bf16.
        return None if flags is None else bool(re.search(r'\b(?:\w+_)?bf16\b', flags.group(1)))

    def autocast(self, dtype: Optional[torch.dtype] = None) -> AbstractContextManager:
        dtype = dtype or self.amp_dtype
        if dtype != torch.bfloat16:
            raise AcceleratorError(
                f'AMP on cpu computes in bfloat16, got {dtype}: set '
                f"optim_wrapper.dtype='bfloat16' or remove it."
            )
        return super().autocast(dtype)


def cpu_capability() -> str:
    """Return the instruction set for which torch has chosen its CPU kernels, such as AVX2."""
    capability = getattr(getattr(torch.backends, 'cpu', None), 'get_cpu_capability', None)
    if capability:
        return str(capability())
    usage = re.search(r'CPU capability usage: (\S+)', torch.__config__.show())
    return usage.group(1) if usage else 'unknown'
