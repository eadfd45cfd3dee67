"""A cache of five samples with two views each, in three shards."""

from __future__ import annotations

from pathlib import Path
from typing import Callable, List, Tuple

import torch

from mapsage.extras.streaming.cache.cached import Cached
from mapsage.extras.streaming.cache.index import CacheIndex, find_shards, write_index
from mapsage.extras.streaming.cache.keys import CacheKeys, ViewSeeds
from mapsage.extras.streaming.cache.shards import write_shard
from mapsage.extras.streaming.source import Item

CPU = torch.device('cpu')
SAMPLES, VIEWS = 5, 2
KEYS = CacheKeys(
    'weights1',
    'transforms1',
    tuple(f'sample{at}' for at in range(SAMPLES)),
    dict(dataset=dict(pipeline=[dict(type='Load'), dict(type='Flip', prob=0.5)])),
)
INDEX = CacheIndex(KEYS, VIEWS, 7, {})
NAMES = {item: KEYS.samples[item // VIEWS] for item in range(SAMPLES * VIEWS)}
SHARDS = ([0, 1, 2, 3], [4, 5, 8, 9], [6, 7])  # as the ranks of a run leave them


def levels_of(item: int, dtype: torch.dtype = torch.float32) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(item)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 4, 5), (7, 2, 1))]


def write_cache(
    folder: Path,
    dtype: torch.dtype = torch.float32,
    levels: Callable[..., List[torch.Tensor]] = levels_of,
) -> Path:
    folder.mkdir(exist_ok=True)
    for items in SHARDS:
        write_shard(folder, INDEX.cache, {item: levels(item, dtype) for item in items}, NAMES)
    write_index(folder, find_shards(folder, INDEX)[0])
    return folder


def source(folder: Path) -> Cached:
    return Cached(str(folder), VIEWS, CPU, KEYS)


def item(*keys: Tuple[int, int], number: int = 0) -> Item:
    """The item of ``(sample, view)`` pairs."""
    seeds = ViewSeeds(7, VIEWS)
    return Item(
        number,
        tuple((index, seeds.of(index, view)) for index, view in keys),
        torch.empty(len(keys), 0, 0, 0),
    )


def read_all(cached: Cached) -> None:
    for index in range(SAMPLES):
        for view in range(VIEWS):
            cached.features(item((index, view)))


def shard_with(folder: Path, number: int) -> Path:
    return next(
        folder / entry.file
        for entry in find_shards(folder, INDEX)[0].shards
        if number in entry.items
    )
