"""Turn samples into bytes: tensors and arrays into one buffer, everything else into a header.

The header is pickle, which runs code when it is read. So it is sealed with the secret of the job,
and must never be read from a file.
"""

from __future__ import annotations

import ctypes
import io
import pickle
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np
import torch
from torch import nn

from mapsage_launcher.trust.sealed import BrokenSealError, seal, unseal

_PURPOSE = 'samples'  # of the seal

Array = Union[torch.Tensor, np.ndarray]


class Parcel(NamedTuple):
    """Samples that are ready to be sent.

    Attributes:
        header: Sealed bytes with the structure and metadata of the samples, and with dtype and
            shape of every array.
        arrays: Arrays in their order in the payload, contiguous and in host memory.
    """

    header: bytes
    arrays: List[Array]

    @property
    def payload_bytes(self) -> int:
        """Number of bytes of all arrays."""
        return sum(_size(array) for array in self.arrays)


def pack_samples(samples: Sequence[Any], secret: bytes) -> Parcel:
    """Separate samples, nested containers and objects of any class, into arrays and metadata.

    Tensors and numeric NumPy arrays go into the payload; the rest is pickled, as small metadata.
    An array that occurs twice is sent once. Tensors are detached and copied to host memory; they
    keep their class, such as ``Parameter``, and their attributes.

    Args:
        samples: Samples to send.
        secret: Secret of the job, which seals the header.

    Raises:
        TypeError: For a sparse or quantized tensor.
    """
    stream = io.BytesIO()
    pickler = _Pickler(stream, pickle.HIGHEST_PROTOCOL)
    pickler.dump(list(samples))
    table = [_describe(array) for array in pickler.arrays]
    header = pickle.dumps((table, stream.getvalue()), pickle.HIGHEST_PROTOCOL)
    return Parcel(seal(header, secret, _PURPOSE), pickler.arrays)


def write_parcel(parcel: Parcel, buffer: torch.Tensor, offset: int) -> int:
    """Write header and arrays into a uint8 buffer; return the byte offset after them."""
    ctypes.memmove(buffer.data_ptr() + offset, parcel.header, len(parcel.header))
    offset += len(parcel.header)
    for array in parcel.arrays:
        size = _size(array)
        if size:
            # torch 1.10 cannot view a tensor as bytes.
            ctypes.memmove(buffer.data_ptr() + offset, _address(array), size)
        offset += size
    return offset


def unpack_samples(
    buffer: torch.Tensor, offset: int, header_bytes: int, secret: bytes
) -> List[Any]:
    """Return the samples that lie in a uint8 buffer from ``offset`` on.

    Their arrays are copied out of the buffer.

    Raises:
        BrokenSealError: If the header does not come from a rank of this job.
    """
    if not 0 <= header_bytes <= buffer.numel() - offset:
        raise BrokenSealError(
            f'a header of {header_bytes} bytes in {buffer.numel() - offset}: the '
            f'numbers were changed on their way between two ranks.'
        )
    header = unseal(ctypes.string_at(buffer.data_ptr() + offset, header_bytes), secret, _PURPOSE)
    table, stream = pickle.loads(header)
    offset += header_bytes
    arrays = []
    for kind, dtype, shape in table:
        array: Array = (
            torch.empty(shape, dtype=getattr(torch, dtype))
            if kind == 'tensor'
            else np.empty(shape, np.dtype(dtype))
        )
        size = _size(array)
        if size:
            ctypes.memmove(_address(array), buffer.data_ptr() + offset, size)
        offset += size
        arrays.append(array)
    return _Unpickler(io.BytesIO(stream), arrays).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, protocol: int) -> None:
        super().__init__(file, protocol)
        self.arrays: List[Array] = []
        self._known: Dict[int, Tuple[int, object]] = {}

    def persistent_id(self, obj: object) -> Optional[int]:
        if not (type(obj) is torch.Tensor and not obj.__dict__) and not (
            type(obj) is np.ndarray and obj.dtype.kind in 'biufc'
        ):
            return None
        if id(obj) not in self._known:
            # Keep the object alive, so that no other object gets its id.
            self._known[id(obj)] = len(self.arrays), obj
            self.arrays.append(_to_host(obj))
        return self._known[id(obj)][0]

    def reducer_override(self, obj: object) -> Any:
        # A class that computes by itself (__torch_dispatch__) also knows how it is pickled.
        if not isinstance(obj, torch.Tensor) or _dispatch_of(type(obj)) != _dispatch_of(
            torch.Tensor
        ):
            return NotImplemented
        plain = obj.detach().as_subclass(torch.Tensor)
        return _with_class, (
            plain,
            type(obj),
            dict(obj.__dict__),
            isinstance(obj, nn.Parameter) and obj.requires_grad,
        )


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, arrays: List[Array]) -> None:
        super().__init__(file)
        self._arrays = arrays

    def persistent_load(self, pid: int) -> Array:
        return self._arrays[pid]


def _with_class(
    plain: torch.Tensor, kind: type, attributes: Dict[str, Any], requires_grad: bool
) -> torch.Tensor:
    """Return a tensor as one of a subclass, with the attributes that it had."""
    tensor: Any = plain.as_subclass(kind)
    tensor.requires_grad_(requires_grad)
    tensor.__dict__.update(attributes)
    return tensor


def _dispatch_of(kind: type) -> object:
    return getattr(kind, '__torch_dispatch__', None)  # since torch 1.11


def _to_host(array: Array) -> Array:
    if isinstance(array, np.ndarray):
        # ascontiguousarray turns a 0-dimensional array into a 1-dimensional one.
        return np.ascontiguousarray(array).reshape(array.shape)
    if array.layout is not torch.strided or array.is_quantized:
        raise TypeError(
            f'a sample holds a {array.layout} tensor of dtype {array.dtype}: only '
            f'dense tensors can move to another rank. Call to_dense() or dequantize().'
        )
    return array.detach().cpu().resolve_conj().contiguous()


def _describe(array: Array) -> Tuple[str, str, Tuple[int, ...]]:
    if isinstance(array, np.ndarray):
        return 'array', array.dtype.str, array.shape
    return 'tensor', str(array.dtype).replace('torch.', ''), tuple(array.shape)


def _size(array: Array) -> int:
    if isinstance(array, np.ndarray):
        return array.nbytes
    return array.numel() * array.element_size()


def _address(array: Array) -> int:
    return array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr()
