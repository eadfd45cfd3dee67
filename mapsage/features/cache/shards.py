"""Shards of cached features: safetensors files that are read by mapping them into memory."""
from __future__ import annotations

import json
import math
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import torch
from safetensors.torch import save

from mapsage.atomic_write import atomic_write
from mapsage.features.source import StreamingError

# A shard is what a killed run may lose of each rank's work, and what is held in memory until it
# is written: two dozen images of a ViT-L with four float32 levels, at 512 x 512.
SHARD_BYTES = 256 << 20
PATTERN = 'features-*.safetensors'
# How a level is stored: the kernels of a head, and so its last bits, depend on where channels lie.
_CHANNELS_FIRST, _CHANNELS_LAST = 'chw', 'hwc'
_DTYPES = dict(F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16)
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
_MAX_HEADER_BYTES = 100 << 20  # the format's own limit
_AGAIN = 'tools/cache_features.py with the same arguments as before computes what is not there.'

# The levels of one sample, each (channels, height, width).
Levels = Sequence[torch.Tensor]


class Form(NamedTuple):
    """How a level lies in a shard."""

    layout: str
    dtype: torch.dtype
    shape: Tuple[int, ...]

    @property
    def item_bytes(self) -> int:
        """Bytes of a number."""
        return torch.finfo(self.dtype).bits // 8

    @property
    def bytes(self) -> int:
        """Bytes of the level."""
        return math.prod(self.shape) * self.item_bytes

    @property
    def level_shape(self) -> Tuple[int, ...]:
        """(C, h, w)."""
        last = self.layout == _CHANNELS_LAST
        return (self.shape[2], *self.shape[:2]) if last else self.shape


class CacheError(StreamingError):
    """A cache of features cannot be used or written: what is wrong, and what to do."""


class DamagedShardError(CacheError):
    """A shard is not what was written."""


@dataclass(frozen=True)
class ShardEntry:
    """What the index says of a shard.

    Attributes:
        file: Its name.
        bytes: Its size.
        header: CRC-32 of its header.
        items: Numbers of its items, ascending.
    """

    file: str
    bytes: int
    header: int
    items: List[int]

    @classmethod
    def of_json(cls, entry: Dict[str, Any]) -> ShardEntry:
        """Return the entry that :meth:`to_json` wrote."""
        return cls(entry['file'], entry['bytes'], entry['header'],
                   [item for start, stop in entry['items'] for item in range(start, stop)])

    def to_json(self) -> Dict[str, Any]:
        """Return it with items as ranges ``[start, stop]``."""
        return dict(file=self.file, bytes=self.bytes, header=self.header,
                    items=ranges_of(self.items))


def ranges_of(numbers: Sequence[int]) -> List[List[int]]:
    """Return ascending numbers as ranges ``[start, stop]``, stop excluded."""
    ranges: List[List[int]] = []
    for number in numbers:
        if ranges and ranges[-1][1] == number:
            ranges[-1][1] += 1
        else:
            ranges.append([number, number + 1])
    return ranges


def write_shard(folder: Path, cache: str, items: Dict[int, Levels]) -> Path:
    """Write a shard; it appears under its name when it is whole and on the disk.

    Args:
        folder: Where.
        cache: Hash of the cache that it belongs to.
        items: By number, CPU tensors of one count a sample.

    Returns:
        Its path, named after its first item.

    Raises:
        CacheError: If it cannot be written, with the bytes it needs and those that are free.
    """
    first = min(items)
    path = folder / f'features-{first:012d}.safetensors'
    tensors, checksums = {}, {}
    for item, levels in items.items():
        laid_out = [_as_stored(tensor) for tensor in levels]
        checksums[item] = _checksum([tensor for _, tensor in laid_out])
        tensors.update({f'{item:012d}.{level:02d}.{layout}': tensor
                        for level, (layout, tensor) in enumerate(laid_out)})
    # Not save_file, which lets nobody but its user read the file.
    data = save(tensors, dict(cache=cache, checksums=json.dumps(checksums)))
    try:
        atomic_write(path, data, durable=True)
    except OSError as error:
        raise CacheError(
            f'cannot write {path}: {error}. It needs {len(data):,} bytes, {free_bytes(folder):,} '
            f'are free there. Free space, or write elsewhere with --folder. What is finished '
            f'stays: the same command continues.') from error
    return path


def free_bytes(folder: Path) -> int:
    """Return the bytes that may be written into a folder."""
    return shutil.disk_usage(folder).free


class Shard:
    """A shard, mapped into memory: nothing is read before it is looked at.

    Args:
        path: Its file.

    Attributes:
        cache: Hash of the cache that it belongs to.
        entry: What an index has to say of it.
        memory: The file, uint8 (bytes,); do not write to it.

    Raises:
        DamagedShardError: If its size or its header is not a whole shard's.
        CacheError: If it is missing or may not be read.
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
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise DamagedShardError(f'{path} is damaged: {error!r}. Delete it. {_AGAIN}') from error
        self.entry = ShardEntry(path.name, size, zlib.crc32(header), sorted(self._places))
        # Private, and by torch's own map, which leaves no file descriptor open.
        self.memory = torch.from_file(str(path), shared=False, size=size,
                                      dtype=torch.uint8).numpy()

    def places(self, item: int) -> List[Tuple[Form, int]]:
        """Return the form of each level of an item, and the byte of the file where it begins."""
        return self._places[item]

    def check(self, item: int) -> None:
        """Compare an item's bytes with the checksum of what was written.

        Raises:
            DamagedShardError: If they differ.
        """
        found = 0
        for form, start in self._places[item]:
            found = zlib.crc32(self.memory[start:start + form.bytes].data, found)
        if found != self._checksums[item]:
            raise DamagedShardError(
                f'{self._path} is damaged: item {item} has the checksum {found:08x}, '
                f'{self._checksums[item]:08x} was written. Delete it. {_AGAIN}')

    def _parse(self, header: bytes, begin: int, size: int) -> None:
        """Read the header of a safetensors file whose data begins at byte ``begin``."""
        known = json.loads(header.decode())
        told = known.pop('__metadata__')
        self.cache: str = told['cache']
        self._checksums = {int(item): int(value)
                           for item, value in json.loads(told['checksums']).items()}
        self._places: Dict[int, List[Tuple[Form, int]]] = {}
        forms: Dict[Form, Form] = {}  # one of each, however many items there are
        end = begin
        for name in sorted(known):
            item, level, layout = name.split('.')
            form = Form(layout, _DTYPES[known[name]['dtype']], tuple(known[name]['shape']))
            start, stop = (begin + offset for offset in known[name]['data_offsets'])
            levels = self._places.setdefault(int(item), [])
            if int(level) != len(levels) or stop - start != form.bytes:
                raise ValueError(f'{name} does not fit its place')
            levels.append((forms.setdefault(form, form), start))
            end = max(end, stop)
        if set(self._checksums) != set(self._places):
            raise ValueError('its checksums are of other items')
        if end != size:
            raise ValueError(f'{size:,} bytes, expected {end:,}')


def _as_stored(level: torch.Tensor) -> Tuple[str, torch.Tensor]:
    """Return the layout of a level (C, h, w), and the level as one piece in that layout."""
    if not level.is_contiguous() and level.permute(1, 2, 0).is_contiguous():
        return _CHANNELS_LAST, level.permute(1, 2, 0)
    return _CHANNELS_FIRST, level.contiguous()


def read_items(rows: Sequence[Tuple[Shard, int]]) -> Tuple[torch.Tensor, ...]:
    """Return copies of n items of shards: one (n, C, h, w) a level.

    Channels lie in memory as they lay when the items were written.

    Raises:
        ValueError: If the items have different shapes, with all of them.
    """
    places = [shard.places(item) for shard, item in rows]
    forms = {tuple(form for form, _ in levels) for levels in places}
    if len(forms) != 1:
        raise ValueError(str(sorted([form.level_shape for form in each] for each in forms)))
    levels = []
    for at, form in enumerate(forms.pop()):
        # By NumPy, whose copies cost a tenth of torch's in calls; integers, for bfloat16's sake.
        batch = torch.empty((len(rows), *form.shape), dtype=_INTEGERS[form.item_bytes])
        bytes_of, size = batch.numpy().reshape(len(rows), -1).view('uint8'), form.bytes
        for row, (shard, _) in enumerate(rows):
            start = places[row][at][1]
            bytes_of[row] = shard.memory[start:start + size]
        level = batch.view(form.dtype)
        levels.append(level.permute(0, 3, 1, 2) if form.layout == _CHANNELS_LAST else level)
    return tuple(levels)


def _checksum(levels: Levels) -> int:
    value = 0
    for level in levels:
        # NumPy has no bfloat16
        plain = level.view(torch.int16) if level.dtype == torch.bfloat16 else level
        value = zlib.crc32(plain.numpy().reshape(-1).view('uint8').data, value)
    return value
