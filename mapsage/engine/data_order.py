"""Data order and augmentation as pure functions of the seed, so that a resumed run is exact.

Every sample is drawn under a random state derived from ``(seed, epoch, global position)``, where
the global position counts samples over all ranks. What a sample looks like then depends neither on
the number of workers nor on the number of ranks nor on where the run was interrupted, and nothing
but the iteration number has to be saved.
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
    """Wraps one rank's sampler: its indices become :class:`SampleKey`, and it can skip.

    MMEngine's samplers give rank ``r`` the positions ``r, r + world_size, ...`` of one global
    order, so position ``i`` on rank ``r`` is global position ``i * world_size + r``.

    Args:
        sampler: The sampler of this rank, endless or not.
        seed: The seed of the run (>= 0); one of the sampler's own takes precedence.
        rank: This rank.
        world_size: The number of ranks.
        batch_size: Samples a batch on this rank.
        drop_last: Whether the loader drops an incomplete last batch.
    """

    def __init__(self, sampler: Sampler, seed: int, rank: int, world_size: int, batch_size: int,
                 drop_last: bool = False) -> None:
        self.sampler = sampler
        own = getattr(sampler, 'seed', None)
        self._seed = int(seed if own is None else own)
        self._rank, self._world_size = rank, world_size
        self._batch_size, self._drop_last = batch_size, drop_last
        self._epoch = self._epoch_offset = 0
        self._skip_batches = 0

    def __len__(self) -> int:
        return len(self.sampler)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == 'sampler':  # not yet set while unpickling
            raise AttributeError(name)
        return getattr(self.sampler, name)

    def set_epoch(self, epoch: int) -> None:
        """Start the order of ``epoch``, counted from where :meth:`skip` ended."""
        self._epoch = epoch + self._epoch_offset
        if hasattr(self.sampler, 'set_epoch'):
            self.sampler.set_epoch(self._epoch)

    def skip(self, num_samples: int) -> None:
        """Leave out the first ``num_samples`` (whole batches) of the run at the next iteration.

        Only indices are drawn, no data is loaded. The name and meaning are those that
        onedl-mmengine's loop looks for.
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
            epoch = self._epoch - self._epoch_offset  # as the loop counts
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
    """Stands in for a dataset in the loader: seeds each sample and explains its errors.

    Anything else is asked of the dataset behind it.

    Args:
        dataset: A map-style dataset.
        check: Called with ``(dataset, index, sample)`` on every sample; raises on a bad one.
        explain: Called with ``(dataset, index, error)`` when loading fails; returns the error to
            raise.

    Attributes:
        finish: Called with ``(index, seed, sample)`` on every sample, in the worker that loaded it;
            what it returns takes the sample's place. None for no such call.
        reseed: Called with ``(index, seed)`` before a sample is loaded; what it returns is the
            sample's seed, for ``finish`` too. The seed is ``()`` where the sampler gave none. None
            for no such call.
        keep_keys: Whether ``(index, seed)`` goes into the metainfo of each sample's
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
        if name in ('dataset', '__getitems__'):  # batched access would pass by __getitem__
            raise AttributeError(name)
        return getattr(self.dataset, name)

    def __getitem__(self, key: int) -> Any:
        if not self._tied_to_parent and torch.utils.data.get_worker_info() is not None:
            # torch's workers look every five seconds whether their rank is alive
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
        except Exception as error:  # any transform may fail in any way; facts are added
            raise self._explain(self.dataset, index, error) from error
        self._check(self.dataset, index, sample)
        if self.keep_keys:
            sample['data_samples'].set_metainfo(dict(sample_key=(index, tuple(seed or ()))))
        return sample if self.finish is None else self.finish(index, seed or (), sample)

    def load(self, index: int, seed: Tuple[int, ...]) -> Any:
        """Return the sample at ``index`` as it was drawn from ``seed``."""
        return self[SampleKey(index, tuple(seed))]
