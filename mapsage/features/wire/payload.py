"""Tensors as one run of bytes, what those bytes are, and their checksum."""
from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Optional, Sequence, Tuple

import numpy as np
import torch

from mapsage.features.source import Features

MAX_LEVELS = 8
DIMS = 4  # n, channels, height, width
# In the order of their codes on the wire, which must not change.
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.uint8)
_WORD, _COLUMNS = 8, 1024  # bytes of a word, words of a row, of the checksum


@dataclass(frozen=True)
class Layout:
    """What the bytes of an item are.

    Attributes:
        shapes: One (n, channels, height, width) a level, at most 8; the levels lie one behind the
            other.
        dtype: Of the bytes, one of :data:`DTYPES`.
        original: What the levels become again; another than ``dtype`` where fewer bytes travel.
    """

    shapes: Tuple[Tuple[int, ...], ...]
    dtype: torch.dtype
    original: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of all levels."""
        return sum(_count(shape) for shape in self.shapes) * item_size(self.dtype)

    def unpack(self, data: torch.Tensor, device: torch.device) -> Features:
        """Return the levels that host bytes hold, on ``device``; on the host without a copy.

        Args:
            data: uint8 (nbytes,), contiguous; not to be written afterward.
            device: Where the levels shall be.

        Raises:
            ValueError: If ``data`` has another length.
        """
        if len(data) != self.nbytes:
            raise ValueError(f'{len(data)} bytes, expected {self.nbytes} for {self}.')
        levels, offset = [], 0
        for shape in self.shapes:
            stop = offset + _count(shape) * item_size(self.dtype)
            # widened where it ends up: fewer bytes go to the device
            levels.append(_typed(data[offset:stop], self.dtype, shape).to(device).to(self.original))
            offset = stop
        return tuple(levels)


class Payload:
    """The bytes of an item in host memory, level by level, without a copy of them.

    Args:
        levels: uint8 (n,) each, contiguous.
    """

    def __init__(self, levels: Sequence[torch.Tensor]) -> None:
        self._levels = list(levels)

    def __len__(self) -> int:
        return sum(len(level) for level in self._levels)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return bytes, uint8 (stop - start,); copied only where they are of several levels."""
        pieces, begin = [], 0
        for level in self._levels:
            piece = level[max(0, start - begin):max(0, stop - begin)]
            if len(piece):
                pieces.append(piece)
            begin += len(level)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(
            0, dtype=torch.uint8)])


def pack_levels(levels: Sequence[torch.Tensor], wire: Optional[torch.dtype] = None
         ) -> Tuple[Layout, torch.Tensor]:
    """Return what the bytes of tensors are, and the bytes, uint8 (nbytes,), in host memory.

    As :func:`split`, in one piece and always a copy.
    """
    layout, parts = split(levels, wire)
    data = host_bytes(layout.nbytes)
    begin = 0
    for level in parts._levels:
        data[begin:begin + len(level)] = level
        begin += len(level)
    return layout, data


def split(levels: Sequence[torch.Tensor], wire: Optional[torch.dtype] = None
          ) -> Tuple[Layout, Payload]:
    """Return what the bytes of tensors are, and the bytes.

    Those of contiguous host tensors that travel as they are are not copied: fresh pages cost more
    than the transfer.

    Args:
        levels: One to eight (n, channels, height, width) of one dtype, on any device.
        wire: Floating-point dtype in which they travel; as they are when None.

    Raises:
        ValueError: If they are not such tensors.
    """
    levels = [level.detach() for level in levels]
    dtypes = {level.dtype for level in levels}
    if not 1 <= len(levels) <= MAX_LEVELS or len(dtypes) != 1 \
            or any(level.dim() != DIMS for level in levels):
        got = ', '.join(f'{tuple(level.shape)} {level.dtype}' for level in levels)
        raise ValueError(f'{len(levels)} level(s) {got}, expected 1 to {MAX_LEVELS} of (n, '
                         f'channels, height, width) and one dtype.')
    original = dtypes.pop()
    dtype = original if wire is None else wire
    for each in (original, dtype):
        if each not in DTYPES:
            raise ValueError(f'dtype {each}, expected one of {", ".join(map(str, DTYPES))}.')
    layout = Layout(tuple(tuple(level.shape) for level in levels), dtype, original)
    return layout, Payload([_bytes(level.to(dtype).to('cpu').contiguous()) for level in levels])


def pack_images(images: torch.Tensor) -> Tuple[Layout, torch.Tensor]:
    """Return images as :func:`pack` does, as uint8 where that loses nothing.

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

    NumPy asks the kernel for huge pages and torch does not; filling new memory ran at 4.5 GB/s
    against 1.4, and the transfer alone at 1.5.
    """
    return torch.from_numpy(np.empty(count, np.uint8))


def checksum(data: torch.Tensor) -> int:
    """Return a checksum of host bytes, uint8 (n,), contiguous: an integer in 0 to 2**32 - 1.

    The CRC-32 of the length, of the sums of the rows and columns of the data seen as rows of 1024
    64-bit words, modulo 2**64, and of the bytes behind the last whole row. A changed or moved word
    is missed once in 2**32. zlib's CRC-32 of all bytes ran at 0.8 to 1.0 GB/s where gloo's loopback
    did, which would have halved the transfer; the sums at 4 to 15.
    """
    array = data.numpy()
    whole = len(array) // (_WORD * _COLUMNS) * (_WORD * _COLUMNS)
    crc = zlib.crc32(len(array).to_bytes(8, 'little'))
    if whole:
        words = np.frombuffer(array[:whole], '<u8').reshape(-1, _COLUMNS)
        crc = zlib.crc32(words.sum(0).tobytes(), crc)
        crc = zlib.crc32(words.sum(1).tobytes(), crc)
    return zlib.crc32(array[whole:].tobytes(), crc)


def item_size(dtype: torch.dtype) -> int:
    """Return the bytes of one number."""
    return torch.empty(0, dtype=dtype).element_size()


def _typed(data: torch.Tensor, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Return bytes as another dtype, without a copy; torch 1.10's view cannot."""
    if not len(data):
        return torch.empty(tuple(shape), dtype=dtype)
    return torch.frombuffer(data.numpy(), dtype=dtype).reshape(tuple(shape))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous host tensor as bytes, without a copy; torch 1.10's view cannot."""
    if not tensor.numel():
        return torch.empty(0, dtype=torch.uint8)
    if tensor.dtype == torch.bfloat16:  # numpy has none
        tensor = tensor.view(torch.int16)
    return torch.frombuffer(tensor.numpy().reshape(-1), dtype=torch.uint8)


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
