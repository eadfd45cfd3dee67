"""The dataset and the samplers of a loader are the user's own objects, however they are read."""

from __future__ import annotations

import copy
import itertools
import pickle
import random
from typing import Any, Dict, Iterator, List, Tuple

import pytest
import torch
from mmengine.dataset import BaseDataset, Compose, ConcatDataset, DefaultSampler, RepeatDataset
from mmengine.registry import DATA_SAMPLERS, DATASETS, FUNCTIONS, TRANSFORMS
from torch.utils.data import BatchSampler, DataLoader, Sampler, get_worker_info

from mapsage.engine import MapSageRunner


@TRANSFORMS.register_module()
class AddTo:
    """Turns a sample into a tensor (number, what was added, a random draw)."""

    def __init__(self, amount: float = 0.0) -> None:
        self.amount = amount

    def __call__(self, results: dict) -> dict:
        place = results['sample_idx'] if isinstance(results['sample_idx'], int) else -1
        return dict(
            inputs=torch.tensor([float(results['number']), self.amount, random.random(), place])
        )


@DATASETS.register_module()
class Numbers(BaseDataset):
    """Twelve numbers."""

    METAINFO = dict(classes=('a', 'b'))

    def load_data_list(self) -> List[dict]:
        return [dict(number=number) for number in range(12)]


@DATASETS.register_module()
class Sized(Numbers):
    """Takes pairs (size, number) from its sampler, as multi-scale training does."""

    def __getitem__(self, index: Tuple[int, int]) -> Any:
        assert type(index) is tuple
        sample = super().__getitem__(index[1])
        return dict(inputs=torch.cat([sample['inputs'], torch.tensor([float(index[0])])]))


NUMBERS: Dict[str, Any] = dict(type='Numbers', pipeline=[dict(type='AddTo')])


def loader_of(dataset: Any = NUMBERS, **changes: Any) -> DataLoader:
    settings: Dict[str, Any] = dict(
        dataset=dataset,
        sampler=dict(type='DefaultSampler', shuffle=False),
        batch_size=4,
        num_workers=0,
    )
    settings.update(changes)
    return MapSageRunner.build_dataloader(
        {key: value for key, value in settings.items() if value is not ...}, seed=3
    )


def read(loader: DataLoader) -> torch.Tensor:
    """All samples of an epoch, one a row."""
    return torch.cat([torch.stack(batch['inputs']) for batch in loader])


@pytest.mark.parametrize(
    'config, kind',
    [
        (NUMBERS, Numbers),
        (dict(type='RepeatDataset', times=2, dataset=NUMBERS), RepeatDataset),
        (dict(type='ConcatDataset', datasets=[NUMBERS, NUMBERS]), ConcatDataset),
    ],
)
def test_the_loaders_dataset_is_the_users(config: dict, kind: type) -> None:
    dataset = loader_of(config).dataset
    assert type(dataset) is kind and len(dataset) in (12, 24)
    assert dataset.metainfo['classes'] == ('a', 'b') and dataset.get_data_info(1)['number'] == 1
    assert dataset._fully_initialized
    inner = getattr(dataset, 'dataset', None) or getattr(dataset, 'datasets', [dataset])[0]
    assert type(inner) is Numbers  # a wrapper's own attribute, none of ours
    assert len(copy.deepcopy(dataset)) == len(pickle.loads(pickle.dumps(dataset))) == len(dataset)


def test_an_object_in_place_of_a_config_is_read_likewise() -> None:
    dataset = Numbers(pipeline=[AddTo()])
    loader = loader_of(dataset)
    assert type(loader.dataset) is Numbers
    assert torch.equal(read(loader), read(loader_of()))


@pytest.mark.parametrize('workers', [0, 2])
def test_what_is_set_on_the_dataset_takes_effect(workers: int) -> None:
    loader = loader_of(num_workers=workers)
    assert read(loader)[:, 1].unique().tolist() == [0]
    loader.dataset.pipeline = Compose([dict(type='AddTo', amount=7.0)])
    assert read(loader)[:, 1].unique().tolist() == [7]
    loader.dataset.pipeline.transforms[0].amount = 8.0
    assert read(loader)[:, 1].unique().tolist() == [8]
    loader.dataset.full_init = lambda: None
    assert 'full_init' in vars(loader.dataset)


def test_workers_that_persist_keep_what_they_started_with_as_under_the_host() -> None:
    loader = loader_of(num_workers=2, persistent_workers=True)
    first = read(loader)
    loader.dataset.pipeline = Compose([dict(type='AddTo', amount=7.0)])
    second = read(loader)
    assert second[:, 1].unique().tolist() == [0] and len(second) == len(first) == 12
    del loader


@FUNCTIONS.register_module()
def raise_amount(worker_id: int, amount: float) -> None:
    """What users do in worker_init_fn."""
    info = get_worker_info()
    assert type(info.dataset) is Numbers
    info.dataset.pipeline = Compose([dict(type='AddTo', amount=amount)])


def test_a_workers_dataset_is_the_users_too() -> None:
    loader = loader_of(num_workers=1, worker_init_fn=dict(type='raise_amount', amount=5.0))
    assert read(loader)[:, 1].unique().tolist() == [5]


def test_a_shortened_epoch_is_read_with_seeds() -> None:
    loader = loader_of(num_batch_per_epoch=2)
    assert len(loader) == 2 and torch.equal(read(loader), read(loader_of())[:8])


def test_what_goes_to_a_spawned_worker_can_be_pickled() -> None:
    samples = pickle.loads(pickle.dumps(loader_of().samples))
    assert type(samples.dataset) is Numbers
    assert torch.equal(samples.load(3, (1,))['inputs'], loader_of().samples.load(3, (1,))['inputs'])


@DATA_SAMPLERS.register_module()
class Pairs(Sampler):
    """Yields (size, number)."""

    def __init__(self, dataset: Any, seed: Any = None) -> None:
        self.length = len(dataset)
        self.size = 32

    def __iter__(self) -> Iterator[Tuple[int, int]]:
        return ((self.size, number) for number in range(self.length))

    def __len__(self) -> int:
        return self.length


SIZED = dict(type='Sized', pipeline=[dict(type='AddTo')])


def test_the_loaders_sampler_is_the_users() -> None:
    loader = loader_of(SIZED, sampler=dict(type='Pairs'))
    assert isinstance(loader.sampler, Pairs) and not isinstance(loader.sampler, DefaultSampler)
    assert loader.sampler.size == 32 and len(loader.sampler) == 12
    loader.sampler.size = 64
    assert read(loader)[:, 4].unique().tolist() == [64]
    assert isinstance(loader_of().sampler, DefaultSampler)
    for twin in (copy.deepcopy(loader.sampler), pickle.loads(pickle.dumps(loader.sampler))):
        assert isinstance(twin, Pairs) and list(twin) == list(loader.sampler)
    with pytest.raises(AttributeError):
        _ = loader.sampler.no_such


@pytest.mark.parametrize('workers', [0, 1])
def test_pairs_from_a_sampler_have_seeds(workers: int) -> None:
    loader = loader_of(SIZED, sampler=dict(type='Pairs'), num_workers=workers)
    rows = read(loader)
    assert rows[:, 0].tolist() == list(range(12)) and len(rows[:, 2].unique()) == 12
    random.seed(99)
    assert torch.equal(read(loader), rows)
    assert torch.equal(rows[:, :4], read(loader_of()))  # the seed belongs to the position


@DATA_SAMPLERS.register_module()
class InPairs(BatchSampler):
    """A user's batch sampler, which looks at the sampler's data and makes indices of its own."""

    def __iter__(self) -> Iterator[List[Tuple[int, int]]]:
        stream = iter(self.sampler)
        while True:
            batch = list(itertools.islice(stream, self.batch_size))
            if not batch:
                return
            yield [(8 * len(batch), int(index)) for index in batch]


@pytest.mark.parametrize('workers', [0, 1])
def test_a_batch_sampler_in_the_config(workers: int) -> None:
    batches = dict(type=BatchSampler, drop_last=True)
    loader = loader_of(batch_sampler=batches, batch_size=5, num_workers=workers)
    assert type(loader.batch_sampler) is BatchSampler
    assert isinstance(loader.batch_sampler.sampler, DefaultSampler)
    rows = read(loader)
    assert rows[:, 0].tolist() == list(range(10))
    random.seed(99)
    assert torch.equal(read(loader), rows) and torch.equal(rows, read(loader_of())[:10])

    loader = loader_of(
        SIZED,
        batch_sampler=dict(type='InPairs', drop_last=False),
        batch_size=5,
        num_workers=workers,
    )
    assert type(loader.batch_sampler) is InPairs
    assert read(loader)[:, 4].tolist() == [40.0] * 10 + [16.0] * 2


def test_a_batch_sampler_resumes_where_it_stopped() -> None:
    changes = dict(
        batch_sampler=dict(type=BatchSampler, drop_last=True),
        batch_size=5,
        sampler=dict(type='DefaultSampler', shuffle=True),
    )
    whole = loader_of(**changes)
    sampler: Any = whole.batch_sampler.sampler
    drawn = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        drawn += [torch.stack(batch['inputs']) for batch in whole]
    resumed = loader_of(**changes)
    resumed.batch_sampler.sampler.skip(3 * 5)
    assert torch.equal(torch.stack(next(iter(resumed))['inputs']), drawn[3])


@FUNCTIONS.register_module()
def as_it_is(sample: Any) -> Any:
    """Collates nothing."""
    return sample


def test_a_loader_without_batch_size() -> None:
    assert [len(batch['inputs']) for batch in loader_of(batch_size=...)] == [1] * 12
    single = loader_of(batch_size=None, collate_fn=dict(type='as_it_is'))
    assert torch.equal(torch.stack([sample['inputs'] for sample in single]), read(loader_of()))
