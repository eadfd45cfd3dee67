"""A loader that seeds every sample of the user's dataset before it is loaded, and checks it after.

The loader's ``dataset`` remains the user's object: a hook may set attributes on it, and isinstance
must recognize it. Only the loader's iterators, in the main process and in workers, read from
:class:`KeyedDataset` instead. Where the seeds come from is in `data_order.py`.
"""

from __future__ import annotations

import atexit
import copy
import os
import signal
import weakref
from typing import Any, Callable, Hashable, List, Optional, Sequence, Tuple

import numpy as np
import torch
from mmengine.structures import BaseDataElement
from torch.utils.data import DataLoader, get_worker_info

from mapsage.datasets.byte_labels import narrow_labels
from mapsage.datasets.packing import last_packers
from mapsage.distributed import die_with_parent
from mapsage_launcher.stop_request import is_listening, spare_worker

from .data_order import SampleKey, generators_unaffected, seed_sample, without_seed
from .loader_workers import (
    WorkerIterator,
    Workers,
    free_shared_memory,
    name_this_worker,
    note_crowding,
    starting_workers,
    workers_of,
)
from .shared_batches import SharedCollate

_NUMBER = (int, np.integer)
# Raises an error for a bad sample; takes the dataset, the index and the sample.
CheckSample = Callable[[Any, Any, Any], None]
# Returns the error to raise; takes the dataset, the index and the error of loading.
ExplainError = Callable[[Any, Any, Exception], Exception]


class KeyedDataset(torch.utils.data.Dataset):
    """The seeded and checked samples that the iterators of a :class:`KeyedLoader` read.

    Args:
        dataset: Map-style dataset, which may change while this object exists.
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
        show_keys: Like ``keep_keys``, but only for samples that have metainfo. For inspection.
        narrow: Whether label maps reach the loop as uint8, which the model's preprocessor must
            expect.
        loader_name: Name of the loader in messages, such as ``'train_dataloader'``.
        measured: Whether an iterator has compared the size of its batches with shared memory.
    """

    def __init__(self, dataset: Any, check: CheckSample, explain: ExplainError) -> None:
        self.dataset = dataset
        self._check, self._explain = check, explain
        self._tied_to_parent = False
        self.finish: Optional[Callable[[int, Tuple[int, ...], Any], Any]] = None
        self.reseed: Optional[Callable[[int, Tuple[int, ...]], Tuple[int, ...]]] = None
        self.keep_keys = self.show_keys = self.narrow = self.measured = False
        self.loader_name = f'the loader of {type(dataset).__name__}'

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Hashable) -> Any:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Hashable]) -> List[Any]:
        """Return the samples of a batch; torch's loaders call this since 2.0."""
        if get_worker_info() is None:
            # What is drawn later in this process, such as weights, must not follow from a sample.
            with generators_unaffected():
                return [self._load(key) for key in keys]
        if not self._tied_to_parent:
            # torch's workers check only every five seconds whether their rank is alive.
            die_with_parent()
            self._tied_to_parent = True
        return [self._load(key) for key in keys]

    def _load(self, key: Hashable) -> Any:
        index, seed = without_seed(key)
        if (self.finish or self.reseed or self.keep_keys) and not isinstance(index, _NUMBER):
            raise ValueError(
                f'the sampler of the training loader gives {index!r}, expected the number of a '
                f'sample: dynamic sampling and cached features find samples again by number.'
            )
        if self.reseed is not None:
            seed = self.reseed(index, seed)
        if seed:
            seed_sample(seed)
        try:
            sample = self.dataset[index]
        except Exception as error:
            # A transform may raise anything; explain adds the names of the sample's files.
            raise self._explain(self.dataset, index, error) from error
        self._check(self.dataset, index, sample)
        if self.keep_keys or (
            self.show_keys
            and isinstance(sample, dict)
            and isinstance(sample.get('data_samples'), BaseDataElement)
        ):
            sample['data_samples'].set_metainfo(dict(sample_key=(index, tuple(seed))))
        if self.finish is not None:
            sample = self.finish(index, seed, sample)
        return narrow_labels(sample) if self.narrow else sample

    def load(self, index: int, seed: Tuple[int, ...]) -> Any:
        """Return the sample at ``index``, drawn with ``seed``."""
        return self._load(SampleKey(index, tuple(seed)))


class KeyedLoader(DataLoader):
    """A loader whose ``dataset`` is the user's, while its iterators read :attr:`samples`.

    Args:
        loader: Loader of a map-style dataset that MMEngine has built, whose settings it takes over.
        check: As for :class:`KeyedDataset`.
        explain: As for :class:`KeyedDataset`.

    Attributes:
        samples: View of the dataset that seeds and checks; hooks set its attributes.
    """

    samples: KeyedDataset

    def __init__(self, loader: DataLoader, check: CheckSample, explain: ExplainError) -> None:
        # Not DataLoader's __init__, which would make another batch sampler and warn once more.
        vars(self).update(vars(loader))
        self.samples = KeyedDataset(loader.dataset, check, explain)

    def _get_iterator(self) -> Any:
        # torch's iterators copy what they need from a loader when they are built, so they are built
        # from a copy whose dataset is replaced. The copy's __dict__ is set, because DataLoader
        # refuses to assign `dataset`.
        loader = copy.copy(self)
        vars(loader)['dataset'] = self.samples
        if not self.num_workers:
            return super(KeyedLoader, loader)._get_iterator()
        needs = workers_of(self.samples.loader_name, self.num_workers, self.prefetch_factor)
        note_crowding(needs)
        spare = is_listening()
        loader.collate_fn = SharedCollate.around(self.collate_fn)
        shares_batches = isinstance(loader.collate_fn, SharedCollate)
        loader.worker_init_fn = _WorkerInit(self.worker_init_fn, spare, needs, shares_batches)
        free_bytes = None if self.samples.measured else free_shared_memory()
        self.samples.measured = True
        with starting_workers(needs):
            iterator = WorkerIterator(loader, needs, free_bytes)
        if spare:
            workers: List[Any] = iterator._workers
            for worker in workers:
                # When an iterator is deleted, torch terminates a worker that does not end by
                # itself. A spared worker ignores SIGTERM.
                worker.terminate = worker.kill
                _spared_workers.add(worker)
        return iterator


# Workers that ignore SIGTERM. At the end of the interpreter, multiprocessing sends SIGTERM to every
# remaining worker and waits for it without a limit, so they are killed before.
_spared_workers: weakref.WeakSet = weakref.WeakSet()


def _kill_spared_workers() -> None:
    remaining = [
        worker
        for worker in list(_spared_workers)
        if worker._parent_pid == os.getpid() and worker.is_alive()
    ]
    if remaining:
        # torch's handler would raise an error, in any line of code, for a worker that was killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in remaining:
        worker.kill()


# Functions run in reverse order of their registration: this one runs before multiprocessing's,
# which is registered at the import of multiprocessing.
atexit.register(_kill_spared_workers)


class _WorkerInit:
    """Initializes a worker: ``get_worker_info().dataset`` becomes the user's dataset.

    Args:
        user_init: The loader's ``worker_init_fn``.
        spare: Whether signals that ask the rank to stop must not end the worker.
        workers: The loader's workers, which an error of this one names.
        shares_batches: Whether the rank receives the batches as :class:`SharedBatch`.
    """

    def __init__(
        self,
        user_init: Optional[Callable[[int], Any]],
        spare: bool,
        workers: Workers,
        shares_batches: bool,
    ) -> None:
        self._user_init, self._spare, self._workers = user_init, spare, workers
        self._shares_batches = shares_batches

    def __call__(self, worker_id: int) -> None:
        if self._spare:
            spare_worker()
        name_this_worker(self._workers)
        info: Any = get_worker_info()
        samples = info.dataset
        if self._shares_batches and samples.finish is None:
            for packer in last_packers(samples.dataset):
                packer.keeps_bytes = True
        # torch's WorkerInfo refuses a plain assignment.
        object.__setattr__(info, 'dataset', samples.dataset)
        if self._user_init is not None:
            self._user_init(worker_id)
