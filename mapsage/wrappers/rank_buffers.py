"""Each virtual rank's own buffers, such as the running statistics of BatchNorm."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterator, Optional

import torch
from torch import nn

# Buffers by name, by the path of their module; None where a module has the name and no tensor.
_Buffers = Dict[str, Dict[str, Optional[torch.Tensor]]]


class RankBuffers:
    """Exchanges the buffers of a module for those of the virtual rank whose turn it is.

    Between two steps the module holds those of the block's first virtual rank. Tensors are copied
    in place, so that the module keeps its own: others may refer to them. A buffer that a virtual
    rank does not have yet is taken away for its turn, so that a module that registers it in its
    first forward pass does so for each; one of another shape is replaced.

    Args:
        module: Model.
        block: Virtual ranks of this process.
    """

    def __init__(self, module: nn.Module, block: range) -> None:
        self._module, self._block = module, block
        self._now = block.start
        self._kept: Dict[int, _Buffers] = {}

    def begin(self) -> None:
        """Give each virtual rank a copy of the module's buffers, unless it has its own."""
        for each in self._block[1:]:
            if each not in self._kept:
                self._keep(each)

    def forget(self) -> None:
        """Let all virtual ranks have the module's buffers from the next step on."""
        self._kept = {}

    def place(self, virtual_rank: int) -> None:
        """Put the buffers of a virtual rank into the module, and keep those that are there."""
        if virtual_rank == self._now:
            return
        self._keep(self._now)
        self._put(self._kept[virtual_rank])
        self._now = virtual_rank

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Undo at the end of the context what has happened to the buffers in it."""
        before = self._read({})
        try:
            yield
        finally:
            self._put(before)

    def _put(self, kept: _Buffers) -> None:
        with torch.no_grad():
            for path, module in self._module.named_modules():
                own = kept.get(path, {})
                for name in [each for each in module._buffers if each not in own]:
                    del module._buffers[name]
                for name, value in own.items():
                    module._buffers[name] = _copied(value, module._buffers.get(name))

    def _keep(self, virtual_rank: int) -> None:
        self._kept[virtual_rank] = self._read(self._kept.get(virtual_rank, {}))

    def _read(self, had: _Buffers) -> _Buffers:
        with torch.no_grad():
            return {path: {name: _copied(buffer, had.get(path, {}).get(name))
                           for name, buffer in module._buffers.items()}
                    for path, module in self._module.named_modules()}


def _copied(value: Optional[torch.Tensor],
            target: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    """Return a copy of ``value``, in the memory of ``target`` where that is alike."""
    if value is None:
        return None
    if target is not None and (target.shape, target.dtype, target.device) == (
            value.shape, value.dtype, value.device):
        return target.copy_(value)
    return value.detach().clone()
