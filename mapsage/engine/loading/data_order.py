"""Data order and augmentation as pure functions of the seed, so that a resumed run is exact.

Every sample is drawn with a random state derived from ``(seed, epoch, global position)``, where the
global position counts samples over all ranks. A sample therefore looks the same for any number of
workers and ranks, and wherever the run was interrupted. Only the iteration number has to be saved.
The loader that applies the seeds is in `keyed_loader.py`.
"""

from __future__ import annotations

import itertools
import operator
import random
from contextlib import contextmanager
from typing import Any, Dict, Hashable, Iterator, Sequence, Tuple

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
    """Return an index that carries a seed. Only numbers and tuples can carry one.

    NumPy's numbers and elements of tensors, such as those of ``torch.randperm``, become plain ones.
    """
    # A tensor with a shape stays as it is: a dataset may read one of one element as a batch.
    if not (isinstance(index, (np.ndarray, torch.Tensor)) and index.shape):
        try:
            return SampleKey(operator.index(index), seed)
        except TypeError:
            pass
    return SampleTupleKey(index, seed) if type(index) is tuple else index


def without_seed(key: Hashable) -> Tuple[Any, Tuple[int, ...]]:
    """Return the index of a key, and its seed, which is ``()`` for an index without one."""
    if isinstance(key, SampleKey):
        return int(key), key.seed
    return (tuple(key), key.seed) if isinstance(key, SampleTupleKey) else (key, ())


def seed_sample(entropy: Tuple[int, ...]) -> None:
    """Seed Python's, NumPy's and torch's CPU generators, which data transforms draw from."""
    seed = derived_seed(*entropy)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


@contextmanager
def generators_unaffected() -> Iterator[None]:
    """Make what the generators of :func:`seed_sample` give after a block independent of the block.

    torch's gets its state back. Python's and NumPy's continue from numbers that they gave before,
    because reading and writing their states takes 0.2 ms.
    """
    state = torch.default_generator.get_state()
    seeds = random.getrandbits(32), int(np.random.random_sample() * (1 << 32))
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        random.seed(seeds[0])
        np.random.seed(seeds[1])


class ResumableSampler(Sampler):
    """Wraps one rank's sampler: its indices become :class:`SampleKey`, and it can skip samples.

    To a user's code it looks like the wrapped sampler: isinstance says so, and all attributes
    except the methods below are read from the wrapped sampler and set on it.

    MMEngine's samplers give rank ``r`` the positions ``r, r + world_size, ...`` of one global
    order, so position ``i`` on rank ``r`` is global position ``i * world_size + r``.

    Args:
        sampler: Sampler of this rank, finite or infinite.
        seed: Seed of the run (>= 0). An attribute ``seed`` of the sampler takes precedence.
        rank: Number of this rank.
        world_size: Number of ranks.
        batch_size: Number of samples in a batch on this rank.
        drop_last: Whether the loader drops an incomplete last batch.
    """

    def __init__(
        self,
        sampler: Sampler,
        seed: int,
        rank: int,
        world_size: int,
        batch_size: int,
        drop_last: bool = False,
    ) -> None:
        self._sampler = sampler
        sampler_seed = getattr(sampler, 'seed', None)
        self._seed = int(seed if sampler_seed is None else sampler_seed)
        self._rank, self._world_size = rank, world_size
        self._batch_size, self._drop_last = batch_size, drop_last
        self._epoch = self._epoch_offset = 0
        self._skip_batches = 0
        self._followers: Tuple[ResumableSampler, ...] = ()

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        # While this object is unpickled, its attributes are not set yet.
        if name in _ATTRIBUTES:
            raise AttributeError(name)
        return getattr(self._sampler, name)

    def __setattr__(self, name: str, value: object) -> None:
        if name in _ATTRIBUTES:
            super().__setattr__(name, value)
        else:
            for sampler in (self, *self._followers):
                setattr(sampler._sampler, name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._sampler)

    # pickle would trust __class__.
    def __reduce__(self) -> Tuple[Any, ...]:
        return _unpickle, (vars(self),)

    def lead(self, followers: Sequence[ResumableSampler]) -> None:
        """Let the samplers of other virtual ranks follow what is set on this one from now on."""
        self._followers = tuple(followers)

    def set_epoch(self, epoch: int) -> None:
        """Start the order of ``epoch``, plus the epochs that :meth:`skip` has left out."""
        for sampler in (self, *self._followers):
            sampler._start_epoch(epoch)

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
        for sampler in (self, *self._followers):
            sampler._skip_batches = num_samples // self._batch_size

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
                    f'batch of {self._batch_size}. Lower batch_size or add data.'
                )
            batches -= self._batches_in(position)
            # The number by which the loop knows the epoch.
            epoch = self._epoch - self._epoch_offset
            self._epoch_offset += 1
            self._start_epoch(epoch)
            stream, position = iter(self._sampler), 0
        for index in stream:
            yield with_seed(
                index, (self._seed, self._epoch, position * self._world_size + self._rank)
            )
            position += 1

    def _batches_in(self, num_samples: int) -> int:
        whole, rest = divmod(num_samples, self._batch_size)
        return whole + (1 if rest and not self._drop_last else 0)


# Attributes of a ResumableSampler itself. All others belong to the wrapped sampler.
_ATTRIBUTES = (
    '_sampler',
    '_seed',
    '_rank',
    '_world_size',
    '_batch_size',
    '_drop_last',
    '_epoch',
    '_epoch_offset',
    '_skip_batches',
    '_followers',
)


def _unpickle(attributes: Dict[str, object]) -> ResumableSampler:
    sampler = ResumableSampler.__new__(ResumableSampler)
    vars(sampler).update(attributes)
    return sampler


def _advance(stream: Iterator[object], count: int) -> int:
    """Draw up to ``count`` items; return how many there were."""
    return sum(1 for _ in itertools.islice(stream, count))
