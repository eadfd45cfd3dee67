"""Copies of checkpoints in host memory, to be written while the training goes on."""
from __future__ import annotations

import copy
from typing import Any, Dict, Iterator, List, Optional, Tuple

import torch

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class HostCopies:
    """Makes copies of checkpoints into buffers that are used again.

    New memory costs several times what the copying does, since the kernel clears each page. So the
    buffers of a save are kept for the next one: as much host memory as the checkpoint has bytes.
    The copies of one save, such as the best checkpoint and the last one, share what is equal.
    """

    def __init__(self) -> None:
        self._copied: Dict[str, torch.Tensor] = {}  # of the save under way, by place
        self._free: Dict[Tuple[torch.dtype, int], List[torch.Tensor]] = {}
        self._used: List[torch.Tensor] = []

    def copy(self, checkpoint: Dict[str, Any]) -> Dict[str, Any]:
        """Return a copy that shares nothing with ``checkpoint``, with all plain tensors on the CPU.

        Tensors that share memory do so in the copy too, so that the file has the same size.
        """
        memo: Dict[int, Any] = {}
        storages: Dict[Tuple[int, torch.dtype], torch.Tensor] = {}
        for place, tensor in _plain_tensors(checkpoint, ''):
            if id(tensor) in memo:
                continue
            copied = self._copied.get(place)
            if copied is None or not _same_bits(tensor, copied):
                copied = self._copied[place] = self._copy_of(tensor, storages)
            memo[id(tensor)] = copied
        # MMEngine has made these for this checkpoint, and they may hold a million numbers each.
        for buffer in checkpoint.get('message_hub', {}).get('log_scalars', {}).values():
            memo[id(buffer)] = buffer
        return copy.deepcopy(checkpoint, memo)

    def release(self) -> None:
        """Let the next copies take the buffers of the last ones, which nobody reads any more."""
        self._free = {}
        for buffer in self._used:
            self._free.setdefault((buffer.dtype, buffer.numel()), []).append(buffer)
        self._used, self._copied = [], {}

    def clear(self) -> None:
        """Give the memory back."""
        self._free, self._used, self._copied = {}, [], {}

    def _copy_of(self, tensor: torch.Tensor,
                 storages: Dict[Tuple[int, torch.dtype], torch.Tensor]) -> torch.Tensor:
        if tensor.device.type != 'cpu':
            return tensor.detach().cpu().requires_grad_(tensor.requires_grad)
        source = tensor.detach()
        # All of the storage, whatever part of it the tensor shows, in the order of the memory.
        flat = torch.as_strided(source, (_storage_elements(source),), (1,), 0)
        place = (flat.data_ptr(), flat.dtype)
        if place not in storages:
            storages[place] = self._buffer(flat)
            storages[place].copy_(flat)
        return torch.as_strided(storages[place], source.shape, source.stride(),
                                source.storage_offset()).requires_grad_(tensor.requires_grad)

    def _buffer(self, flat: torch.Tensor) -> torch.Tensor:
        known: Optional[List[torch.Tensor]] = self._free.get((flat.dtype, flat.numel()))
        buffer = known.pop() if known else torch.empty(flat.shape, dtype=flat.dtype)
        self._used.append(buffer)
        return buffer


def _same_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    if (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad) != (
            other.dtype, other.shape, other.stride(), other.requires_grad):
        return False
    bits = _BITS[tensor.element_size()]
    return torch.equal(tensor.detach().cpu().view(bits), other.detach().view(bits))


def _plain_tensors(value: Any, place: str) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield the tensors in nested containers that are nothing but a view of their memory.

    With each comes its place in the containers.

    Others, such as sparse and quantized ones, are left to ``copy.deepcopy``.
    """
    if type(value) is torch.Tensor:
        if value.layout is torch.strided and not (
                value.is_quantized or value.is_complex() or value.is_neg()):
            yield place, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _plain_tensors(each, f'{place}/{key}')
    elif isinstance(value, (list, tuple)):
        for number, each in enumerate(value):
            yield from _plain_tensors(each, f'{place}/{number}')


def _storage_elements(tensor: torch.Tensor) -> int:
    if hasattr(tensor, 'untyped_storage'):  # torch 2
        return int(tensor.untyped_storage().nbytes()) // tensor.element_size()
    return int(tensor.storage().size())
