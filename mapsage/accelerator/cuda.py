"""NVIDIA GPUs (and AMD ones under a ROCm build of PyTorch)."""
from __future__ import annotations

from typing import Optional

import torch

from .base import Accelerator, AcceleratorError, Supports

# Messages of PyTorch if there is no GPU; any other message means a broken installation.
_ABSENT = ('Found no NVIDIA driver', 'No CUDA GPUs are available', 'No HIP GPUs are available',
           'no CUDA-capable device is detected')


class CudaAccelerator(Accelerator):
    """CUDA devices ``cuda:N``; gradients over nccl, control traffic over gloo."""

    name = 'cuda'
    device_type = 'cuda'
    communication = 'nccl'
    supports = Supports(
        sync_bn=True, compile=hasattr(torch, 'compile'), fused_optimizer=True)
    amp_dtype = torch.float16

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        if torch.version.cuda is None and getattr(torch.version, 'hip', None) is None:
            return f'torch {torch.__version__} is a CPU build'
        if torch.cuda.is_available():
            return None
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            message = str(error)
            if any(words in message for words in _ABSENT):
                return message.strip().splitlines()[0]
            raise AcceleratorError(
                f'torch {torch.__version__} has CUDA support but cannot use it: {message}. '
                f'Repair the driver, or choose accelerator=cpu.') from error
        return 'torch.cuda.is_available() is False'

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def device(self, local_rank: int = 0) -> torch.device:
        self._check_local_rank(local_rank)
        return torch.device('cuda', local_rank)

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(self.device(local_rank))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed(seed)

    def memory_allocated(self) -> Optional[int]:
        return torch.cuda.memory_allocated()

    def max_memory_allocated(self) -> Optional[int]:
        return torch.cuda.max_memory_allocated()

    def memory_total(self) -> Optional[int]:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
