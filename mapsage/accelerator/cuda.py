"""NVIDIA GPUs (and AMD ones under a ROCm build of PyTorch)."""

from __future__ import annotations

import inspect
import os
import re
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, Optional, Sequence

import torch
from torch import nn

from .base import Accelerator, AcceleratorError, Supports

# Version of ROCm; PyTorch for the CPU or for CUDA may lack the name.
_HIP: Optional[str] = getattr(torch.version, 'hip', None)

# Messages of PyTorch if there is no GPU; any other message means a broken installation.
_ABSENT = (
    'Found no NVIDIA driver',
    'No CUDA GPUs are available',
    'No HIP GPUs are available',
    'no CUDA-capable device is detected',
)


# Without this variable cuBLAS may return different bits in each run, and PyTorch refuses matrix
# products in deterministic mode. https://docs.nvidia.com/cuda/cublas/#results-reproducibility
WORKSPACE = 'CUBLAS_WORKSPACE_CONFIG'
_DETERMINISTIC_WORKSPACES = (':4096:8', ':16:8')

# Layers whose backward pass on CUDA PyTorch refuses in deterministic mode (documentation of
# torch.use_deterministic_algorithms, 2.14), except for those that mapsage/compat/ replaces.
_NOT_DETERMINISTIC = (
    nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    nn.AvgPool3d,
    nn.CTCLoss,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.MaxUnpool1d,
    nn.MaxUnpool2d,
    nn.MaxUnpool3d,
    nn.ReflectionPad1d,
    nn.ReflectionPad2d,
)


def set_workspace() -> Optional[str]:
    """Set cuBLAS's workspace for deterministic products unless the user has; return what to log.

    Raises:
        AcceleratorError: If the user has set it to a value with which PyTorch refuses them.
    """
    workspace = os.environ.get(WORKSPACE)
    if workspace is None:
        # 24 MiB; :16:8 takes less memory and is slower
        os.environ[WORKSPACE] = ':4096:8'
        return f'{WORKSPACE}=:4096:8 is set, which deterministic matrix products need'
    if workspace not in _DETERMINISTIC_WORKSPACES:
        raise AcceleratorError(
            f'{WORKSPACE}={workspace!r}: PyTorch multiplies matrices deterministically with '
            f'{" or ".join(_DETERMINISTIC_WORKSPACES)} only. Unset it, or set '
            f'randomness.deterministic=False.'
        )
    return None


def _tf32_setting(backend: Any) -> str:
    """Return whether a backend of PyTorch may round float32 to TF32."""
    try:
        return str(backend.allow_tf32)
    except RuntimeError:  # torch 2.9 and newer, where the user has set the newer attribute
        return str(backend.fp32_precision)


class CudaAccelerator(Accelerator):
    """CUDA devices ``cuda:N``; gradients over nccl, control traffic over gloo."""

    name = 'cuda'
    device_type = 'cuda'
    communication = 'nccl'
    supports = Supports(sync_bn=True, compile=hasattr(torch, 'compile'), fused_optimizer=True)
    amp_dtype = torch.float16
    fast_by_default = True
    # Streams of copies, of all instances.
    _copies: ClassVar[Dict[torch.device, Any]] = {}
    masks = ('CUDA_VISIBLE_DEVICES', 'HIP_VISIBLE_DEVICES', 'ROCR_VISIBLE_DEVICES')

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        if torch.version.cuda is None and _HIP is None:
            return f'torch {torch.__version__} is a CPU build'
        if Accelerator.taken is not None:
            return f'{Accelerator.taken}: use another process for CUDA'
        if torch.cuda.is_available():
            return None
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            message = str(error)
            if any(text in message for text in _ABSENT):
                return message.strip().splitlines()[0]
            raise AcceleratorError(
                f'torch {torch.__version__} has CUDA support but cannot use it: {message}. '
                f'Repair the driver, or choose accelerator=cpu.'
            ) from error
        return 'torch.cuda.is_available() is False'

    def native_bfloat16(self) -> Optional[bool]:
        if _HIP is not None:
            return None
        return torch.cuda.get_device_capability()[0] >= 8  # since Ampere

    def has_16_bit_units(self) -> bool:
        return _HIP is None and torch.cuda.get_device_capability()[0] >= 7  # since Volta

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def device(self, local_rank: int = 0) -> torch.device:
        return torch.device('cuda', self._index(local_rank))

    def set_device(self, local_rank: int) -> None:
        torch.cuda.set_device(self.device(local_rank))

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def host_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        try:
            return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)
        except RuntimeError:  # the machine has no memory left that may be pinned
            return super().host_buffer(shape, dtype)

    def copy_to_host(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        host = self.host_buffer(tensor.shape, tensor.dtype)
        # A stream for copies, so that the next computation does not wait for them.
        stream = self._copies.setdefault(tensor.device, torch.cuda.Stream(tensor.device))
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)
            wait = self.fence(tensor.device)

        def copied() -> torch.Tensor:
            wait()
            return host

        return copied

    def fence(self, device: torch.device) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(device))
        return event.synchronize

    def make_deterministic(self) -> Optional[str]:
        return set_workspace()

    def deterministic_obstacle(self, model: nn.Module) -> Optional[str]:
        obstacles = [
            f'{name} ({type(module).__name__})'
            for name, module in model.named_modules()
            if isinstance(module, _NOT_DETERMINISTIC)
        ]
        # Newer versions have a deterministic path for it. Decode heads enlarge their logits so.
        if 'deterministic' not in inspect.getsource(nn.functional.interpolate):
            obstacles.append('bilinear upsampling')
        return (
            None
            if not obstacles
            else (
                f'randomness.deterministic=True: PyTorch {torch.__version__} has no deterministic '
                f'backward pass on CUDA for {", ".join(obstacles)}. The first training step that '
                f'reaches it will end with an error: replace it, or set '
                f'randomness.deterministic=False.'
            )
        )

    def set_float32_precision(
        self, matmul: Optional[str], tf32_convolutions: Optional[bool]
    ) -> Optional[str]:
        if matmul is not None:
            if hasattr(torch, 'set_float32_matmul_precision'):  # torch 1.12
                torch.set_float32_matmul_precision(matmul)
            else:
                torch.backends.cuda.matmul.allow_tf32 = matmul != 'highest'
        if tf32_convolutions is not None:
            torch.backends.cudnn.allow_tf32 = tf32_convolutions
        return None

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        torch.cuda.manual_seed_all(seed)

    def card(self, local_rank: int = 0) -> Optional[str]:
        for name in self.masks:
            first = os.environ.get(name, '').split(',')[0]
            if first.startswith('MIG') and self.device_count() == 1:
                return first  # the properties may name the whole card instead of its part
        uuid = getattr(torch.cuda.get_device_properties(self.device(local_rank)), 'uuid', None)
        return None if uuid is None else str(uuid)  # since torch 2.5

    def card_model(self, local_rank: int = 0) -> str:
        return torch.cuda.get_device_name(self.device(local_rank))

    def software(self) -> Dict[str, str]:
        versions = {
            'CUDA': str(torch.version.cuda or _HIP),
            'cuDNN': str(torch.backends.cudnn.version()),
            'cudnn_benchmark': str(torch.backends.cudnn.benchmark),
            'cudnn_allow_tf32': _tf32_setting(torch.backends.cudnn),
            'matmul_allow_tf32': _tf32_setting(torch.backends.cuda.matmul),
        }
        driver = Path('/proc/driver/nvidia/version')
        if driver.exists():
            match = re.search(r'\b\d+\.\d+(\.\d+)?\b', driver.read_text(errors='replace'))
            versions['driver'] = match.group() if match else 'unknown'
        return versions

    def memory_allocated(self) -> Optional[int]:
        return torch.cuda.memory_allocated()

    def max_memory_allocated(self) -> Optional[int]:
        return torch.cuda.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        torch.cuda.reset_peak_memory_stats()

    def memory_total(self) -> Optional[int]:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
