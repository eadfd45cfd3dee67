"""Copies of checkpoints in host memory, so that the training can continue while they are written.

:class:`HostCopies` reuses its buffers, because fresh memory costs several times as much as the
copy: the kernel clears every page. A checkpoint of ``n`` bytes therefore occupies ``n`` more bytes
of host memory for the whole run. `background.py` owns the copies; `saving.py` decides what is
copied.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any, Dict, Iterator, List, Tuple, TypeVar

import torch
from mmengine.utils import apply_to

from mapsage.accelerator import current_accelerator
from mapsage.distributed import local_rank

Data = TypeVar('Data')
# Integer dtypes for comparing tensors bit by bit, by element size in bytes.
_BIT_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class HostCopies:
    """Copies checkpoints into host buffers that later saves reuse.

    The copies of one save, such as the best checkpoint and the last one, share equal tensors.
    Tensors on the rank's CUDA device are copied once, into pinned buffers, and all copies are
    started before the host waits for them.
    """

    def __init__(self) -> None:
        # Copies of the current save, by the tensor's key path in the checkpoint
        # ('/optimizer/state/0').
        self._copied: Dict[str, torch.Tensor] = {}
        # Unused buffers by (dtype, number of elements, whether pinned).
        self._free: Dict[Tuple[torch.dtype, int, bool], List[torch.Tensor]] = {}
        self._used: List[torch.Tensor] = []
        # Pinned buffers that to_host has filled, by address.
        self._received: Dict[int, torch.Tensor] = {}

    def to_host(self, data: Data) -> Data:
        """Return nested containers with every tensor on the CPU, like ``tensor.cpu()``.

        :meth:`copy` uses the tensors that came from CUDA without a second copy.
        """
        accelerator = current_accelerator()
        receive = partial(self._receive, device=accelerator.device(local_rank()))
        on_host = apply_to(data, lambda value: hasattr(value, 'cpu'), receive)
        accelerator.synchronize()
        return on_host

    def copy(self, checkpoint: Dict[str, Any]) -> Dict[str, Any]:
        """Return a copy that shares no memory with ``checkpoint``; its plain tensors are on the
        CPU.

        Tensors that share memory also share it in the copy, so that the file has the same size.
        """
        memo: Dict[int, Any] = {}
        storages: Dict[Tuple[int, torch.dtype], torch.Tensor] = {}
        for key_path, tensor in _plain_tensors(checkpoint, ''):
            if id(tensor) in memo:
                continue
            copied = self._copied.get(key_path)
            if copied is None or not _same_bits(tensor, copied):
                copied = self._copied[key_path] = (
                    tensor
                    if tensor.data_ptr() in self._received
                    else self._copy_tensor(tensor, storages)
                )
            memo[id(tensor)] = copied
        self._free_unused_pinned()
        # MMEngine creates these buffers for every checkpoint, so nothing else changes them. They
        # can hold a million numbers each.
        for buffer in checkpoint.get('message_hub', {}).get('log_scalars', {}).values():
            memo[id(buffer)] = buffer
        return copy.deepcopy(checkpoint, memo)

    def release(self) -> None:
        """Make the buffers of the current save available to the next one, once it is written."""
        self._free = {}
        for buffer in self._used:
            kind = buffer.dtype, buffer.numel(), buffer.data_ptr() in self._received
            self._free.setdefault(kind, []).append(buffer)
        self._used, self._copied, self._received = [], {}, {}

    def clear(self) -> None:
        """Free all host memory."""
        self._free, self._used, self._copied, self._received = {}, [], {}, {}

    def _receive(self, value: Any, device: torch.device) -> Any:
        """Return a value on the CPU. A copy from ``device`` may not be complete yet."""
        # to_host waits only for the rank's device; a split model has tensors on other devices too.
        if (
            type(value) is not torch.Tensor
            or not value.is_cuda
            or value.device != device
            or value.requires_grad
            or not value.numel()
            or not _fills_its_memory(value)
        ):
            return value.cpu()
        buffer = self._take_buffer(value.dtype, value.numel(), pinned=True)
        self._received[buffer.data_ptr()] = buffer
        return torch.as_strided(buffer, value.shape, value.stride()).copy_(value, non_blocking=True)

    def _copy_tensor(
        self, tensor: torch.Tensor, storages: Dict[Tuple[int, torch.dtype], torch.Tensor]
    ) -> torch.Tensor:
        if tensor.device.type != 'cpu':
            return tensor.detach().cpu().requires_grad_(tensor.requires_grad)
        source = tensor.detach()
        # The whole storage, even if the tensor shows only a part of it, in memory order.
        flat = torch.as_strided(source, (_storage_elements(source),), (1,), 0)
        storage_key = (flat.data_ptr(), flat.dtype)
        if storage_key not in storages:
            storages[storage_key] = self._take_buffer(flat.dtype, flat.numel())
            storages[storage_key].copy_(flat)
        return torch.as_strided(
            storages[storage_key], source.shape, source.stride(), source.storage_offset()
        ).requires_grad_(tensor.requires_grad)

    def _free_unused_pinned(self) -> None:
        """Free the pinned buffers whose values an earlier copy of this save already has."""
        in_use = {tensor.data_ptr() for tensor in self._copied.values()}
        for address in set(self._received) - in_use:
            buffer = self._received.pop(address)
            self._used = [used for used in self._used if used is not buffer]
            self._free.setdefault((buffer.dtype, buffer.numel(), True), []).append(buffer)

    def _take_buffer(self, dtype: torch.dtype, length: int, pinned: bool = False) -> torch.Tensor:
        free = self._free.get((dtype, length, pinned))
        buffer = free.pop() if free else torch.empty(length, dtype=dtype, pin_memory=pinned)
        self._used.append(buffer)
        return buffer


def _fills_its_memory(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last)


def _same_bits(first: torch.Tensor, second: torch.Tensor) -> bool:
    if (first.dtype, first.shape, first.stride(), first.requires_grad) != (
        second.dtype,
        second.shape,
        second.stride(),
        second.requires_grad,
    ):
        return False
    bits = _BIT_DTYPES[first.element_size()]
    return torch.equal(first.detach().cpu().view(bits), second.detach().view(bits))


def _plain_tensors(value: object, key_path: str) -> Iterator[Tuple[str, torch.Tensor]]:
    """Yield the strided tensors in nested containers, each with its key path.

    Other tensors, such as sparse and quantized ones, are left to ``copy.deepcopy``.
    """
    if type(value) is torch.Tensor:
        if value.layout is torch.strided and not (
            value.is_quantized or value.is_complex() or value.is_neg()
        ):
            yield key_path, value
    elif isinstance(value, dict):
        for key, element in value.items():
            yield from _plain_tensors(element, f'{key_path}/{key}')
    elif isinstance(value, (list, tuple)):
        for index, element in enumerate(value):
            yield from _plain_tensors(element, f'{key_path}/{index}')


def _storage_elements(tensor: torch.Tensor) -> int:
    # torch 2 has untyped storages, torch 1.10 does not.
    if hasattr(tensor, 'untyped_storage'):
        return int(tensor.untyped_storage().nbytes()) // tensor.element_size()
    return int(tensor.storage().size())
