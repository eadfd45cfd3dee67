"""Data order and augmentation as pure functions of the seed, so that a resumed run is exact.

Every sample is drawn with a random state derived from ``(seed, epoch, global position)``, where the
global position counts samples over all ranks. A sample therefore looks the same for any number of
workers and ranks, and wherever the run was interrupted. Only the iteration number has to be saved.
"""
from __future__ import annotations

import itertools
import operator
import random
from typing import Any, Dict, Iterator, Sequence, Tuple

import numpy as np
import torch
from torch.utils.data import Sampler

from mapsage.accelerator import derived_seed


class SampleKey(int):
    """A dataset index that carries the seed of its sample to the loader's worker."""

    seed: Tuple[int, ...]

    def __new__(cls, index: int, seed: Tuple[int, ...]) -> SampleKey:  # noqa: D102
        key = super().__new__(cls, index)
        key.seed = seed
        return key

    def __reduce__(self) -> Tuple[Any, ...]:
        return SampleKey, (int(self), self.seed)


class SampleTupleKey(tuple):
    """A dataset index that is a tuple, such as (size, number), with the seed of its sample."""

    seed: Tuple[int, ...]

    def __new__(cls, index: Tuple[Any, ...], seed: Tuple[int, ...]) -> SampleTupleKey:  # noqa: D102
        key = super().__new__(cls, index)
        key.seed = seed
        return key

    def __reduce__(self) -> Tuple[Any, ...]:
        return SampleTupleKey, (tuple(self), self.seed)


def with_seed(index: Any, seed: Tuple[int, ...]) -> Any:
    """Return an index that carries a seed; one that is no number and no tuple carries none.

    NumPy's numbers and elements of tensors, such as those of ``torch.randperm``, become plain ones.
    """
    if not getattr(index, 'shape', ()):  # a tensor of one element may be meant as a batch
        try:
            return SampleKey(operator.index(index), seed)
        except TypeError:
            pass
    return SampleTupleKey(index, seed) if type(index) is tuple else index


def without_seed(key: Any) -> Tuple[Any, Tuple[int, ...]]:
    """Return the index of a key, and its seed, ``()`` where it has none."""
    seed: Tuple[int, ...] = getattr(key, 'seed', ())
    if isinstance(key, SampleKey):
        return int(key), seed
    return (tuple(key), seed) if isinstance(key, SampleTupleKey) else (key, ())


def seed_sample(entropy: Tuple[int, ...]) -> None:
    """Seed Python's, NumPy's and torch's CPU generators, which data transforms draw from."""
    seed = derived_seed(*entropy)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class ResumableSampler(Sampler):
    """Wraps one rank's sampler: its indices become :class:`SampleKey`, and it can skip samples.

    To a user's code it is the sampler that it wraps: isinstance says so, and every attribute but
    the methods below is read from that sampler and set on it.

    MMEngine's samplers give rank ``r`` the positions ``r, r + world_size, ...`` of one global
    order, so position ``i`` on rank ``r`` is global position ``i * world_size + r``.

    Args:
        sampler: Sampler of this rank, finite or infinite.
        seed: Seed of the run (>= 0). If the sampler has an attribute ``seed``, that one is used.
        rank: Number of this rank.
        world_size: Number of ranks.
        batch_size: Number of samples in a batch on this rank.
        drop_last: Whether the loader drops an incomplete last batch.
    """

    def __init__(self, sampler: Sampler, seed: int, rank: int, world_size: int, batch_size: int,
                 drop_last: bool = False) -> None:
        self._sampler = sampler
        sampler_seed = getattr(sampler, 'seed', None)
        self._seed = int(seed if sampler_seed is None else sampler_seed)
        self._rank, self._world_size = rank, world_size
        self._batch_size, self._drop_last = batch_size, drop_last
        self._epoch = self._epoch_offset = 0
        self._skip_batches = 0
        self._led: Tuple[ResumableSampler, ...] = ()

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:  # while this object is unpickled, they are not set yet
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:
            for each in (self, *self._led):
                setattr(each._sampler, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._sampler)

    def __reduce__(self) -> Tuple[Any, ...]:  # pickle would trust __class__
        return _restored, ({name: getattr(self, name) for name in _OWN},)

    def lead(self, others: Sequence[ResumableSampler]) -> None:
        """Let the samplers of other virtual ranks follow what is set on this one from now on."""
        self._led = tuple(others)

    def set_epoch(self, epoch: int) -> None:
        """Start the order of ``epoch``; epochs that :meth:`skip` has left out are added."""
        for each in (self, *self._led):
            each._start_epoch(epoch)

    def _start_epoch(self, epoch: int) -> None:
        self._epoch = epoch + self._epoch_offset
        if hasattr(self._sampler, 'set_epoch'):
            self._sampler.set_epoch(self._epoch)

    def skip(self, num_samples: int) -> None:
        """Leave out the first ``num_samples`` samples of the run when iteration starts next.

        Only indices are drawn; no data is loaded. The loop of onedl-mmengine looks for a method
        with this name and meaning.

        Args:
            num_samples: Number of samples on this rank, a multiple of the batch size.
        """
        for each in (self, *self._led):
            each._skip_batches = num_samples // self._batch_size

    def __iter__(self) -> Iterator[SampleKey]:
        batches, self._skip_batches = self._skip_batches, 0
        stream = iter(self._sampler)
        position = 0
        while batches:
            position = _advance(stream, batches * self._batch_size)
            if position == batches * self._batch_size:
                break
            if not self._batches_in(position):
                raise ValueError(
                    f'cannot resume: an epoch has {position} sample(s) on this rank, less than a '
                    f'batch of {self._batch_size}. Lower batch_size or add data.')
            batches -= self._batches_in(position)
            epoch = self._epoch - self._epoch_offset  # the number that the loop uses
            self._epoch_offset += 1
            self._start_epoch(epoch)
            stream, position = iter(self._sampler), 0
        for index in stream:
            yield with_seed(index, (self._seed, self._epoch,
                                    position * self._world_size + self._rank))
            position += 1

    def _batches_in(self, num_samples: int) -> int:
        whole, rest = divmod(num_samples, self._batch_size)
        return whole + (1 if rest and not self._drop_last else 0)


# What a ResumableSampler keeps for itself; all other attributes are those of the user's sampler.
_OWN = ('_sampler', '_seed', '_rank', '_world_size', '_batch_size', '_drop_last', '_epoch',
        '_epoch_offset', '_skip_batches', '_led')


def _restored(own: Dict[str, Any]) -> ResumableSampler:
    sampler = ResumableSampler.__new__(ResumableSampler)
    for name, value in own.items():
        setattr(sampler, name, value)
    return sampler


def _advance(stream: Iterator[Any], count: int) -> int:
    """Draw up to ``count`` items; return how many there were."""
    return sum(1 for _ in itertools.islice(stream, count))
