"""Data order and augmentation as pure functions of the seed, so that a resumed run is exact.

Every sample is drawn with a random state derived from ``(seed, epoch, global position)``, where the
global position counts samples over all ranks. A sample therefore looks the same for any number of
workers and ranks, and wherever the run was interrupted. Only the iteration number has to be saved.
"""
from __future__ import annotations

import itertools
import random
from typing import Any, Callable, Iterator, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import Sampler

from mapsage.accelerator import derived_seed
from mapsage.distributed import die_with_parent


class SampleKey(int):
    """A dataset index that carries the seed of its sample to the loader's worker."""

    seed: Tuple[int, ...]

    def __new__(cls, index: int, seed: Tuple[int, ...]) -> SampleKey:  # noqa: D102
        key = super().__new__(cls, index)
        key.seed = seed
        return key

    def __reduce__(self) -> Tuple[Any, ...]:
        return SampleKey, (int(self), self.seed)


def seed_sample(entropy: Tuple[int, ...]) -> None:
    """Seed Python's, NumPy's and torch's CPU generators, which data transforms draw from."""
    seed = derived_seed(*entropy)
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)


class ResumableSampler(Sampler):
    """Wraps one rank's sampler: its indices become :class:`SampleKey`, and it can skip samples.

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
        self.sampler = sampler
        sampler_seed = getattr(sampler, 'seed', None)
        self._seed = int(seed if sampler_seed is None else sampler_seed)
        self._rank, self._world_size = rank, world_size
        self._batch_size, self._drop_last = batch_size, drop_last
        self._epoch = self._epoch_offset = 0
        self._skip_batches = 0

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == 'sampler':  # while this object is unpickled, it is not set yet
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def set_epoch(self, epoch: int) -> None:
        """Start the order of ``epoch``; epochs that :meth:`skip` has left out are added."""
        self._epoch = epoch + self._epoch_offset
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(self._epoch)

    def skip(self, num_samples: int) -> None:
        """Leave out the first ``num_samples`` samples of the run when iteration starts next.

        Only indices are drawn; no data is loaded. The loop of onedl-mmengine looks for a method
        with this name and meaning.

        Args:
            num_samples: Number of samples on this rank, a multiple of the batch size.
        """
        self._skip_batches = num_samples // self._batch_size

    def __iter__(self) -> Iterator[SampleKey]:
        batches, self._skip_batches = self._skip_batches, 0
        stream = iter(self.sampler)
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
            self.set_epoch(epoch)
            stream, position = iter(self.sampler), 0
        for index in stream:
            yield SampleKey(index, (self._seed, self._epoch,
                                    position * self._world_size + self._rank))
            position += 1

    def _batches_in(self, num_samples: int) -> int:
        whole, rest = divmod(num_samples, self._batch_size)
        return whole + (1 if rest and not self._drop_last else 0)


def _advance(stream: Iterator[Any], count: int) -> int:
    """Draw up to ``count`` items; return how many there were."""
    return sum(1 for _ in itertools.islice(stream, count))


class KeyedDataset(torch.utils.data.Dataset):
    """Takes the place of a dataset in the loader: seeds each sample and explains its errors.

    All other attributes are those of the wrapped dataset.

    Args:
        dataset: Map-style dataset to wrap.
        check: Function called with ``(dataset, index, sample)`` for every sample; it raises an
            error for a bad one.
        explain: Function called with ``(dataset, index, error)`` if loading fails; it returns the
            error to raise.

    Attributes:
        finish: Function called with ``(index, seed, sample)`` for every sample, in the worker that
            has loaded it; its result replaces the sample. None for no such call.
        reseed: Function called with ``(index, seed)`` before a sample is loaded; its result is the
            sample's seed, also for ``finish``. The seed passed to it is ``()`` if the sampler gave
            none. None for no such call.
        keep_keys: Whether ``(index, seed)`` is written into the metainfo of each sample's
            ``data_samples``, as ``sample_key``.
    """

    def __init__(self, dataset: Any, check: Any, explain: Any) -> None:
        self.dataset = dataset
        self._check, self._explain = check, explain
        self._tied_to_parent = False
        self.finish: Optional[Callable[[int, Tuple[int, ...], Any], Any]] = None
        self.reseed: Optional[Callable[[int, Tuple[int, ...]], Tuple[int, ...]]] = None
        self.keep_keys = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getattr__(self, name: str) -> Any:
        if name in ('dataset', '__getitems__'):  # batched access would bypass __getitem__
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, key: int) -> Any:
        if not self._tied_to_parent and torch.utils.data.get_worker_info() is not None:
            # torch's own workers check only every five seconds whether their rank is alive.
            die_with_parent()
            self._tied_to_parent = True
        seed: Optional[Tuple[int, ...]] = getattr(key, 'seed', None)
        index = int(key)
        if self.reseed is not None:
            seed = self.reseed(index, seed or ())
        if seed is not None:
            seed_sample(seed)
        try:
            sample = self.dataset[index]
        except Exception as error:  # any transform may fail; explain adds the names of the files
            raise self._explain(self.dataset, index, error) from error
        self._check(self.dataset, index, sample)
        if self.keep_keys:
            sample['data_samples'].set_metainfo(dict(sample_key=(index, tuple(seed or ()))))
        return sample if self.finish is None else self.finish(index, seed or (), sample)

    def load(self, index: int, seed: Tuple[int, ...]) -> Any:
        """Return the sample at ``index``, drawn with ``seed``."""
        return self[SampleKey(index, tuple(seed))]
