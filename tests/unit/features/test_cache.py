"""A cache gives back what was put in, bit by bit, or says what is wrong with it."""
from __future__ import annotations

import json
import os
import resource
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from forked import fork_ranks
from hypothesis import given
from hypothesis import strategies as st
from mmseg.datasets import LoveDADataset
from safetensors.torch import load_file
from support import write_tiny_data
from torch import nn

from mapsage.engine.data_order import KeyedDataset, SampleKey
from mapsage.features.cache.cached import Cached
from mapsage.features.cache.index import (
    CacheIndex,
    find_shards,
    read_index,
    write_index,
)
from mapsage.features.cache.keys import (
    CacheKeys,
    ViewSeeds,
    canonical,
    dataset_hash,
    keys_of_run,
    weights_hash,
)
from mapsage.features.cache.shards import (
    CacheError,
    DamagedShardError,
    Shard,
    ShardEntry,
    ranges_of,
    write_shard,
)
from mapsage.features.source import Item

CPU = torch.device('cpu')
SAMPLES, VIEWS = 5, 2
KEYS = CacheKeys('weights1', 'transforms1', 'dataset1', SAMPLES,
                 dict(dataset=dict(pipeline=[dict(type='Load'), dict(type='Flip', prob=0.5)])))
INDEX = CacheIndex(KEYS, VIEWS, 7, {})
SHARDS = ([0, 1, 2, 3], [4, 5, 8, 9], [6, 7])  # as several ranks leave them


def levels_of(item: int, dtype: torch.dtype = torch.float32) -> List[torch.Tensor]:
    generator = torch.Generator().manual_seed(item)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in ((3, 4, 5), (7, 2, 1))]


def write_cache(folder: Path, dtype: torch.dtype = torch.float32,
                levels: Callable[..., List[torch.Tensor]] = levels_of) -> Path:
    folder.mkdir(exist_ok=True)
    for items in SHARDS:
        write_shard(folder, INDEX.cache, {item: levels(item, dtype) for item in items})
    write_index(folder, find_shards(folder, INDEX)[0])
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_cache(tmp_path / 'cache')


def source(folder: Path) -> Cached:
    return Cached(str(folder), VIEWS, CPU, KEYS)


def item(*keys: Tuple[int, int], number: int = 0) -> Item:
    """The item of ``(sample, view)`` pairs."""
    seeds = ViewSeeds(7, VIEWS)
    return Item(number, tuple((index, seeds.of(index, view)) for index, view in keys),
                torch.empty(len(keys), 0, 0, 0))


def read_all(cached: Cached) -> None:
    for index in range(SAMPLES):
        for view in range(VIEWS):
            cached.features(item((index, view)))


def shard_with(folder: Path, number: int) -> Path:
    return next(folder / entry.file for entry in find_shards(folder, INDEX)[0].shards
                if number in entry.items)


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
    assert torch.equal(level, torch.stack([encoded(1, torch.float32)[0],
                                           encoded(4, torch.float32)[0]]))
    assert level.is_contiguous(memory_format=torch.channels_last)
    assert not level.is_contiguous()


def test_what_the_head_writes_does_not_come_back(folder: Path) -> None:
    cached = source(folder)
    for level in cached.features(item((1, 1))):
        level.zero_()
    assert torch.equal(cached.features(item((1, 1)))[0][0], levels_of(3)[0])


def test_shards_are_safetensors_that_others_may_read(folder: Path) -> None:
    mask = os.umask(0)
    os.umask(mask)
    for path in folder.glob('features-*'):
        tensors = load_file(str(path))
        assert {name.split('.')[1] for name in tensors} == {'00', '01'}
        assert path.stat().st_mode & 0o777 == 0o666 & ~mask


def test_shards_are_mapped_when_needed_and_let_go(folder: Path) -> None:
    def mapped() -> int:
        return sum(str(folder) in line for line in Path('/proc/self/maps').read_text().splitlines())

    cached = source(folder)
    assert mapped() == 0
    read_all(cached)
    assert mapped() == len(SHARDS)
    assert not any(str(folder) in os.path.realpath(f'/proc/self/fd/{number}')
                   for number in os.listdir('/proc/self/fd'))
    cached.close()
    cached.close()
    assert mapped() == 0


@pytest.mark.parametrize(('change', 'words'), [
    (dict(weights='weights2'), 'weights weights1 there, weights2 here'),
    (dict(dataset='dataset2', samples=6), r'dataset1 there, dataset2 here \(5 samples there, 6'),
    (dict(transforms='transforms2',
          settings=dict(dataset=dict(pipeline=[dict(type='Load'), dict(type='Flip', prob=0.25)]))),
     r'transforms1 there, transforms2 here \(config.dataset.pipeline\[1\].prob: 0.5 there, 0.25'),
])
def test_a_cache_of_other_features_is_refused(folder: Path, change: Dict[str, Any],
                                              words: str) -> None:
    with pytest.raises(CacheError, match=words) as caught:
        Cached(str(folder), VIEWS, CPU, replace(KEYS, **change))
    others = {'weights', 'transforms', 'dataset'} - set(change)
    assert not any(f'{name} {name}1 there' in str(caught.value) for name in others)
    assert '--views 2 --folder ANOTHER' in str(caught.value)


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
    with pytest.raises(CacheError, match='2 of 10 items are missing, from sample 3 on.*goes on'):
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
    write_shard(folder, INDEX.cache, {number: levels_of(number + 1) for number in (6, 7)})
    assert read_index(folder).shards[2].bytes == path.stat().st_size
    with pytest.raises(DamagedShardError, match=f'{path.name} is not the shard that index.json'):
        read_all(source(folder))


@pytest.mark.parametrize(('text', 'words'), [
    ('{"version": 1', 'is damaged'), ('{}', 'is damaged'), ('[]', 'is damaged'),
    ('{"version": 99}', 'version 99, this MapSage reads version 1'),
    ('{"version": 1, "keys": {"weights": ""}}', 'is damaged'),
])
def test_an_index_that_cannot_be_used_is_named(folder: Path, text: str, words: str) -> None:
    (folder / 'index.json').write_text(text)
    with pytest.raises(CacheError, match=f'index.json is .*{words[3:]}'):
        source(folder)


def test_a_shard_of_another_cache_is_refused(folder: Path) -> None:
    with pytest.raises(CacheError, match='is of another cache'):
        find_shards(folder, replace(INDEX, seed=8))


def test_samples_of_one_batch_have_equal_shapes(tmp_path: Path) -> None:
    def odd(number: int, dtype: torch.dtype) -> List[torch.Tensor]:
        return levels_of(number, dtype) if number else [torch.zeros(3, 9, 9), torch.zeros(7, 2, 1)]

    cached = source(write_cache(tmp_path / 'cache', levels=odd))
    assert cached.features(item((0, 0)))[0].shape == (1, 3, 9, 9)
    with pytest.raises(CacheError, match=r'samples \[0, 1\] of one batch.*batch_size=1'):
        cached.features(item((0, 0), (1, 0)))


def test_a_sample_that_is_no_view_is_refused(folder: Path) -> None:
    cached = source(folder)
    for seed in ((7, 0, 0), (), ViewSeeds(8, VIEWS).of(1, 0), ViewSeeds(7, VIEWS).of(2, 0),
                 ViewSeeds(7, 9).of(1, 5)):
        with pytest.raises(ValueError, match='sample 1 was loaded by the seed'):
            cached.features(Item(0, ((1, seed), ), torch.empty(1, 0, 0, 0)))


def _write_with_little_room(folder: Path) -> str:
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
    try:
        write_shard(folder, INDEX.cache, {0: [torch.zeros(100, 10, 10)]})
    except CacheError as error:
        return str(error)
    return 'written'


def test_a_disk_without_room_keeps_what_is_there(folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.iterdir())
    said = fork_ranks(_write_with_little_room, 1, tmp_path / 'rank', folder)[0]
    assert 'cannot write' in said and 'features-000000000000' in said
    assert 'It needs 40,' in said and 'are free there' in said and 'same command' in said
    assert sorted(folder.iterdir()) == before
    read_all(source(folder))


def test_views_are_drawn_by_the_sample_seed_and_stay() -> None:
    seeds = ViewSeeds(7, 4)
    drawn = [seeds(3, (1, epoch, 30)) for epoch in range(200)]
    assert drawn == [seeds(3, (1, epoch, 30)) for epoch in range(200)]
    counts = [sum(seeds.view(3, seed) == view for seed in drawn) for view in range(4)]
    assert min(counts) > 25
    assert [seeds(3, seed) for seed in drawn] == drawn  # loaded again by what it was loaded by
    assert len({seeds.of(index, view) for index in range(9) for view in range(4)}) == 36
    assert ViewSeeds(7, 1)(3, ()) == ViewSeeds(7, 1).of(3, 0)
    with pytest.raises(ValueError, match='without a seed to choose one of 4'):
        seeds(3, ())


def test_a_keyed_dataset_loads_by_the_seed_that_stands_in() -> None:
    class Random:
        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            return torch.rand(1)

    told: List[Any] = []
    dataset = KeyedDataset(Random(), lambda *_: None, None)
    seeds = ViewSeeds(7, 2)
    expected = dataset.load(1, seeds.of(1, 0)), dataset.load(1, seeds.of(1, 1))
    assert expected[0] != expected[1]
    dataset.reseed = seeds
    dataset.finish = lambda index, seed, sample: told.append((index, seed)) or sample
    for epoch in range(8):
        sample = dataset[SampleKey(1, (5, epoch, 0))]
        assert told[-1] == (1, seeds(1, (5, epoch, 0)))
        assert sample == expected[seeds.view(*told[-1])] == dataset.load(*told[-1])


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def test_weights_are_told_apart_by_name_type_and_value() -> None:
    found = {weights_hash(encoder())}
    assert found == {weights_hash(encoder())}
    assert weights_hash(encoder().requires_grad_(False).eval()) in found
    other = encoder()
    with torch.no_grad():
        other[0].weight[0, 0] += 1e-6
    moved = encoder()
    moved[1].running_mean += 1
    renamed = nn.Sequential(encoder())
    for each in (other, moved, renamed, encoder().half(), encoder().bfloat16()):
        found.add(weights_hash(each))
    assert len(found) == 6


def love(root: Path) -> LoveDADataset:
    return LoveDADataset(data_root=str(root), pipeline=[],
                         data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'))


def test_a_dataset_is_known_by_its_samples_wherever_it_lies(tmp_path: Path) -> None:
    root = write_tiny_data(tmp_path / 'here', train=3, val=1)
    known = dataset_hash(love(root))
    there = tmp_path / 'there' / 'data'
    shutil.copytree(str(root), str(there))
    assert dataset_hash(KeyedDataset(love(there), None, None)) == known

    (there / 'img_dir/train/1.png').write_bytes(b'another image')
    assert dataset_hash(love(there)) != known
    (root / 'img_dir/train/2.png').unlink()
    assert dataset_hash(love(root)) != known
    with pytest.raises(ValueError, match='list has no get_data_info'):
        dataset_hash([1, 2])


def config(**changes: Any) -> Dict[str, Any]:
    dataset = dict(type='A', data_root='/x', pipeline=[dict(type='Crop', size=(2, 3))])
    backbone = dict(type='B', depth=2, init_cfg=dict(checkpoint='x.pth'))
    dataset.update(changes.pop('dataset', {}))
    backbone.update(changes.pop('backbone', {}))
    return dict(model=dict(backbone=backbone, **changes), train_dataloader=dict(dataset=dataset))


def test_the_settings_that_decide_features_decide_the_key(tmp_path: Path) -> None:
    dataset, frozen = love(write_tiny_data(tmp_path / 'data', train=2, val=1)), encoder()

    def key(cfg: Dict[str, Any], dtype: Any = None) -> str:
        return keys_of_run(cfg, dataset, frozen, dtype).transforms

    known = key(config())
    assert key(config(dataset=dict(data_root='/y', ann_file='z'))) == known
    assert key(config(backbone=dict(init_cfg=None))) == known
    assert key(config(dataset=dict(pipeline=[dict(size=[2, 3], type='Crop')]))) == known
    assert key(config(decode_head=dict(type='H'))) == known
    others = [config(dataset=dict(pipeline=[dict(type='Crop', size=(2, 4))])),
              config(backbone=dict(depth=3)), config(data_preprocessor=dict(mean=[1])),
              dict(config(), data_preprocessor=dict(mean=[1.5]))]
    assert len({known, key(config(), torch.bfloat16), *map(key, others)}) == 6
    with pytest.raises(ValueError, match='looks different in every run'):
        key(config(backbone=dict(act=object())))


def test_canonical_values_are_plain() -> None:
    value = canonical(dict(a=(1, torch.ones(2)), b=nn.Conv2d, c=Path('x')))
    assert json.loads(json.dumps(value)) == value
    assert value['a'] == [1, [1.0, 1.0]] and value['b'] == 'torch.nn.modules.conv.Conv2d'


@given(st.sets(st.integers(0, 60)))
def test_ranges_hold_what_they_were_made_of(numbers: Any) -> None:
    entry = ShardEntry('x', 1, 2, sorted(numbers))
    assert ShardEntry.of_json(json.loads(json.dumps(entry.to_json()))) == entry
    ranges = ranges_of(sorted(numbers))
    assert all(start < stop for start, stop in ranges)
    assert all(one[1] < other[0] for one, other in zip(ranges, ranges[1:]))


def test_a_shard_that_another_program_wrote_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file
    path = tmp_path / 'features-0.safetensors'
    save_file({'weight': torch.zeros(2)}, str(path), dict(format='pt'))
    with pytest.raises(DamagedShardError, match='features-0.safetensors is damaged'):
        Shard(path)
