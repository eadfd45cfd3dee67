"""Tensors as one sequence of bytes, with the layout of the bytes and their checksum.

An item is the feature pyramid of a batch: up to eight levels of shape (n, channels, height, width).
Its bytes are the levels one after the other. :func:`split` avoids copies; :func:`pack_levels` makes
one.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import List, Optional, Sequence, Tuple

import numpy as np
import torch

from mapsage.extras.streaming.source import Features, StackFeatures

MAX_LEVELS = 8
# n, channels, height, width.
DIMS = 4
# Their positions are their codes in a header, so the order must not change.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8)
# Bytes per word and words per row of the checksum.
_WORD, _COLUMNS = 8, 1024


@dataclass(frozen=True)
class Layout:
    """Meaning of the bytes of an item.

    Attributes:
        shapes: Shapes of the levels, (n, channels, height, width); at most 8 levels, stored without
            gaps.
        dtype: Dtype of the bytes, one of :data:`DTYPES`.
        original: Dtype in which the levels were computed, and which they get again. It differs from
            ``dtype`` if features travel in fewer bytes.
        has_facts: Whether the last level has the facts of a stack, which travel as float32.
    """

    shapes: Tuple[Tuple[int, ...], ...]
    dtype: torch.dtype
    original: torch.dtype
    has_facts: bool = False

    @property
    def nbytes(self) -> int:
        """Size of all levels in bytes."""
        return sum(
            _count(shape) * item_size(dtype) for shape, (dtype, _) in zip(self.shapes, self._dtypes)
        )

    @property
    def _dtypes(self) -> List[Tuple[torch.dtype, torch.dtype]]:
        """Dtype of the bytes and of the features, for each level."""
        dtypes = [(self.dtype, self.original)] * len(self.shapes)
        if self.has_facts:
            dtypes[-1:] = [(torch.float32, torch.float32)]
        return dtypes

    def unpack(self, data: torch.Tensor, device: torch.device) -> Features:
        """Return the levels on ``device``; on the host without a copy.

        Args:
            data: uint8 (nbytes,), contiguous, in host memory; do not write to it afterward.
            device: Device of the levels.

        Raises:
            ValueError: If ``data`` has another length.
        """
        if len(data) != self.nbytes:
            raise ValueError(f'{len(data)} bytes, expected {self.nbytes} for {self}.')
        levels, offset = [], 0
        for shape, (dtype, original) in zip(self.shapes, self._dtypes):
            stop = offset + _count(shape) * item_size(dtype)
            # Converted on the device, so that fewer bytes are transferred to it.
            levels.append(_typed(data[offset:stop], dtype, shape).to(device).to(original))
            offset = stop
        return tuple(levels)


class Payload:
    """The bytes of an item in host memory, one tensor per level, not copied.

    Args:
        levels: Bytes of each level, uint8 (n,), contiguous.

    Attributes:
        levels: The same tensors.
    """

    def __init__(self, levels: Sequence[torch.Tensor]) -> None:
        self.levels = list(levels)

    def __len__(self) -> int:
        return sum(len(level) for level in self.levels)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes, uint8 (stop - start,); copied only if they span several levels."""
        pieces, begin = [], 0
        for level in self.levels:
            piece = level[max(0, start - begin) : max(0, stop - begin)]
            if len(piece):
                pieces.append(piece)
            begin += len(level)
        return (
            pieces[0]
            if len(pieces) == 1
            else torch.cat(pieces or [torch.empty(0, dtype=torch.uint8)])
        )


def pack_levels(
    levels: Sequence[torch.Tensor], wire: Optional[torch.dtype] = None
) -> Tuple[Layout, torch.Tensor]:
    """Return the layout of tensors, and a copy of their bytes, uint8 (nbytes,), in host memory.

    The arguments and errors are the same as for :func:`split`.
    """
    layout, payload = split(levels, wire)
    data = host_bytes(layout.nbytes)
    begin = 0
    for level in payload.levels:
        data[begin : begin + len(level)] = level
        begin += len(level)
    return layout, data


def split(
    levels: Sequence[torch.Tensor], wire: Optional[torch.dtype] = None
) -> Tuple[Layout, Payload]:
    """Return the layout of tensors, and their bytes.

    Contiguous host tensors that keep their dtype are not copied, because filling new memory costs
    more than the transfer.

    Args:
        levels: One to eight tensors (n, channels, height, width) of one dtype, on any device. The
            last of ``StackFeatures`` may be float32 beside another dtype, and keeps it.
        wire: Floating-point dtype in which the tensors travel; None for the dtype of ``levels``.

    Raises:
        ValueError: If the number of tensors, a shape or a dtype is not supported.
    """
    has_facts = isinstance(levels, StackFeatures) and len(levels) > 1
    levels = [level.detach() for level in levels]
    dtypes = {level.dtype for level in (levels[:-1] if has_facts else levels)}
    if (
        not 1 <= len(levels) <= MAX_LEVELS
        or len(dtypes) != 1
        or any(level.dim() != DIMS for level in levels)
    ):
        got = ', '.join(f'{tuple(level.shape)} {level.dtype}' for level in levels)
        raise ValueError(
            f'{len(levels)} level(s) {got}, expected 1 to {MAX_LEVELS} of (n, '
            f'channels, height, width) and one dtype.'
        )
    original = dtypes.pop()
    dtype = original if wire is None else wire
    for used in (original, dtype):
        if used not in DTYPES:
            raise ValueError(f'dtype {used}, expected one of {", ".join(map(str, DTYPES))}.')
    layout = Layout(tuple(tuple(level.shape) for level in levels), dtype, original, has_facts)
    return layout, Payload(
        [
            _bytes(level.to(used).to('cpu').contiguous())
            for level, (used, _) in zip(levels, layout._dtypes)
        ]
    )


def pack_images(images: torch.Tensor) -> Tuple[Layout, torch.Tensor]:
    """Pack images like :func:`pack_levels`, as uint8 if that loses nothing.

    Args:
        images: (n, channels, height, width), on any device.
    """
    host = images.detach().to('cpu')
    if host.is_floating_point():
        whole = host.to(torch.uint8)
        if torch.equal(whole.to(host.dtype), host):
            return pack_levels([host], torch.uint8)
    return pack_levels([host])


def host_bytes(count: int) -> torch.Tensor:
    """Return uninitialized host memory, uint8 (count,).

    NumPy allocates it, because NumPy asks the kernel for huge pages and torch does not. Measured:
    new memory was filled at 4.5 GB/s with huge pages and at 1.4 GB/s without, and the transfer ran
    at 1.5 GB/s.
    """
    return torch.from_numpy(np.empty(count, np.uint8))


def checksum(data: torch.Tensor) -> int:
    """Return a checksum of host bytes, uint8 (n,), contiguous: an integer in 0 to 2**32 - 1.

    The data is read as rows of 1024 64-bit words. The checksum is the CRC-32 of the length, of the
    sums of all columns and rows modulo 2**64, and of the bytes after the last whole row. It misses
    a changed or moved word with a probability of 1 / 2**32. Measured: zlib's CRC-32 of all bytes
    ran at 0.8 to 1.0 GB/s, as fast as gloo's loopback, and would have halved the speed; the sums
    ran at 4 to 15 GB/s.
    """
    array = data.numpy()
    whole = len(array) // (_WORD * _COLUMNS) * (_WORD * _COLUMNS)
    crc = zlib.crc32(len(array).to_bytes(8, 'little'))
    if whole:
        table = np.frombuffer(array[:whole], '<u8').reshape(-1, _COLUMNS)
        crc = zlib.crc32(table.sum(0).tobytes(), crc)
        crc = zlib.crc32(table.sum(1).tobytes(), crc)
    return zlib.crc32(array[whole:].tobytes(), crc)


def item_size(dtype: torch.dtype) -> int:
    """Return the size of one number of a dtype in bytes."""
    return torch.empty(0, dtype=dtype).element_size()


def _typed(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return bytes as another dtype without a copy, which view() of torch 1.10 cannot do."""
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data.numpy(), dtype=dtype).reshape(tuple(shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous host tensor as bytes without a copy; view() of torch 1.10 cannot."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    # NumPy has no bfloat16.
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    return torch.frombuffer(tensor.numpy().reshape(-1), dtype=torch.uint8)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
