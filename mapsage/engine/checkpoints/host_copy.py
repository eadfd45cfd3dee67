"""Copies of checkpoints in host memory, to be written while the training goes on."""
from __future__ import annotations

import copy
from functools import partial
from typing import Any, Dict, Iterator, List, Tuple

import torch
from mmengine.utils import apply_to

from mapsage.accelerator import current_accelerator
from mapsage.distributed import local_rank

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


class HostCopies:
    """Makes copies of checkpoints into buffers that are used again.

    New memory costs several times what the copying does, since the kernel clears each page. So the
    buffers of a save are kept for the next one: as much host memory as the checkpoint has bytes.
    The copies of one save, such as the best checkpoint and the last one, share what is equal.
    Tensors on the rank's CUDA device are copied once, into pinned buffers, all of them before the
    host waits.
    """

    def __init__(self) -> None:
        self._copied: Dict[str, torch.Tensor] = {}  # of the save under way, by place
        self._free: Dict[Tuple[torch.dtype, int, bool], List[torch.Tensor]] = {}
        self._used: List[torch.Tensor] = []
        self._received: Dict[int, torch.Tensor] = {}  # buffers that to_host filled, by address

    def to_host(self, data: Any) -> Any:
        """Return nested containers with all tensors on the CPU, as ``tensor.cpu()`` gives them.

        :meth:`copy` takes the tensors that come from CUDA as they are.
        """
        accelerator = current_accelerator()
        receive = partial(self._receive, device=accelerator.device(local_rank()))
        on_host = apply_to(data, lambda value: hasattr(value, 'cpu'), receive)
        accelerator.synchronize()
        return on_host

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
                copied = self._copied[place] = (
                    tensor if tensor.data_ptr() in self._received else
                    self._copy_of(tensor, storages))
            memo[id(tensor)] = copied
        self._give_back_unused()
        # MMEngine has made these for this checkpoint, and they may hold a million numbers each.
        for buffer in checkpoint.get('message_hub', {}).get('log_scalars', {}).values():
            memo[id(buffer)] = buffer
        return copy.deepcopy(checkpoint, memo)

    def release(self) -> None:
        """Let the next copies take the buffers of the last ones, which nobody reads any more."""
        self._free = {}
        for buffer in self._used:
            kind = buffer.dtype, buffer.numel(), buffer.data_ptr() in self._received
            self._free.setdefault(kind, []).append(buffer)
        self._used, self._copied, self._received = [], {}, {}

    def clear(self) -> None:
        """Give the memory back."""
        self._free, self._used, self._copied, self._received = {}, [], {}, {}

    def _receive(self, value: Any, device: torch.device) -> Any:
        """Return a value on the CPU; a copy from ``device`` may not have arrived yet."""
        # Only the rank's own device is waited for; a split model has tensors on others too.
        if type(value) is not torch.Tensor or not value.is_cuda or value.device != device \
                or value.requires_grad or not value.numel() or not _fills_its_memory(value):
            return value.cpu()
        buffer = self._buffer(value.dtype, value.numel(), pinned=True)
        self._received[buffer.data_ptr()] = buffer
        return torch.as_strided(buffer, value.shape, value.stride()).copy_(value, non_blocking=True)

    def _copy_of(self, tensor: torch.Tensor,
                 storages: Dict[Tuple[int, torch.dtype], torch.Tensor]) -> torch.Tensor:
        if tensor.device.type != 'cpu':
            return tensor.detach().cpu().requires_grad_(tensor.requires_grad)
        source = tensor.detach()
        # All of the storage, whatever part of it the tensor shows, in the order of the memory.
        flat = torch.as_strided(source, (_storage_elements(source),), (1,), 0)
        place = (flat.data_ptr(), flat.dtype)
        if place not in storages:
            storages[place] = self._buffer(flat.dtype, flat.numel())
            storages[place].copy_(flat)
        return torch.as_strided(storages[place], source.shape, source.stride(),
                                source.storage_offset()).requires_grad_(tensor.requires_grad)

    def _give_back_unused(self) -> None:
        """Let later copies of this save take pinned buffers whose values are there already."""
        in_use = {tensor.data_ptr() for tensor in self._copied.values()}
        for address in set(self._received) - in_use:
            buffer = self._received.pop(address)
            self._used = [used for used in self._used if used is not buffer]
            self._free.setdefault((buffer.dtype, buffer.numel(), True), []).append(buffer)

    def _buffer(self, dtype: torch.dtype, length: int, pinned: bool = False) -> torch.Tensor:
        free = self._free.get((dtype, length, pinned))
        buffer = free.pop() if free else torch.empty(length, dtype=dtype, pin_memory=pinned)
        self._used.append(buffer)
        return buffer


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


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
