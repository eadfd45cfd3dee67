"""Enflame GCU, T20 line (TopsRider 2.x, torch 1.10): lazy devices ``xla:N``.

It is written against the source of torch_gcu 1.10.0 and has not been run on a real GCU. DDP and the
eccl group are part of ``torch_gcu``; ``torch.distributed`` carries control traffic only.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Dict, Optional

import torch
from torch import nn

from ._vendor import ask_vendor, import_vendor, vendor_version
from .base import Accelerator, AcceleratorError, Supports
from .xla import replace_batch_norm

_AGENT_STORE = 'TORCHELASTIC_USE_AGENT_STORE'
_DDP_OPTIONS = ('broadcast_buffers', 'find_unused_parameters', 'bucket_cap_mb')


class GcuT20Accelerator(Accelerator):
    """T20 devices.

    ``torch_gcu.device`` is a context manager in this line; the device object is
    ``torch_gcu.gcu_device(i)``, which is an ``xla:i``.
    """

    name = 'gcu_t20'
    device_type = 'xla'
    communication = 'eccl'
    lazy = True
    native_group = True
    supports = Supports(sync_bn=False, float64=False, int64=False)
    masks = ('TOPS_VISIBLE_DEVICES',)

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        vendor = import_vendor('torch_gcu')
        if vendor is None:
            return 'torch_gcu is not installed'
        # The T20 line has it in the package.
        if not hasattr(vendor, 'gcu_device'):
            return 'torch_gcu is the S60 line: use accelerator=gcu'
        if ask_vendor('torch_gcu', vendor.device_count) < 1:
            return 'torch_gcu is installed and shows no device (see `efsmi`)'
        return None

    @property
    def _gcu(self) -> Any:
        return import_vendor('torch_gcu')

    def device_count(self) -> int:
        return int(self._gcu.device_count())

    def device(self, local_rank: int = 0) -> torch.device:
        return self._gcu.gcu_device(self._index(local_rank))

    def set_device(self, local_rank: int) -> None:
        self._gcu.set_device(self._index(local_rank))

    def replace_operations(self) -> None:
        replace_batch_norm()

    def synchronize(self) -> None:
        self.flush()
        self._gcu.synchronize()

    def flush(self) -> None:
        self._gcu.sync_lived_tensor()

    def optimizer_step(self, optimizer: torch.optim.Optimizer, **kwargs: Any) -> None:
        # The vendor's step marks parameters and optimizer state as outputs of the graph.
        self._gcu.optimizer_step(optimizer, optimizer_args=kwargs)

    def init_native_group(
        self, init_method: str, rank: int, world_size: int, timeout: timedelta
    ) -> None:
        # With torchrun's agent store every rank would connect to this address, and none listen.
        agent_store = os.environ.pop(_AGENT_STORE, None)
        try:
            import_vendor('torch_gcu.distributed').init_process_group(  # type: ignore[union-attr]
                'eccl', init_method=init_method, timeout=timeout, world_size=world_size, rank=rank
            )
        except Exception as error:
            raise AcceleratorError(
                f'rank {rank} of {world_size} cannot start the eccl group at {init_method}: '
                f'{type(error).__name__}: {error}. Every rank must reach that address, and see '
                f'another card (`efsmi`).'
            ) from error
        finally:
            if agent_store is not None:
                os.environ[_AGENT_STORE] = agent_store

    def data_parallel(self, module: nn.Module, local_rank: int, **options: Any) -> nn.Module:
        # An option of torch's DDP that is off needs no support by the vendor's.
        requested = {
            name: value for name, value in options.items() if name in _DDP_OPTIONS or value
        }
        unknown = sorted(set(requested) - set(_DDP_OPTIONS))
        if unknown:
            raise AcceleratorError(
                f'DDP on gcu_t20 has no {", ".join(unknown)}: expected only '
                f'{", ".join(_DDP_OPTIONS)}. Remove the rest from model_wrapper_cfg.'
            )
        parallel: Any = import_vendor('torch_gcu.nn.parallel')
        # device_ids=None would use every visible card.
        return parallel.DistributedDataParallel(
            module, device_ids=[self._index(local_rank)], **requested
        )

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self._gcu.manual_seed_all(seed)

    def autocast(self, dtype: Optional[torch.dtype] = None) -> AbstractContextManager:
        return self._gcu.amp.autocast(enabled=True, dtype=dtype or self.amp_dtype)

    def grad_scaler(
        self, dtype: Optional[torch.dtype] = None, enabled: bool = True, **kwargs: Any
    ) -> Any:
        enabled = enabled and (dtype or self.amp_dtype) == torch.float16
        # use_zero_grad=False calls unlazy() with wrong arguments in torch_gcu 1.10.0+2.5.136
        return self._gcu.amp.GradScaler(enabled=enabled, use_zero_grad=True, **kwargs)

    def card_model(self, local_rank: int = 0) -> str:
        return str(self._gcu.get_device_name(self._index(local_rank)))

    def software(self) -> Dict[str, str]:
        return {'torch_gcu': vendor_version('torch_gcu')}

    def memory_allocated(self) -> Optional[int]:
        return int(self._gcu.get_hbm_alloc_size(self._gcu.current_device()))
