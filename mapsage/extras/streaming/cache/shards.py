"""Shards of cached features: safetensors files that are mapped into memory to read them."""

from __future__ import annotations

import json
import math
import os
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import torch
from safetensors.torch import save

from mapsage.base.files import atomic_write, describe_room, parse_json
from mapsage.extras.streaming.source import StreamingError

# A killed run loses at most one unfinished shard of each rank, and a shard is kept in memory until
# it is written. This size is two dozen 512 x 512 images of a ViT-L with four float32 levels.
SHARD_BYTES = 256 << 20
PATTERN = 'features-*.safetensors'
# Memory formats of a level. A shard preserves them, because a head's kernels, and so the last bits
# of its output, depend on them.
_CHANNELS_FIRST, _CHANNELS_LAST = 'chw', 'hwc'
_DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Limit of the safetensors format.
_MAX_HEADER_BYTES = 100 << 20
_AGAIN = 'tools/cache_features.py with the same arguments as before computes what is missing.'

# The levels of one sample, each (channels, height, width).
Levels = Sequence[torch.Tensor]


class Form(NamedTuple):
    """Memory format, dtype and stored shape of a level in a shard."""

    layout: str
    dtype: torch.dtype
    shape: Tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Size of one number in bytes."""
        return torch.finfo(self.dtype).bits // 8

    @property
    def bytes(self) -> int:
        """Size of the level in bytes."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def level_shape(self) -> Tuple[int, ...]:
        """Shape of the level as the encoder returned it, (C, h, w)."""
        last = self.layout == _CHANNELS_LAST
        return (self.shape[2], *self.shape[:2]) if last else self.shape


class CacheError(StreamingError):
    """A cache of features cannot be used or written: what is wrong, and what to do."""


class DamagedShardError(CacheError):
    """A shard differs from what was written."""


@dataclass(frozen=True)
class ShardEntry:
    """Entry of the index for one shard.

    Attributes:
        file: Name of the file.
        bytes: Size of the file.
        header: CRC-32 of the file's header.
        items: Numbers of the items in the shard, ascending.
    """

    file: str
    bytes: int
    header: int
    items: List[int]

    @classmethod
    def of_json(cls, entry: Dict[str, Any], items: int) -> ShardEntry:
        """Return the entry that :meth:`to_json` wrote, of a cache of a number of items.

        Raises:
            ValueError: If it is no such entry.
        """
        ends = [end for start, stop in entry['items'] for end in (start, stop)]
        whole = [entry['bytes'], entry['header'], *ends]
        # Two numbers of a range would otherwise become a list of any length.
        if (
            not all(type(number) is int for number in whole)
            or ends != sorted(ends)
            or ends
            and not 0 <= ends[0] <= ends[-1] <= items
        ):
            raise ValueError(f'{str(entry)[:200]} is no shard of {items} items')
        if os.path.basename(entry['file']) != entry['file']:
            raise ValueError(f'{entry["file"]!r} is no name of a file')
        return cls(
            entry['file'],
            entry['bytes'],
            entry['header'],
            [item for start, stop in entry['items'] for item in range(start, stop)],
        )

    def to_json(self) -> Dict[str, Any]:
        """Return the entry as values of JSON, with the items as ranges ``[start, stop]``."""
        return dict(
            file=self.file, bytes=self.bytes, header=self.header, items=ranges_of(self.items)
        )


def ranges_of(numbers: Sequence[int]) -> List[List[int]]:
    """Return ascending numbers as ranges ``[start, stop]``, stop excluded."""
    ranges: List[List[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


def write_shard(
    folder: Path, cache: str, items: Dict[int, Levels], samples: Mapping[int, str]
) -> Path:
    """Write a shard. The file gets its name once it is complete and on the disk.

    Args:
        folder: Folder of the cache.
        cache: Hash of the cache that the shard belongs to.
        items: Levels of each item, by the item's number; CPU tensors, equally many per item.
        samples: Hash of the sample of each item.

    Returns:
        Path of the file, which is named after its first item.

    Raises:
        CacheError: If the file cannot be written, with the bytes that it needs and that are free.
    """
    first = min(items)
    path = folder / f'features-{first:012d}.safetensors'
    tensors, checksums = {}, {}
    for item, levels in items.items():
        laid_out = [_as_stored(tensor) for tensor in levels]
        checksums[item] = _checksum([tensor for _, tensor in laid_out])
        tensors.update(
            {
                f'{item:012d}.{level:02d}.{layout}': tensor
                for level, (layout, tensor) in enumerate(laid_out)
            }
        )
    # Not save_file, whose files only their owner may read.
    data = save(
        tensors,
        dict(
            cache=cache,
            checksums=json.dumps(checksums),
            samples=json.dumps({item: samples[item] for item in items}),
        ),
    )
    try:
        atomic_write(path, data, durable=True)
    except OSError as error:
        raise CacheError(
            f'cannot write {path}: {error}. It needs {len(data):,} bytes, and '
            f'{describe_room(folder, error)}. Free space, or write elsewhere with --folder. What '
            f'is finished stays: the same command continues.'
        ) from error
    return path


def free_bytes(folder: Path) -> int:
    """Return how many bytes the file system of a folder has free."""
    return shutil.disk_usage(folder).free


class Shard:
    """A shard, mapped into memory: bytes are read from the disk when they are first used.

    Args:
        path: File of the shard.

    Attributes:
        cache: Hash of the cache that the shard belongs to.
        entry: Entry of the shard for an index.
        samples: Hash of the sample of each item.
        memory: Content of the file, uint8 (bytes,); do not write to it.

    Raises:
        DamagedShardError: If the shard is incomplete or its header cannot be read.
        CacheError: If the file is missing or may not be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            size = path.stat().st_size
            with open(path, 'rb') as file:
                length = int.from_bytes(file.read(8), 'little')
                header = file.read(min(length, _MAX_HEADER_BYTES))
        except FileNotFoundError as error:
            raise CacheError(f'{path} is missing. {_AGAIN}') from error
        except OSError as error:
            raise CacheError(f'{path} cannot be read: {error}.') from error
        try:
            self._parse(header, 8 + length, size)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise DamagedShardError(f'{path} is damaged: {error!r}. Delete it. {_AGAIN}') from error
        self.entry = ShardEntry(path.name, size, zlib.crc32(header), sorted(self._positions))
        # torch's mapping leaves no file descriptor open; a private one cannot change the file.
        self.memory = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8).numpy()

    def places(self, item: int) -> List[Tuple[Form, int]]:
        """Return the form of each level of an item, and its position in the file in bytes."""
        return self._positions[item]

    def check(self, item: int) -> None:
        """Compare the checksum of an item's bytes with the one that was written.

        Raises:
            DamagedShardError: If the checksums differ.
        """
        checksum = 0
        for form, start in self._positions[item]:
            checksum = zlib.crc32(self.memory[start : start + form.bytes].data, checksum)
        if checksum != self._checksums[item]:
            raise DamagedShardError(
                f'{self._path} is damaged: item {item} has the checksum {checksum:08x}, '
                f'{self._checksums[item]:08x} was written. Delete it. {_AGAIN}'
            )

    def _parse(self, header: bytes, begin: int, size: int) -> None:
        """Read the header of a safetensors file whose data begins at byte ``begin``."""
        known = parse_json(header.decode())
        metadata = known.pop('__metadata__')
        self.cache: str = metadata['cache']
        self._checksums = {
            int(item): int(value) for item, value in parse_json(metadata['checksums']).items()
        }
        self.samples = {
            int(item): str(sample) for item, sample in parse_json(metadata['samples']).items()
        }
        self._positions: Dict[int, List[Tuple[Form, int]]] = {}
        # Equal forms of many items are one object, to save memory.
        forms: Dict[Form, Form] = {}
        end = begin
        for name in sorted(known):
            item, level, layout = name.split('.')
            shape, offsets = known[name]['shape'], known[name]['data_offsets']
            if (
                not all(type(number) is int and number >= 0 for number in [*shape, *offsets])
                or len(shape) != 3
            ):
                raise ValueError(f'{name} has the shape {shape} at {offsets}')
            form = Form(layout, _DTYPES[known[name]['dtype']], tuple(shape))
            start, stop = (begin + offset for offset in offsets)
            levels = self._positions.setdefault(int(item), [])
            if int(level) != len(levels) or stop - start != form.bytes:
                raise ValueError(f'{name} does not fit its place')
            levels.append((forms.setdefault(form, form), start))
            end = max(end, stop)
        if not set(self._checksums) == set(self._positions) == set(self.samples):
            raise ValueError('its checksums are of other items')
        if end != size:
            raise ValueError(f'{size:,} bytes, expected {end:,}')


def _as_stored(level: torch.Tensor) -> Tuple[str, torch.Tensor]:
    """Return the memory format of a level (C, h, w), and the level, contiguous in that format."""
    if not level.is_contiguous() and level.permute(1, 2, 0).is_contiguous():
        return _CHANNELS_LAST, level.permute(1, 2, 0)
    return _CHANNELS_FIRST, level.contiguous()


def read_items(rows: Sequence[Tuple[Shard, int]]) -> Tuple[torch.Tensor, ...]:
    """Return copies of n items of shards, one tensor (n, C, h, w) per level.

    The tensors have the memory format of the items that were written.

    Raises:
        ValueError: If the items have different shapes, with all of these shapes.
    """
    positions = [shard.places(item) for shard, item in rows]
    forms = {tuple(form for form, _ in levels) for levels in positions}
    if len(forms) != 1:
        raise ValueError(str(sorted([form.level_shape for form in item] for item in forms)))
    levels = []
    for at, form in enumerate(forms.pop()):
        # NumPy copies, because its calls cost a tenth of torch's. It has no bfloat16, so it copies
        # integers.
        batch = torch.empty((len(rows), *form.shape), dtype=_INTEGERS[form.item_bytes])
        bytes_of, size = batch.numpy().reshape(len(rows), -1).view('uint8'), form.bytes
        for row, (shard, _) in enumerate(rows):
            start = positions[row][at][1]
            bytes_of[row] = shard.memory[start : start + size]
        level = batch.view(form.dtype)
        levels.append(level.permute(0, 3, 1, 2) if form.layout == _CHANNELS_LAST else level)
    return tuple(levels)


def _checksum(levels: Levels) -> int:
    value = 0
    for level in levels:
        # NumPy has no bfloat16.
        plain = level.view(torch.int16) if level.dtype == torch.bfloat16 else level
        value = zlib.crc32(plain.numpy().reshape(-1).view('uint8').data, value)
    return value
