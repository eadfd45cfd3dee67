"""A distinct error for a loader's worker that was killed.

torch raises a RuntimeError for it in the main thread, wherever that thread is at the moment. Inside
of a collective the error would pass for a failure of the collective, and the report would name
ranks that only wait there. So this module replaces torch's check by one that raises
:class:`LoaderWorkerError`.
"""
from __future__ import annotations

from multiprocessing.connection import wait
from typing import Any, Callable, Iterator

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mapsage.errors import UserError

# How long after a broken connection the end of the worker may be noticed, in seconds.
_END_SECONDS = 2.0


class LoaderWorkerError(UserError):
    """A worker of this rank's loader was killed.

    Not a RuntimeError, because code around collectives catches RuntimeErrors.
    """

    final = False


class WorkerIterator(_MultiProcessingDataLoaderIter):
    """torch's iterator, which raises LoaderWorkerError if a killed worker cuts off a batch."""

    @classmethod
    def adopt(cls, iterator: Iterator[Any]) -> Iterator[Any]:
        """Turn an iterator with workers into an instance of this class, in place; return it."""
        if type(iterator) is _MultiProcessingDataLoaderIter:
            _replace_worker_check()
            iterator.__class__ = cls
        return iterator

    def _try_get_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super()._try_get_data(*args, **options)
        except RuntimeError as error:
            if 'exited unexpectedly' not in str(error):
                raise
            self._forget_worker_pids()
            raise _lost_worker(str(error).strip(' .'), True) from error
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


def _replace_worker_check() -> None:
    """Let torch's signal handler for the end of its workers raise LoaderWorkerError."""
    if not isinstance(signal_handling._error_if_any_worker_fails, _WorkerCheck):
        signal_handling._error_if_any_worker_fails = _WorkerCheck(
            signal_handling._error_if_any_worker_fails)


class _WorkerCheck:
    """Calls torch's check and turns its error into a LoaderWorkerError.

    Args:
        check: torch's function, which raises a RuntimeError if a worker has failed.
    """

    def __init__(self, check: Callable[[], None]) -> None:
        self._check = check

    def __call__(self) -> None:
        try:
            self._check()
        except RuntimeError as error:
            raise _lost_worker(str(error).strip(' .'), 'Killed' in str(error)) from None


def _lost_worker(reason: str, maybe_memory: bool) -> LoaderWorkerError:
    advice = (' If nobody has killed it, the machine may have run out of memory (see `dmesg`, and '
              'take fewer workers, num_workers), or native code of a transform crashed.'
              if maybe_memory else '')
    return LoaderWorkerError(f'a loader worker of this rank has ended: {reason}.{advice}')
