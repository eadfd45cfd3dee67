"""An error of its own for a loader's worker that was killed.

torch raises a RuntimeError for it in the main thread, wherever that is. In a collective it would
pass for a failure of the collective, and ranks that wait there would be named for it.
"""
from __future__ import annotations

from multiprocessing.connection import wait
from typing import Any

from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from mapsage.errors import UserError

# How long after a broken connection the end of the worker may be seen, in seconds.
_END_SECONDS = 2.0


class LoaderWorkerError(UserError):
    """A worker of this rank's loader was killed. No RuntimeError, which many places catch."""

    final = False


class WorkerIterator(_MultiProcessingDataLoaderIter):
    """An iterator of torch that says so where a batch breaks off because a worker was killed."""

    @classmethod
    def adopt(cls, iterator: Any) -> Any:
        """Turn an iterator with workers into one of this class, in place; return it."""
        if type(iterator) is _MultiProcessingDataLoaderIter:
            _name_dead_workers()
            iterator.__class__ = cls
        return iterator

    def _try_get_data(self, *args: Any, **options: Any) -> Any:
        try:
            return super()._try_get_data(*args, **options)
        except RuntimeError as error:
            if 'exited unexpectedly' not in str(error):
                raise
            raise _lost_worker(str(error).strip(' .'), True) from error
        except (OSError, EOFError) as error:
            ended = wait([worker.sentinel for worker in self._workers], _END_SECONDS)
            numbers = [worker.pid for worker in self._workers if worker.sentinel in ended]
            if not numbers:
                raise
            raise _lost_worker(f'process {", ".join(map(str, numbers))}', True) from error


def _name_dead_workers() -> None:
    """Let the handler that torch has for the end of its workers raise LoaderWorkerError."""
    if not isinstance(signal_handling._error_if_any_worker_fails, _NamingCheck):
        signal_handling._error_if_any_worker_fails = _NamingCheck(
            signal_handling._error_if_any_worker_fails)


class _NamingCheck:
    """Calls torch's function, which raises a RuntimeError if a worker has failed.

    Args:
        check: That function.
    """

    def __init__(self, check: Any) -> None:
        self._check = check

    def __call__(self) -> None:
        try:
            self._check()
        except RuntimeError as error:
            raise _lost_worker(str(error).strip(' .'), 'Killed' in str(error)) from None


def _lost_worker(what: str, maybe_memory: bool) -> LoaderWorkerError:
    advice = (' If nobody has killed it, the machine may have run out of memory (see `dmesg`, and '
              'take fewer workers, num_workers), or native code of a transform crashed.'
              if maybe_memory else '')
    return LoaderWorkerError(f'a loader worker of this rank has ended: {what}.{advice}')
