"""The header of fixed size that precedes every payload between an encoder and a head.

A header travels as int64 words, so it can be sent from and received into a tensor:

    magic | kind | 12 numbers | wire dtype, dtype, original dtype, has facts, number of
    levels | shapes | CRC-32

Its own checksum covers all other words. A damaged header ends the connection, because its payload's
length is unknown; a damaged payload only fails its item.
"""

from __future__ import annotations

import enum
import zlib
from dataclasses import dataclass
from typing import List, Optional, Tuple

import torch

from mapsage.extras.streaming.source import StreamingError

from .payload import DIMS, DTYPES, MAX_LEVELS, Layout

# 'MSF' and the version of the format; both sides of a job must run the same version.
_MAGIC = int.from_bytes(b'MSF\x02', 'big')
_NUMBERS = (
    'item',
    'attempt',
    'total',
    'offset',
    'nbytes',
    'span',
    'block',
    'generation',
    'blocks',
    'block_bytes',
    'digest',
    'checksum',
)
_LIMIT = 2**63 - 1
# Index of the first word of the shapes.
_SHAPES_AT = 2 + len(_NUMBERS) + 5
WORDS = _SHAPES_AT + MAX_LEVELS * DIMS + 1


class HeaderError(StreamingError):
    """A header cannot be read, nor any bytes after it, so the connection is lost."""


class Kind(enum.IntEnum):
    """Kind of a message, with its sender and its meaning."""

    REQUEST = 1  # head: encode these images
    OFFER = 2  # encoder: the images are encoded; here are the size and layout of their features
    CREDIT = 3  # head: send these bytes into these blocks
    DATA = 4  # encoder: bytes for one block
    FAILED = 5  # encoder: this attempt failed; head: this attempt is canceled
    HEARTBEAT = 6  # encoder: I am alive; head, as the answer: so am I
    CLOSE = 7  # either: this is my last message; the other side answers with CLOSE


@dataclass(frozen=True)
class Header:
    """One message without its payload. Sizes are in bytes; all numbers 0 to 2**63 - 1.

    Attributes:
        kind: Kind of the message.
        item: Number of the item.
        attempt: Number of encoders that were asked for the item earlier: 0, 1, ...
        total: Size of the item's features.
        offset: Position in the item of the first byte of DATA or of a CREDIT.
        nbytes: Size of the payload that follows.
        span: Number of bytes that a CREDIT allows to send.
        block: Id of the block that DATA goes into.
        generation: Generation number of the block.
        blocks: Number of blocks of a CREDIT. The payload lists (block, generation), int64.
        block_bytes: Size of each block of a CREDIT; the last one may not be filled.
        digest: Digest of the encoder's weights.
        checksum: Checksum of the payload: :func:`~mapsage.extras.streaming.wire.payload.checksum`.
        wire: Dtype in which features of a REQUEST shall travel; None for the computed dtype.
        layout: Layout of the images of a REQUEST, or of the features of an OFFER.
    """

    kind: Kind
    item: int = 0
    attempt: int = 0
    total: int = 0
    offset: int = 0
    nbytes: int = 0
    span: int = 0
    block: int = 0
    generation: int = 0
    blocks: int = 0
    block_bytes: int = 0
    digest: int = 0
    checksum: int = 0
    wire: Optional[torch.dtype] = None
    layout: Optional[Layout] = None


def encode_header(header: Header) -> torch.Tensor:
    """Return a header as it is sent, int64 (WORDS,). Pure.

    Raises:
        ValueError: If a number is out of range, a dtype is unknown, or the layout has too many
            levels or dimensions.
    """
    fields = [_MAGIC, int(header.kind)]
    for name in _NUMBERS:
        value = vars(header)[name]
        if not 0 <= value <= _LIMIT:
            raise ValueError(f'header.{name}={value!r}, expected 0 to 2**63 - 1.')
        fields.append(value)
    shapes: List[int] = []
    fields.append(_encode_dtype(header.wire))
    if header.layout is None:
        fields += [0, 0, 0, 0]
    else:
        levels = header.layout.shapes
        if len(levels) > MAX_LEVELS or any(len(shape) != DIMS for shape in levels):
            raise ValueError(
                f'header.layout.shapes={levels}, expected at most {MAX_LEVELS} shapes '
                f'of {DIMS} sizes.'
            )
        fields += [
            _encode_dtype(header.layout.dtype),
            _encode_dtype(header.layout.original),
            int(header.layout.has_facts),
            len(levels),
        ]
        shapes = [size for shape in levels for size in shape]
    fields += shapes + [0] * (MAX_LEVELS * DIMS - len(shapes))
    return torch.tensor(fields + [_crc(fields)], dtype=torch.int64)


def decode_header(fields: torch.Tensor) -> Header:
    """Return the header that was sent as ``fields``, int64 (WORDS,). Pure.

    Raises:
        HeaderError: If the header is damaged, of another version, or contradicts itself.
    """
    values = fields.tolist()
    if len(values) != WORDS or values[0] != _MAGIC:
        raise HeaderError(
            f'a message begins with {values[:1]}, expected {_MAGIC}: it is damaged, '
            f'or encoder and head run different versions of MapSage.'
        )
    if values[-1] != _crc(values[:-1]):
        raise HeaderError('the checksum of a header is wrong: it was damaged on its way.')
    numbers = dict(zip(_NUMBERS, values[2:]))
    dtype_codes = values[_SHAPES_AT - 5 : _SHAPES_AT - 2]
    try:
        kind = Kind(values[1])
        wire, dtype, original = (_decode_dtype(code) for code in dtype_codes)
    except (ValueError, IndexError):
        raise HeaderError(
            f'a header has kind {values[1]} and dtypes {dtype_codes}: unknown. '
            f'Encoder and head run different versions of MapSage.'
        ) from None
    layout = None
    if dtype is not None and original is not None:
        layout = Layout(_shapes(values), dtype, original, values[_SHAPES_AT - 2] == 1)
    header = Header(kind, **numbers, wire=wire, layout=layout)
    size = {Kind.REQUEST: header.nbytes, Kind.OFFER: header.total}.get(kind)
    if min(numbers.values()) < 0 or (
        size is not None and (layout is None or layout.nbytes != size)
    ):
        raise HeaderError(f'a header contradicts itself: {header}.')
    return header


def _shapes(values: List[int]) -> Tuple[Tuple[int, ...], ...]:
    sizes = values[_SHAPES_AT : _SHAPES_AT + values[_SHAPES_AT - 1] * DIMS]
    return tuple(tuple(sizes[i : i + DIMS]) for i in range(0, len(sizes), DIMS))


def _encode_dtype(dtype: Optional[torch.dtype]) -> int:
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f'dtype {dtype}, expected one of {", ".join(map(str, DTYPES))}.')
    return 0 if dtype is None else 1 + DTYPES.index(dtype)


def _decode_dtype(code: int) -> Optional[torch.dtype]:
    if code < 0:
        raise IndexError(code)
    return None if code == 0 else DTYPES[code - 1]


def _crc(fields: List[int]) -> int:
    return zlib.crc32(b''.join(word.to_bytes(8, 'little', signed=True) for word in fields))
