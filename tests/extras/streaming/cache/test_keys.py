"""Equal settings give equal keys and different ones do not; views are drawn by seeds that last."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
from mmengine.dataset import RepeatDataset
from mmseg.datasets import LoveDADataset
from support import write_tiny_data
from torch import nn

from mapsage.engine.loading.data_order import SampleKey
from mapsage.engine.loading.keyed_loader import KeyedDataset
from mapsage.extras.streaming.cache.keys import (
    ViewSeeds,
    canonical,
    keys_of_run,
    sample_hashes,
    weights_hash,
)


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

    finished: List[Any] = []
    dataset = KeyedDataset(Random(), lambda *_: None, None)
    seeds = ViewSeeds(7, 2)
    expected = dataset.load(1, seeds.of(1, 0)), dataset.load(1, seeds.of(1, 1))
    assert expected[0] != expected[1]
    dataset.reseed = seeds
    dataset.finish = lambda index, seed, sample: finished.append((index, seed)) or sample
    for epoch in range(8):
        sample = dataset[SampleKey(1, (5, epoch, 0))]
        assert finished[-1] == (1, seeds(1, (5, epoch, 0)))
        assert sample == expected[seeds.view(*finished[-1])] == dataset.load(*finished[-1])


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))


def test_weights_are_finished_apart_by_name_type_and_value() -> None:
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
    return LoveDADataset(
        data_root=str(root),
        pipeline=[],
        data_prefix=dict(img_path='img_dir/train', seg_map_path='ann_dir/train'),
    )


def test_a_dataset_is_known_by_its_samples_wherever_it_lies(tmp_path: Path) -> None:
    root = write_tiny_data(tmp_path / 'here', train=3, val=1)
    known = sample_hashes(love(root))
    assert len(set(known)) == 3
    there = tmp_path / 'there' / 'data'
    shutil.copytree(str(root), str(there))
    assert sample_hashes(love(there)) == known

    (there / 'img_dir/train/1.png').write_bytes(b'another image')
    changed = sample_hashes(love(there))
    assert [one == other for one, other in zip(changed, known)] == [True, False, True]
    assert sample_hashes(love(there), sizes=False) == sample_hashes(love(root), sizes=False)
    (root / 'img_dir/train/1.png').unlink()
    assert sample_hashes(love(root)) == [known[0], known[2]]
    with pytest.raises(ValueError, match='list has no get_data_info'):
        sample_hashes([1, 2])


def test_equal_samples_of_a_repeated_dataset_have_one_hash(tmp_path: Path) -> None:
    root = write_tiny_data(tmp_path / 'data', train=3, val=1)
    repeated = RepeatDataset(love(root), 2)
    assert sample_hashes(repeated) == sample_hashes(love(root)) * 2


def config(**changes: Any) -> Dict[str, Any]:
    dataset = dict(type='A', data_root='/x', pipeline=[dict(type='Crop', size=(2, 3))])
    backbone = dict(type='B', depth=2, init_cfg=dict(checkpoint='x.pth'))
    dataset.update(changes.pop('dataset', {}))
    backbone.update(changes.pop('backbone', {}))
    return dict(model=dict(backbone=backbone, **changes), train_dataloader=dict(dataset=dataset))


def test_the_settings_that_decide_features_decide_the_key() -> None:
    frozen = encoder()

    def key(cfg: Dict[str, Any], dtype: Any = None) -> str:
        return keys_of_run(cfg, ['sample'], frozen, dtype).transforms

    known = key(config())
    assert key(config(dataset=dict(data_root='/y', ann_file='z'))) == known
    windows = dict(scenes='a', window=8)
    of_windows = key(config(dataset=windows))
    for name, value in dict(
        scenes=['b'],
        labels='c',
        stride=4,
        outside=255,
        class_field='d',
        label_nodata=None,
        default_class='e',
    ).items():
        assert key(config(dataset=dict(windows, **{name: value}))) == of_windows != known
    assert key(config(dataset=dict(windows, bands=[1]))) != of_windows
    assert key(config(dataset=dict(windows, window=9))) != of_windows
    assert key(config(backbone=dict(init_cfg=None))) == known
    assert key(config(dataset=dict(pipeline=[dict(size=[2, 3], type='Crop')]))) == known
    assert key(config(decode_head=dict(type='H'))) == known
    others = [
        config(dataset=dict(pipeline=[dict(type='Crop', size=(2, 4))])),
        config(backbone=dict(depth=3)),
        config(data_preprocessor=dict(mean=[1])),
        dict(config(), data_preprocessor=dict(mean=[1.5])),
    ]
    assert len({known, key(config(), torch.bfloat16), *map(key, others)}) == 6
    with pytest.raises(ValueError, match='looks different in every run'):
        key(config(backbone=dict(act=object())))


def test_canonical_values_are_plain() -> None:
    value = canonical(dict(a=(1, torch.ones(2)), b=nn.Conv2d, c=Path('x')))
    assert json.loads(json.dumps(value)) == value
    assert value['a'] == [1, [1.0, 1.0]] and value['b'] == 'torch.nn.modules.conv.Conv2d'
