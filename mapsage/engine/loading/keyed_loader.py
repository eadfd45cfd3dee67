"""A loader that reads each sample of the user's dataset under its seed, and checks it."""
from __future__ import annotations

import atexit
import copy
import os
import signal
import weakref
from typing import Any, Callable, Optional, Tuple

import numpy as np
import torch
from torch.utils.data import DataLoader, get_worker_info

from mapsage.distributed import die_with_parent
from mapsage_launcher.stop_request import is_listening, spare_worker

from .data_order import SampleKey, seed_sample, without_seed
from .loader_workers import WorkerIterator

_NUMBER = (int, np.integer)


class KeyedDataset(torch.utils.data.Dataset):
    """What the iterators of a :class:`KeyedLoader` read: samples that are seeded and checked.

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
        show_keys: Whether to do so for somebody who looks at samples, where they have metainfo.
    """

    def __init__(self, dataset: Any, check: Any, explain: Any) -> None:
        self.dataset = dataset
        self._check, self._explain = check, explain
        self._tied_to_parent = False
        self.finish: Optional[Callable[[int, Tuple[int, ...], Any], Any]] = None
        self.reseed: Optional[Callable[[int, Tuple[int, ...]], Tuple[int, ...]]] = None
        self.keep_keys = self.show_keys = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, key: Any) -> Any:
        if not self._tied_to_parent and get_worker_info() is not None:
            # torch's own workers check only every five seconds whether their rank is alive.
            die_with_parent()
            self._tied_to_parent = True
        index, seed = without_seed(key)
        if (self.finish or self.reseed or self.keep_keys) and not isinstance(index, _NUMBER):
            raise ValueError(
                f'the sampler of the training loader gives {index!r}, expected the number of a '
                f'sample: dynamic sampling and cached features find samples again by number.')
        if self.reseed is not None:
            seed = self.reseed(index, seed)
        if seed:
            seed_sample(seed)
        try:
            sample = self.dataset[index]
        except Exception as error:  # any transform may fail; explain adds the names of the files
            raise self._explain(self.dataset, index, error) from error
        self._check(self.dataset, index, sample)
        if self.keep_keys or (self.show_keys and _has_metainfo(sample)):
            sample['data_samples'].set_metainfo(dict(sample_key=(index, tuple(seed))))
        return sample if self.finish is None else self.finish(index, seed, sample)

    def load(self, index: int, seed: Tuple[int, ...]) -> Any:
        """Return the sample at ``index``, drawn with ``seed``."""
        return self[SampleKey(index, tuple(seed))]


def _has_metainfo(sample: Any) -> bool:
    return isinstance(sample, dict) and hasattr(sample.get('data_samples'), 'set_metainfo')


class KeyedLoader(DataLoader):
    """A loader whose ``dataset`` is the user's, while its iterators read :attr:`samples`.

    A proxy in place of the dataset would lose what a hook sets on it, and isinstance would not
    know it.

    Attributes:
        samples: View of the dataset that seeds and checks; hooks set its attributes.
    """

    samples: KeyedDataset

    @classmethod
    def adopt(cls, loader: DataLoader, check: Any, explain: Any) -> KeyedLoader:
        """Turn a loader that MMEngine has built into one of this class, in place.

        Args:
            loader: Loader of a map-style dataset.
            check: As for :class:`KeyedDataset`.
            explain: As for :class:`KeyedDataset`.
        """
        loader.__class__ = cls
        assert isinstance(loader, cls)
        loader.samples = KeyedDataset(loader.dataset, check, explain)
        return loader

    def _get_iterator(self) -> Any:
        # torch's iterators take all they need from a loader when they are built. DataLoader
        # refuses the assignment of ``dataset``, which would be too late in a loader with iterators.
        read = copy.copy(self)
        vars(read)['dataset'] = self.samples
        spare = is_listening()
        read.worker_init_fn = _WorkerInit(self.worker_init_fn, spare)
        iterator = WorkerIterator.adopt(super(KeyedLoader, read)._get_iterator())
        if spare:
            for worker in getattr(iterator, '_workers', ()):
                # torch calls it for a worker that does not end by itself when its iterator goes
                worker.terminate = worker.kill
                _spared.add(worker)
        return iterator


# Workers that outlive one SIGTERM. At the end of the interpreter multiprocessing sends one to each
# that is left, and waits for it without a limit.
_spared: weakref.WeakSet = weakref.WeakSet()


def _end_spared() -> None:
    left = [worker for worker in list(_spared)
            if worker._parent_pid == os.getpid() and worker.is_alive()]
    if left:  # torch raises an error, anywhere, for a worker that was killed
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in left:
        worker.kill()


atexit.register(_end_spared)  # runs before multiprocessing's, which is registered at its import


class _WorkerInit:
    """Shows the user's dataset to what runs in a worker: ``get_worker_info().dataset``.

    Args:
        users: The loader's own ``worker_init_fn``.
        spare: Whether signals that ask the rank to stop must not end the worker.
    """

    def __init__(self, users: Optional[Callable[[int], Any]], spare: bool) -> None:
        self._users, self._spare = users, spare

    def __call__(self, worker_id: int) -> None:
        if self._spare:
            spare_worker()
        info: Any = get_worker_info()
        object.__setattr__(info, 'dataset', info.dataset.dataset)  # the object refuses a plain one
        if self._users is not None:
            self._users(worker_id)
