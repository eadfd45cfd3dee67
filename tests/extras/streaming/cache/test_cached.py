"""A cache gives back what was put in, bit by bit, or says what is wrong with it."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import List

import pytest
import torch
from small_cache import (
    CPU,
    INDEX,
    KEYS,
    NAMES,
    SHARDS,
    VIEWS,
    item,
    levels_of,
    read_all,
    shard_with,
    source,
    write_cache,
)

from mapsage.extras.streaming.cache.cached import Cached
from mapsage.extras.streaming.cache.index import find_shards, read_index, write_index
from mapsage.extras.streaming.cache.keys import ViewSeeds
from mapsage.extras.streaming.cache.shards import CacheError, DamagedShardError, write_shard
from mapsage.extras.streaming.source import Item


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_features_come_back_bit_equal_from_any_shard(tmp_path: Path, dtype: torch.dtype) -> None:
    cached = source(write_cache(tmp_path / 'cache', dtype))
    keys = [(4, 1), (0, 0), (3, 1), (2, 0)]
    for _ in range(2):  # the second time past the checksums
        found = cached.features(item(*keys))
        assert [level.dtype for level in found] == [dtype, dtype]
        for level, at in zip(found, range(2)):
            expected = [levels_of(index * VIEWS + view, dtype)[at] for index, view in keys]
            assert torch.equal(level, torch.stack(expected))
    sizes = sum(level.numel() * level.element_size() for level in found)
    assert cached.report()['bytes'] == 2 * sizes
    assert cached.report() == dict(waited=0.0, bytes=0.0)


def test_channels_lie_in_memory_as_the_encoder_left_them(tmp_path: Path) -> None:
    def encoded(number: int, dtype: torch.dtype) -> List[torch.Tensor]:
        tokens = torch.randn(6, 3, generator=torch.Generator().manual_seed(number))
        return [tokens.t().reshape(3, 2, 3), torch.zeros(1, 1, 1)]  # as of a ViT

    cached = source(write_cache(tmp_path / 'cache', levels=encoded))
    level = cached.features(item((0, 1), (2, 0)))[0]
    assert torch.equal(
        level, torch.stack([encoded(1, torch.float32)[0], encoded(4, torch.float32)[0]])
    )
    assert level.is_contiguous(memory_format=torch.channels_last)
    assert not level.is_contiguous()


def test_what_the_head_writes_does_not_come_back(folder: Path) -> None:
    cached = source(folder)
    for level in cached.features(item((1, 1))):
        level.zero_()
    assert torch.equal(cached.features(item((1, 1)))[0][0], levels_of(3)[0])


def test_shards_are_mapped_when_needed_and_let_go(folder: Path) -> None:
    def mapped() -> int:
        return sum(str(folder) in line for line in Path('/proc/self/maps').read_text().splitlines())

    cached = source(folder)
    assert mapped() == 0
    read_all(cached)
    assert mapped() == len(SHARDS)
    assert not any(
        str(folder) in os.path.realpath(f'/proc/self/fd/{number}')
        for number in os.listdir('/proc/self/fd')
    )
    cached.close()
    cached.close()
    assert mapped() == 0


def test_other_views_are_refused(folder: Path) -> None:
    with pytest.raises(CacheError, match='views 2 there, 3 here'):
        Cached(str(folder), 3, CPU, KEYS)
    for wrong in (0, -1, True, 1.5, '2'):
        with pytest.raises(ValueError, match='feature_source.views='):
            Cached(str(folder), wrong, CPU, KEYS)  # type: ignore[arg-type]


def test_no_cache_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match='holds no cache.*cache_features.py CONFIG --views 2'):
        source(tmp_path)


def test_a_run_that_was_killed_left_a_cache_that_is_not_complete(folder: Path) -> None:
    write_index(folder, INDEX)  # as a run begins
    shard_with(folder, 6).unlink()
    with pytest.raises(CacheError, match='2 of 10 items are missing, from sample 3 on.*continues'):
        source(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    lost = shard_with(folder, 6)
    cached = source(folder)
    lost.unlink()
    with pytest.raises(CacheError, match=f'{lost.name} is missing.*same arguments'):
        cached.features(item((3, 0)))
    with pytest.raises(CacheError, match=f'{lost.name}, which index.json lists, is missing'):
        source(folder)


@pytest.mark.parametrize('kept', [0, 5, 100, -1])
def test_a_truncated_shard_is_named(folder: Path, kept: int) -> None:
    path = shard_with(folder, 6)
    data = path.read_bytes()
    cached = source(folder)
    path.write_bytes(data[:kept])
    with pytest.raises(DamagedShardError, match=f'{path.name} is damaged.*Delete it'):
        cached.features(item((3, 0)))
    with pytest.raises(DamagedShardError, match=f'{path.name} has .* bytes, {len(data):,} were'):
        source(folder)
    assert find_shards(folder, INDEX)[1] == [path]


def test_any_byte_that_is_wrong_is_found(folder: Path) -> None:
    path = shard_with(folder, 6)
    data = bytearray(path.read_bytes())
    for at in [*range(0, len(data), 37), len(data) - 1]:
        data[at] ^= 1
        path.write_bytes(bytes(data))
        with pytest.raises(CacheError, match=path.name):
            read_all(source(folder))
        data[at] ^= 1
    path.write_bytes(bytes(data))
    read_all(source(folder))


def test_another_shard_in_its_place_is_found(folder: Path) -> None:
    path = shard_with(folder, 6)
    for other in range(1, 99):  # checksums have unequally many digits
        write_shard(
            folder, INDEX.cache, {number: levels_of(number + other) for number in (6, 7)}, NAMES
        )
        if read_index(folder).shards[2].bytes == path.stat().st_size:
            break
    assert read_index(folder).shards[2].bytes == path.stat().st_size
    with pytest.raises(DamagedShardError, match=f'{path.name} is not the shard that index.json'):
        read_all(source(folder))


def test_samples_of_one_batch_have_equal_shapes(tmp_path: Path) -> None:
    def odd(number: int, dtype: torch.dtype) -> List[torch.Tensor]:
        return levels_of(number, dtype) if number else [torch.zeros(3, 9, 9), torch.zeros(7, 2, 1)]

    cached = source(write_cache(tmp_path / 'cache', levels=odd))
    assert cached.features(item((0, 0)))[0].shape == (1, 3, 9, 9)
    with pytest.raises(CacheError, match=r'samples \[0, 1\] of one batch.*batch_size=1'):
        cached.features(item((0, 0), (1, 0)))


def test_a_sample_that_is_no_view_is_refused(folder: Path) -> None:
    cached = source(folder)
    for seed in (
        (7, 0, 0),
        (),
        ViewSeeds(8, VIEWS).of(1, 0),
        ViewSeeds(7, VIEWS).of(2, 0),
        ViewSeeds(7, 9).of(1, 5),
    ):
        with pytest.raises(ValueError, match='sample 1 was loaded by the seed'):
            cached.features(Item(0, ((1, seed),), torch.empty(1, 0, 0, 0)))


def test_what_is_requested_ahead_is_read_in_a_thread(folder: Path) -> None:
    def threads() -> int:
        return sum(thread.name == 'feature-cache' for thread in threading.enumerate())

    before, cached = threads(), source(folder)
    assert cached.ahead == 2
    items = [item((index, 1), number=index) for index in range(3)]
    for each in items:
        cached.request(each)
    assert threads() == before + 1
    for each in items:
        assert torch.equal(cached.features(each)[0][0], levels_of(each.number * VIEWS + 1)[0])
    cached.close()
    assert threads() == before


def test_samples_keep_their_features_when_others_come_and_go(folder: Path) -> None:
    samples = ['sample3', 'sample0', 'sample3', 'sample4']  # sorted, repeated, two removed
    cached = Cached(str(folder), VIEWS, CPU, replace(KEYS, samples=tuple(samples)))
    for index, slot in enumerate([3, 0, 3, 4]):
        for view in range(VIEWS):
            key = index, cached.seed_of.of(index, view)
            assert key[1] == ViewSeeds(7, VIEWS).of(slot, view)  # the image is loaded as it was
            found = cached.features(Item(index, (key,), torch.empty(1, 0, 0, 0)))
            assert torch.equal(found[0][0], levels_of(slot * VIEWS + view)[0])
    cached.close()
    more = replace(KEYS, samples=('new', *KEYS.samples))
    with pytest.raises(CacheError, match='2 of 12 items are missing, from sample 0 on.*continues'):
        Cached(str(folder), VIEWS, CPU, more)
    index = find_shards(folder, INDEX)[0].extended(more.samples)
    assert index.slots(more.samples) == [5, 0, 1, 2, 3, 4] and index.cache == INDEX.cache
    write_shard(
        folder, index.cache, {10: levels_of(10), 11: levels_of(11)}, dict.fromkeys((10, 11), 'new')
    )
    write_index(folder, find_shards(folder, index)[0])
    cached = Cached(str(folder), VIEWS, CPU, more)
    key = 0, cached.seed_of.of(0, 1)
    assert torch.equal(
        cached.features(Item(0, (key,), torch.empty(1, 0, 0, 0)))[0][0], levels_of(11)[0]
    )


def test_an_index_that_was_deleted_is_made_again_from_the_shards(folder: Path) -> None:
    shard_with(folder, 6).unlink()
    bare = replace(INDEX, keys=replace(KEYS, samples=()))
    found = find_shards(folder, bare)[0]
    assert found.keys.samples == ('sample0', 'sample1', 'sample2', '', 'sample4')
    assert found.extended(KEYS.samples).slots(KEYS.samples) == [0, 1, 2, 5, 4]
