"""An error of its own for a loader's worker that was killed.

torch raises a RuntimeError for it in the main thread, wherever that is. In a collective it would
pass for a failure of the collective, and ranks that wait there would be named for it.
"""
from __future__ import annotations

from typing import Any

from torch.utils.data._utils import signal_handling

from mapsage.errors import UserError


class LoaderWorkerError(UserError):
    """A worker of this rank's loader was killed. No RuntimeError, which many places catch."""

    final = False


def name_dead_workers() -> None:
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
            advice = ('If nobody has sent it, the machine ran out of memory: see `dmesg`, and take '
                      'fewer workers (num_workers).' if 'Killed' in str(error) else '')
            raise LoaderWorkerError(f'a loader worker of this rank has ended: {str(error).strip()} '
                                    f'{advice}'.strip()) from None
