"""Enflame GCU, S60 line (TopsRider 3.x): eager devices ``gcu:N``, PrivateUse1 renamed.

It is written against the source of torch_gcu 2.10. It has been run on simulated devices (sim.py),
not on a real GCU.
"""
from __future__ import annotations

from typing import Any, Dict, Optional

import torch

from ._vendor import ask_vendor, import_vendor
from .base import Accelerator, Supports


class GcuAccelerator(Accelerator):
    """S60 devices; gradients over eccl, control traffic over gloo.

    64-bit numbers are emulated with 32 bits on the device, SyncBN has no kernels, and fused
    optimizers fall back to the CPU (torch_gcu 2.10 ``gcu_op_fallback.yaml``).
    """

    name = 'gcu'
    device_type = 'gcu'
    communication = 'eccl'
    supports = Supports(sync_bn=False, float64=False, int64=False)
    amp_dtype = torch.bfloat16
    masks = ('TOPS_VISIBLE_DEVICES',)

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        vendor = import_vendor('torch_gcu')
        # `torch.gcu` without the module belongs to the simulator.
        if vendor is None:
            return 'torch_gcu is not installed'
        if not hasattr(torch, 'gcu'):
            return 'torch_gcu is the T20 line: use accelerator=gcu_t20'
        if ask_vendor('torch_gcu', torch.gcu.device_count) < 1:
            return 'torch_gcu is installed and shows no device (see `efsmi`)'
        return None

    @property
    def _gcu(self) -> Any:
        return torch.gcu  # type: ignore[attr-defined]  # put there by torch_gcu

    def device_count(self) -> int:
        return int(self._gcu.device_count())

    def device(self, local_rank: int = 0) -> torch.device:
        return torch.device('gcu', self._index(local_rank))

    def set_device(self, local_rank: int) -> None:
        index = self.device(local_rank).index
        ask_vendor('torch_gcu', lambda: self._gcu.set_device(index))

    def synchronize(self) -> None:
        self._gcu.synchronize()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self._gcu.manual_seed_all(seed)

    def card(self, local_rank: int = 0) -> Optional[str]:
        properties = getattr(self._gcu, 'get_device_properties', None)
        uuid = properties and getattr(properties(self._index(local_rank)), 'uuid', None)
        return None if uuid is None else str(uuid)

    def card_model(self, local_rank: int = 0) -> str:
        return str(self._gcu.get_device_name(self._index(local_rank)))

    def software(self) -> Dict[str, str]:
        return {'torch_gcu': str(getattr(import_vendor('torch_gcu'), '__version__', 'unknown'))}

    def memory_allocated(self) -> Optional[int]:
        probe = getattr(self._gcu, 'memory_allocated', None)
        return None if probe is None else int(probe())

    def max_memory_allocated(self) -> Optional[int]:
        probe = getattr(self._gcu, 'max_memory_allocated', None)
        return None if probe is None else int(probe())

    def memory_total(self) -> Optional[int]:
        probe = getattr(self._gcu, 'mem_get_info', None)
        return None if probe is None else int(probe()[1])
