"""Batches that workers hand over in shared memory, which they use again.

torch puts every tensor of a batch into new shared memory, and most of a worker's time outside of
decoding goes into its fresh pages. Here a worker packs all tensors of a batch into one block of
bytes and fills the same few blocks in turn. A block is free again when the rank holds no tensor in
it any more, which the block's first byte says. What the loop gets is the batch that the collate
function made, with equal tensors: containers, data samples and dtypes are pickled, not interpreted.
"""

from __future__ import annotations

import io
import os
import pickle
import weakref
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy as np
import torch
from mmengine.dataset import default_collate, pseudo_collate
from torch.utils.data import get_worker_info

# Bytes by which tensors are aligned, a cache line. The first holds the byte that says "in use".
_ALIGNMENT = 64
# Position in the block, shape and dtype of a tensor.
_Place = Tuple[int, Tuple[int, ...], torch.dtype]


class SharedBatch:
    """A batch on its way to the rank.

    Args:
        memory: Block of shared or pinned memory with the tensors of the batch, uint8 (bytes,).
        pickled: The batch, in which each tensor is replaced by its place.
    """

    def __init__(self, memory: torch.Tensor, pickled: bytes) -> None:
        self.memory, self._pickled = memory, pickled

    def __reduce__(self) -> Tuple[Any, ...]:
        return _receive, (self.memory, self._pickled)

    def pin_memory(self) -> SharedBatch:
        """Return the batch in pinned memory; torch's loader calls this."""
        return SharedBatch(self.memory.pin_memory(), self._pickled)

    def unpack(self) -> Any:
        """Return the batch. Its tensors lie in the block."""
        return _Unpickler(self._pickled, self.memory).load()


class SharedCollate:
    """Collate function of a loader whose workers hand over their batches in blocks.

    Args:
        collate: The loader's collate function.
    """

    def __init__(self, collate: Callable[[List[Any]], Any]) -> None:
        self._collate = collate
        self._blocks: List[torch.Tensor] = []

    @classmethod
    def around(cls, collate: Callable[[List[Any]], Any]) -> Callable[[List[Any]], Any]:
        """Return the collate function, in blocks if it is MMEngine's.

        The samples of another function, such as that of dynamic sampling, may wait singly for
        later steps, and each of them would keep the block of its whole batch.
        """
        function = collate.func if isinstance(collate, partial) else collate
        return cls(collate) if function in (pseudo_collate, default_collate) else collate

    def __call__(self, samples: List[Any]) -> Any:
        """Return a :class:`SharedBatch` in a worker."""
        batch = self._collate(samples)
        if get_worker_info() is None:
            return batch
        pickler = _Pickler()
        try:
            pickler.dump(batch)
        # torch's way ends in an error that names the loader.
        except (pickle.PicklingError, AttributeError, TypeError):
            return batch
        block = self._free_block(pickler.size)
        for tensor, (begin, shape, dtype) in pickler.tensors.values():
            _view(block, begin, shape, dtype).copy_(tensor)
        return SharedBatch(block[: pickler.size], pickler.file.getvalue())

    def _free_block(self, size: int) -> torch.Tensor:
        """Return a block of at least ``size`` bytes, marked as in use."""
        free = [block for block in self._blocks if not block[0]]
        block = next((block for block in free if block.numel() >= size), None)
        if block is None:
            # A block that is too small gives way, so that batches of many sizes take no more
            # memory than the largest ones.
            self._blocks = [
                block for block in self._blocks if not any(block is each for each in free)
            ]
            block = _allocate(size)
            self._blocks.append(block)
        block[0] = 1
        return block


class _Pickler(ForkingPickler):
    """Pickles a batch and collects its plain tensors, which get their places in a block.

    Attributes:
        tensors: Tensor and place, by the tensor's identity.
        size: Bytes of the block.
    """

    def __init__(self) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, pickle.HIGHEST_PROTOCOL)
        self.tensors: Dict[int, Tuple[torch.Tensor, _Place]] = {}
        self.size = _ALIGNMENT

    def persistent_id(self, value: object) -> Optional[_Place]:
        """Return the place of a tensor; pickle handles all other values."""
        if type(value) is not torch.Tensor or not _is_plain(value):
            return None
        if id(value) not in self.tensors:
            place = self.size, tuple(value.shape), value.dtype
            self.tensors[id(value)] = value, place
            self.size += -(-value.numel() * value.element_size() // _ALIGNMENT) * _ALIGNMENT
        return self.tensors[id(value)][1]


class _Unpickler(pickle.Unpickler):
    def __init__(self, pickled: bytes, block: torch.Tensor) -> None:
        super().__init__(io.BytesIO(pickled))
        self._block = block
        # A tensor that stands in a batch twice is one tensor there, too.
        self._tensors: Dict[int, torch.Tensor] = {}

    def persistent_load(self, place: _Place) -> torch.Tensor:
        begin = place[0]
        if begin not in self._tensors:
            self._tensors[begin] = _view(self._block, *place)
        return self._tensors[begin]


def _is_plain(tensor: torch.Tensor) -> bool:
    return (
        tensor.device.type == 'cpu'
        and tensor.layout == torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        # An empty tensor has no place of its own.
        and tensor.numel() > 0
    )


def _view(
    block: torch.Tensor, begin: int, shape: Tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return the tensor at a place of a block."""
    count = int(np.prod(shape, dtype=np.int64))
    # PyTorch 1.10 refuses a view of another element size. Elsewhere it must be a view: a copy to a
    # card keeps pinned memory by its storage.
    if not hasattr(block, 'untyped_storage'):
        return torch.frombuffer(block.numpy(), dtype=dtype, count=count, offset=begin).view(shape)
    size = count * torch.empty(0, dtype=dtype).element_size()
    return block[begin : begin + size].view(dtype).view(shape)


def _allocate(size: int) -> torch.Tensor:
    """Return new shared memory, uint8 (size,)."""
    empty: Any = torch.empty(0, dtype=torch.uint8)
    # PyTorch 1.10 has no untyped storage.
    storage = empty.untyped_storage() if hasattr(empty, 'untyped_storage') else empty.storage()
    return empty.set_(type(storage)._new_shared(size))


def _receive(memory: torch.Tensor, pickled: bytes) -> SharedBatch:
    """Return a batch in the rank; its block is free once none of its tensors exists."""
    array = memory.numpy()
    # All tensors of the batch share the storage that holds this array.
    freed = weakref.finalize(array, _free, memory[:1], os.getpid())
    freed.atexit = False
    return SharedBatch(torch.from_numpy(array), pickled)


def _free(mark: torch.Tensor, pid: int) -> None:
    # A process that was forked in between drops its copies of the tensors, not the rank's.
    if os.getpid() == pid:
        mark.zero_()
