"""Workers of a loader: what they need of the machine, and distinct errors when one of them fails.

A worker hands its batches over in shared memory, which is small in a container. If a batch cannot
be handed over, torch prints a traceback in the worker, and the rank waits for the batch for ever.
If a worker is killed, torch raises a RuntimeError in the main thread, wherever that thread is then.
Inside of a collective the error would pass for a failure of the collective, and the report would
name ranks that only wait there. So this module replaces torch's handling of both: the rank raises a
:class:`BatchTransferError` or a :class:`LoaderWorkerError`.
"""

from __future__ import annotations

import errno
import logging
import math
import multiprocessing.queues
import os
import re
import shutil
import signal
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import wait
from typing import Any, Callable, Dict, Iterator, NamedTuple, Optional, Set, Tuple
from weakref import WeakSet

import torch
from mmengine.dist import is_main_process
from mmengine.logging import MMLogger, print_log
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mapsage.base.errors import UserError
from mapsage.base.files import megabytes
from mapsage.datasets.byte_labels import widen_batch
from mapsage.distributed import error_text
from mapsage.distributed.nested_tensors import tensors_in

from .shared_batches import SharedBatch

# How long after a broken connection the end of the worker may be noticed, in seconds.
_END_SECONDS = 2.0
# Settings that torch refuses for a loader without workers.
_WORKER_SETTINGS = ('persistent_workers', 'prefetch_factor', 'timeout', 'multiprocessing_context')
# Both sharing strategies of torch.multiprocessing put tensors there.
_SHARED_MEMORY = '/dev/shm'
# What torch 1.10 to 2.13 say if shared memory has no room for a tensor.
_NO_ROOM = re.compile(r'unable to (allocate shared memory|write to file </torch_)')
# More workers than this for each core are likely to be a mistake.
_WORKERS_PER_CORE = 4


class LoaderWorkerError(UserError):
    """A worker of this rank's loader was killed.

    Not a RuntimeError, because code around collectives catches RuntimeErrors.
    """

    final = False


class BatchTransferError(UserError):
    """A worker of this rank's loader could not hand over a batch."""


class Workers(NamedTuple):
    """The workers of one loader on this machine.

    Attributes:
        loader: Name of the loader in messages, such as ``'train_dataloader'``.
        per_rank: Number of workers of a rank.
        prefetch: Number of batches that a worker loads ahead.
        ranks: Number of ranks on this machine.
    """

    loader: str
    per_rank: int
    prefetch: int
    ranks: int

    def shared_bytes(self, batch_bytes: int) -> int:
        """Return the most bytes of shared memory that the batches of all ranks take at once.

        A worker keeps its blocks: one for each batch ahead, and one for the batch in the loop.
        """
        return batch_bytes * self.per_rank * (self.prefetch + 1) * self.ranks

    def crowding_note(self, cores: int) -> Optional[str]:
        """Return a warning if there are far more workers than processor cores, or None."""
        total = self.per_rank * self.ranks
        if total <= _WORKERS_PER_CORE * cores:
            return None
        return (
            f'{self.loader}: num_workers={self.per_rank} for each of {self.ranks} rank(s) on '
            f'this machine starts {total} processes, and {cores} core(s) share the work: the '
            f'first step waits until all have started. As many workers as cores keep a machine '
            f'busy, which are {max(1, cores // self.ranks)} for each rank.'
        )

    def memory_note(self, batch_bytes: int, free: int) -> Optional[str]:
        """Return a warning if the batches may not fit into shared memory, or None.

        Args:
            batch_bytes: Size of a batch in shared memory.
            free: Bytes that were free there before the workers started.
        """
        needed = self.shared_bytes(batch_bytes)
        if needed <= free:
            return None
        return (
            f'{self.loader}: {self._describe(batch_bytes)}, and {megabytes(free)} were free '
            f'there. If it is full, the run ends. {_advice(needed)}'
        )

    def failure(self, reason: str, batch_bytes: Optional[int]) -> str:
        """Return the message about a batch that could not be handed over.

        Args:
            reason: Text of the error that prevented it.
            batch_bytes: Size of the batch in shared memory; None if it is not known.
        """
        head = f'{self.loader}: a worker cannot hand over its batch: {reason}.'
        if _NO_ROOM.search(reason):
            needs = '' if batch_bytes is None else f'{self._describe(batch_bytes)}, and '
            return (
                f'{head} {_SHARED_MEMORY} (shm) is full: {needs}{_state_of_shared_memory()}. '
                f'{_advice(self.shared_bytes(batch_bytes or 0))}'
            )
        if 'open files' in reason:
            return f'{head} Raise the limit (`ulimit -n 65536`), or lower num_workers.'
        return (
            f'{head} Batches travel by pickle and shared memory: look at what the dataset, its '
            f'transforms and collate_fn return, or set num_workers=0.'
        )

    def _describe(self, batch_bytes: int) -> str:
        return (
            f'the batches need up to {megabytes(self.shared_bytes(batch_bytes))} in '
            f'{_SHARED_MEMORY} ({megabytes(batch_bytes)} x {self.per_rank} workers x '
            f'(prefetch_factor {self.prefetch} + 1) x {self.ranks} rank(s) on this machine)'
        )


def workers_of(loader: str, per_rank: int, prefetch: Optional[int]) -> Workers:
    """Return the workers of a loader of this rank, and of the like on the other ranks here."""
    return Workers(loader, per_rank, prefetch or 2, int(os.environ.get('LOCAL_WORLD_SIZE', 1)))


def drop_worker_settings(config: Dict[str, Any]) -> None:
    """Remove settings that need workers from the config of a loader without workers, and say so.

    ``num_workers=0`` is the usual override for debugging, and torch refuses it together with them.
    """
    if config.get('num_workers', 0) != 0:
        return
    ignored = [name for name in _WORKER_SETTINGS if config.pop(name, None)]
    if ignored:
        _warn_once(
            f'num_workers=0: {" and ".join(ignored)} of the loader(s) without workers '
            f'{"is" if len(ignored) == 1 else "are"} ignored.'
        )


def note_crowding(workers: Workers) -> None:
    """Warn in the log of the main process if a loader has far more workers than cores."""
    affinity = getattr(os, 'sched_getaffinity', None)
    note = workers.crowding_note(len(affinity(0)) if affinity else os.cpu_count() or 1)
    if note:
        _warn_once(note)


# Names of loggers, of which every run has one, with the warnings that they have printed.
_warnings: Set[Tuple[str, str]] = set()


def _warn_once(text: str) -> None:
    """Log a warning on the main process, once in a run."""
    key = (MMLogger.get_current_instance().instance_name, text)
    if key not in _warnings and is_main_process():
        _warnings.add(key)
        print_log(text, logger='current', level=logging.WARNING)


@contextmanager
def starting_workers(workers: Workers) -> Iterator[None]:
    """Start workers in the block, which needs room for their semaphores in shared memory.

    Raises:
        BatchTransferError: If there is none.
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise BatchTransferError(
            f'{workers.loader}: its workers cannot start: {error}. {_SHARED_MEMORY} (shm) is full: '
            f'{_state_of_shared_memory()}. {_advice()}'
        ) from error


def shared_bytes(batch: object) -> int:
    """Return the bytes that the tensors of a batch take in shared memory, in nested containers."""
    storages = {}
    for tensor in tensors_in(batch):
        if tensor.layout == torch.strided:
            # A view takes its whole storage along. PyTorch 1.10 has no untyped storage.
            storage: Any = (
                tensor.untyped_storage() if hasattr(tensor, 'untyped_storage') else tensor.storage()
            )
            storages[storage.data_ptr()] = len(storage) * storage.element_size()
    return sum(storages.values())


def free_shared_memory() -> Optional[int]:
    """Return the free bytes of shared memory; None if the machine has none."""
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    # No Linux, or a container without it.
    except OSError:
        return None


def _state_of_shared_memory() -> str:
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError as error:
        return str(error)
    return f'it has {megabytes(usage.total)}, of which {megabytes(usage.free)} are free now'


def _advice(needed: int = 0) -> str:
    size = f'{math.ceil(1.5 * needed / 2**30) or 8}g'
    return (
        f'Make it larger: `docker run --shm-size={size}` or `--ipc=host`, in Kubernetes an '
        f'emptyDir with `medium: Memory` at {_SHARED_MEMORY}, elsewhere `mount -o '
        f'remount,size={size} {_SHARED_MEMORY}`. Or lower num_workers or prefetch_factor.'
    )


# Set in a worker.
_workers_of_this_process: Optional[Workers] = None
_QUEUE: Any = multiprocessing.queues.Queue
_print_error = _QUEUE._on_queue_feeder_error


def name_this_worker(workers: Workers) -> None:
    """Let the messages of this process, which is a worker, name its loader."""
    global _workers_of_this_process
    _workers_of_this_process = workers


def _send_error(queue: Any, error: Exception, item: Any) -> None:
    """Send an error to the rank in place of a batch that cannot be sent.

    multiprocessing calls it in the thread that sends the items of a queue.

    Args:
        queue: The queue.
        error: What was raised while the item was pickled or sent.
        item: In a worker, the number of the batch, and the batch.
    """
    info: Any = get_worker_info()
    if info is None or not (isinstance(item, tuple) and len(item) == 2):
        _print_error(error, item)
        return
    number, batch = item
    # A loader that is not a KeyedLoader may still read the samples of one.
    workers = _workers_of_this_process or workers_of(
        getattr(info.dataset, 'loader_name', f'the loader of {type(info.dataset).__name__}'),
        info.num_workers,
        None,
    )
    try:
        size = shared_bytes(batch)
    # A user's container may raise anything, and the error must arrive all the same.
    except Exception:
        size = None
    reason = error_text(error)
    # The class of an error that a transform raised may be unknown to pickle.
    if isinstance(batch, ExceptionWrapper):
        reason += f', of an error: {str(batch.exc_msg).strip()}'
    failure = BatchTransferError(workers.failure(reason, size))
    queue.put(
        (
            number,
            ExceptionWrapper(
                (type(failure), failure, error.__traceback__),
                f'in DataLoader worker process {info.id}',
            ),
        )
    )


# Workers are forks, or import this module when they read their dataset.
_QUEUE._on_queue_feeder_error = _send_error


class WorkerIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator, which raises LoaderWorkerError if a killed worker cuts off a batch.

    It measures its first batch, and warns if the batches may not fit into shared memory.

    Args:
        loader: Loader with workers.
        workers: Workers of the loader.
        free: Bytes of shared memory that are free before they start; None if a batch of the loader
            was measured before.
    """

    def __init__(self, loader: DataLoader, workers: Workers, free: Optional[int]) -> None:
        self._workers_of_loader, self._free_bytes = workers, free
        loader.check_worker_number_rationality()
        super().__init__(loader)
        # torch's signal handler for the end of its workers calls it.
        check = signal_handling._error_if_any_worker_fails
        if not isinstance(check, partial):
            signal_handling._error_if_any_worker_fails = partial(_check_workers, check)
        _iterators.add(self)

    def __next__(self) -> Any:
        try:
            batch = super().__next__()
        except BatchTransferError:
            # PyTorch before 2.10 may end another worker for the same reason a moment later.
            self._forget_worker_pids()
            raise
        # From torch's collate functions, which allocate the batch in shared memory.
        except RuntimeError as error:
            reason = str(error).strip().rsplit('\n', 1)[-1].strip(' .')
            if not _NO_ROOM.search(reason):
                raise
            self._forget_worker_pids()
            raise BatchTransferError(self._workers_of_loader.failure(reason, None)) from error
        is_shared = isinstance(batch, SharedBatch)
        if self._free_bytes is not None:
            size = batch.memory.numel() if is_shared else shared_bytes(batch)
            note = self._workers_of_loader.memory_note(size, self._free_bytes)
            self._free_bytes = None
            if note:
                _warn_once(note)
        if not is_shared:
            return batch
        batch = batch.unpack()
        samples: Any = self._dataset
        if not samples.narrow:
            widen_batch(batch)
        return batch

    def _try_get_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super()._try_get_data(*args, **options)
        except RuntimeError as error:
            if 'exited unexpectedly' not in str(error):
                raise
            self._forget_worker_pids()
            signals = (
                ' (Bus error)'
                if any(worker.exitcode == -signal.SIGBUS for worker in self._workers)
                else ''
            )
            raise _lost_worker(str(error).strip(' .') + signals, True) from error
        except (OSError, EOFError) as error:
            ended = wait([worker.sentinel for worker in self._workers], _END_SECONDS)
            numbers = [worker.pid for worker in self._workers if worker.sentinel in ended]
            if not numbers:
                raise
            self._forget_worker_pids()
            raise _lost_worker(f'process {", ".join(map(str, numbers))}', True) from error

    def _forget_worker_pids(self) -> None:
        """Make torch's signal handler ignore the workers from now on.

        A worker closes its connections before its parent gets SIGCHLD. Without this the handler
        could raise a second error, wherever the main thread handles the first one.
        """
        if self._worker_pids_set:
            signal_handling._remove_worker_pids(id(self))
            self._worker_pids_set = False


_iterators: WeakSet = WeakSet()


def _check_workers(check: Callable[[], None]) -> None:
    """Call torch's check and turn its error, that a worker has failed, into a LoaderWorkerError."""
    try:
        check()
    except RuntimeError as error:
        raise _lost_worker(str(error).strip(' .'), 'Killed' in str(error)) from None


def _lost_worker(reason: str, maybe_memory: bool) -> LoaderWorkerError:
    advice = ''
    # PyTorch before 2.10 allocates shared memory that does not exist; the first use ends a worker.
    if 'Bus error' in reason:
        advice = (
            f' {_SHARED_MEMORY} (shm), through which workers hand over their batches, is '
            f'full: {_state_of_shared_memory()}. {_advice()}'
        )
    elif maybe_memory:
        advice = (
            ' If nobody has killed it, the machine may have run out of memory (see `dmesg`, '
            'and take fewer workers, num_workers), or native code of a transform crashed.'
        )
    # torch's signal handler knows nothing but the numbers of the processes.
    numbers = {int(digits) for digits in re.findall(r'\d+', reason)}
    loaders = sorted(
        {
            iterator._workers_of_loader.loader
            for iterator in _iterators
            if not numbers.isdisjoint(worker.pid for worker in iterator._workers)
        }
    )
    return LoaderWorkerError(
        f'a loader worker of this rank has ended: {reason} ({", ".join(loaders)}).{advice}'
    )
