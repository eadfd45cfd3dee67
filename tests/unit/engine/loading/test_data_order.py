"""The order and the augmentation of samples are functions of the seed and nothing else."""

from __future__ import annotations

import itertools
import pickle
import random
from typing import Any, List, NamedTuple, Tuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mmengine.dataset import DefaultSampler, InfiniteSampler
from torch.utils.data import BatchSampler, DataLoader, Dataset

from mapsage.engine.loading.data_checks import DataError
from mapsage.engine.loading.data_order import (
    ResumableSampler,
    SampleKey,
    SampleTupleKey,
    seed_sample,
    with_seed,
    without_seed,
)
from mapsage.engine.loading.keyed_loader import KeyedDataset, KeyedLoader

Drawn = List[Tuple[int, Tuple[int, ...]]]


def sampler_of(
    kind: type,
    length: int,
    rank: int,
    world: int,
    batch: int,
    drop_last: bool = False,
    seed: int = 3,
) -> ResumableSampler:
    """One rank's sampler, as the runner builds it under that rank."""
    module = __import__(kind.__module__, fromlist=['get_dist_info'])
    genuine, module.get_dist_info = module.get_dist_info, lambda: (rank, world)
    try:
        inner = kind(list(range(length)), shuffle=True, seed=seed)
    finally:
        module.get_dist_info = genuine
    return ResumableSampler(inner, 0, rank, world, batch, drop_last)


class Loop:
    """Draws batches for ever as MMEngine's iteration-based loop does."""

    def __init__(self, sampler: ResumableSampler, batch: int, drop_last: bool) -> None:
        self._sampler = sampler
        self._batches = BatchSampler(sampler, batch, drop_last)
        self._epoch = 0
        self._iterator: Any = None

    def draw(self) -> Drawn:
        if self._iterator is None:
            self._iterator = iter(self._batches)
        try:
            keys = next(self._iterator)
        except StopIteration:
            self._epoch += 1
            self._sampler.set_epoch(self._epoch)
            self._iterator = iter(self._batches)
            keys = next(self._iterator)
        return [(int(key), key.seed) for key in keys]


KINDS = st.sampled_from([InfiniteSampler, DefaultSampler])


@settings(max_examples=150, deadline=None)
@given(
    KINDS,
    st.integers(1, 30),
    st.integers(1, 5),
    st.integers(0, 25),
    st.integers(1, 4),
    st.booleans(),
    st.data(),
)
def test_skipping_equals_dropping(
    kind: type, length: int, batch: int, skipped: int, world: int, drop_last: bool, data: Any
) -> None:
    rank = data.draw(st.integers(0, world - 1))
    if kind is DefaultSampler and drop_last and -(-length // world) < batch:
        return  # such a loader has no batch at all
    whole = Loop(sampler_of(kind, length, rank, world, batch, drop_last), batch, drop_last)
    for _ in range(skipped):
        whole.draw()
    resumed_sampler = sampler_of(kind, length, rank, world, batch, drop_last)
    resumed_sampler.set_epoch(0)  # MMEngine's DistSamplerSeedHook, before the loop skips
    resumed_sampler.skip(skipped * batch)
    resumed = Loop(resumed_sampler, batch, drop_last)
    for _ in range(12):
        assert whole.draw() == resumed.draw()


@settings(max_examples=100, deadline=None)
@given(KINDS, st.integers(1, 30), st.integers(1, 5))
def test_ranks_together_draw_what_one_process_draws(kind: type, length: int, world: int) -> None:
    ranks = [sampler_of(kind, length, rank, world, 1) for rank in range(world)]
    rounds = list(itertools.islice(zip(*ranks), 40))
    together = [(int(key), key.seed) for row in rounds for key in row]
    one = [
        (int(key), key.seed)
        for key in itertools.islice(sampler_of(kind, length, 0, 1, 1), len(together))
    ]
    # a rounded-up epoch repeats samples at its end, which one process does not draw
    assert together[: len(one)] == one and len(together) - len(one) < world


def test_epochs_and_positions_have_seeds_of_their_own() -> None:
    sampler = sampler_of(DefaultSampler, 5, 0, 1, 2)
    seeds = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seeds += [key.seed for key in sampler]
    assert len(set(seeds)) == len(seeds) == 15


def test_the_samplers_own_seed_takes_precedence() -> None:
    first = next(iter(sampler_of(DefaultSampler, 5, 0, 1, 2, seed=11)))
    assert first.seed[0] == 11


def test_resuming_without_a_whole_batch_is_an_error() -> None:
    sampler = sampler_of(DefaultSampler, 3, 0, 1, batch=4, drop_last=True)
    sampler.skip(8)
    drawn = _within(2.0, lambda: next(iter(sampler)))
    assert isinstance(drawn, ValueError) and 'cannot resume' in str(drawn)


def _within(seconds: float, action: Any) -> Any:
    """Return what ``action`` raised or gave, or fail when it is still busy after ``seconds``."""
    import signal

    def stop(*_: Any) -> None:
        raise TimeoutError(f'still busy after {seconds} s')

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return action()
    except ValueError as error:
        return error
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)


@given(st.integers(0, 2**40), st.lists(st.integers(0, 2**40), max_size=4))
def test_key_survives_pickling(index: int, seed: List[int]) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        key = pickle.loads(pickle.dumps(SampleKey(index, tuple(seed)), protocol))
        assert type(key) is SampleKey and key == index and key.seed == tuple(seed)
        pair = pickle.loads(pickle.dumps(SampleTupleKey((32, index), tuple(seed)), protocol))
        assert type(pair) is SampleTupleKey and pair == (32, index) and pair.seed == tuple(seed)


class Size(NamedTuple):
    height: int
    index: int


@pytest.mark.parametrize('index', [5, (32, 5), Size(32, 5), 'name', None, [1, 2]])
def test_an_index_comes_back_as_the_sampler_gave_it(index: Any) -> None:
    back, seed = without_seed(with_seed(index, (1, 2)))
    assert type(back) is type(index) and back == index
    assert seed == ((1, 2) if type(index) in (int, tuple) else ())


@pytest.mark.parametrize('index', [np.int64(5), torch.tensor(5), next(iter(torch.arange(5, 6)))])
def test_a_number_of_any_library_carries_a_seed(index: Any) -> None:
    back, seed = without_seed(with_seed(index, (1, 2)))
    assert type(back) is int and (back, seed) == (5, (1, 2))


@pytest.mark.parametrize('index', [torch.tensor([5]), torch.tensor(5.0), 5.0])
def test_what_is_no_number_of_a_sample_is_left_as_it_is(index: Any) -> None:
    assert with_seed(index, (1, 2)) is index


class Augmented(Dataset):
    """Every sample draws from all three generators that transforms use."""

    metainfo = dict(classes=('a',))

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tuple[float, ...]:
        if index == 99:
            raise KeyError('bad sample')
        return (float(index), random.random(), float(np.random.rand()), float(torch.rand(1)))


def keyed() -> KeyedDataset:
    return KeyedDataset(
        Augmented(), lambda *_: None, lambda _, index, error: DataError(f'sample {index}: {error}')
    )


def samples(workers: int, world: int = 1) -> List[Any]:
    """All samples of two epochs in global order."""
    ranks = []
    for rank in range(world):
        sampler = sampler_of(DefaultSampler, 10, rank, world, 2)
        loader = KeyedLoader(
            DataLoader(
                Augmented(), batch_size=2, sampler=sampler, num_workers=workers, collate_fn=list
            ),
            lambda *_: None,
            None,
        )
        drawn: List[Any] = []
        for epoch in range(2):
            sampler.set_epoch(epoch)
            drawn += [sample for batch in loader for sample in batch]
        ranks.append(drawn)
    return [sample for row in zip(*ranks) for sample in row]


@pytest.mark.parametrize('workers, world', [(1, 1), (2, 1), (0, 2), (2, 2)])
def test_samples_do_not_depend_on_workers_or_ranks(workers: int, world: int) -> None:
    reference = samples(0)
    assert len(set(reference)) == 20  # each drawn under a seed of its own
    assert samples(workers, world) == reference


def test_seed_sample_seeds_every_generator() -> None:
    drawn = []
    for entropy in ((1, 2, 3), (1, 2, 3), (1, 2, 4)):
        seed_sample(entropy)
        drawn.append((random.random(), float(np.random.rand()), float(torch.rand(1))))
    assert drawn[0] == drawn[1]
    assert all(one != other for one, other in zip(drawn[0], drawn[2]))


def test_keyed_dataset_explains() -> None:
    dataset = keyed()
    assert len(dataset) == 10
    with pytest.raises(DataError, match='sample 99') as caught:
        dataset[SampleKey(99, (1,))]
    assert isinstance(caught.value.__cause__, KeyError)
