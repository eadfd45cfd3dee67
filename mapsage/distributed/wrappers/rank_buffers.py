"""Separate buffers for each virtual rank of a process, such as running statistics of BatchNorm.

The virtual ranks of a process share one module, and a forward pass changes its buffers.
:class:`RankBuffers` swaps the values in before a virtual rank's forward pass. The module keeps its
buffer tensors; only their values are copied, because other code may refer to the tensors.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, Optional

import torch
from torch import nn

# Path of a module -> name of a buffer -> value. None where the buffer is registered as None.
Buffers = Dict[str, Dict[str, Optional[torch.Tensor]]]


class RankBuffers:
    """Swaps the buffers of a module between the virtual ranks of this process.

    Between two steps the module has the buffers of the block's first virtual rank. A module may
    register a buffer in its first forward pass: for a virtual rank that has no such buffer yet, it
    is removed from the module, so that the module registers one for each of them. A buffer with
    another shape, dtype or device is replaced instead of copied.

    Args:
        module: Model.
        block: Virtual ranks of this process.
    """

    def __init__(self, module: nn.Module, block: range) -> None:
        self._module, self._block = module, block
        self._current = block.start
        # Buffers of the virtual ranks that are not in the module.
        self._stored: Dict[int, Buffers] = {}

    def begin(self) -> None:
        """Give each virtual rank without stored buffers a copy of the module's buffers."""
        for virtual_rank in self._block[1:]:
            if virtual_rank not in self._stored:
                self._store(virtual_rank)

    def forget(self) -> None:
        """Let all virtual ranks start the next step with the module's buffers."""
        self._stored = {}

    def place(self, virtual_rank: int) -> None:
        """Put the buffers of a virtual rank into the module, and store the current ones."""
        if virtual_rank == self._current:
            return
        self._store(self._current)
        self.write(self._stored[virtual_rank])
        self._current = virtual_rank

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Restore the buffers at the end of the context."""
        saved = self.read()
        try:
            yield
        finally:
            self.write(saved)

    def read(self) -> Buffers:
        """Return a copy of the module's buffers."""
        return self._read({})

    def write(self, buffers: Buffers) -> None:
        """Give the module these buffers, which must be on its device, and no others."""
        with torch.no_grad():
            for path, module in self._module.named_modules():
                values = buffers.get(path, {})
                for name in [name for name in module._buffers if name not in values]:
                    del module._buffers[name]
                for name, value in values.items():
                    module._buffers[name] = _copy(value, module._buffers.get(name))

    def _store(self, virtual_rank: int) -> None:
        self._stored[virtual_rank] = self._read(self._stored.get(virtual_rank, {}))

    def _read(self, memory: Buffers) -> Buffers:
        """Return a copy of the module's buffers, in the tensors of ``memory`` where they fit."""
        with torch.no_grad():
            return {
                path: {
                    name: _copy(buffer, memory.get(path, {}).get(name))
                    for name, buffer in module._buffers.items()
                }
                for path, module in self._module.named_modules()
            }


def _copy(value: Optional[torch.Tensor], target: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Return a copy of ``value``, in the memory of ``target`` if shape, dtype and device agree."""
    if value is None:
        return None
    if target is not None and (target.shape, target.dtype, target.device) == (
        value.shape,
        value.dtype,
        value.device,
    ):
        return target.copy_(value)
    return value.detach().clone()
