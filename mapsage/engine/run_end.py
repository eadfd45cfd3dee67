"""The end of a training, validation or test: hooks hear of it, and an error names lost ranks.

``end_run`` is a method of :class:`mapsage.host.hook.MapSageHook`, not of MMEngine's hooks.
"""
from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator, Optional

from mapsage.distributed import error_text, lost_ranks_named
from mapsage.host.hook import mapsage_hooks
from mapsage.host.runner import MapSageRun


@contextmanager
def end_reported(runner: MapSageRun, task: str) -> Iterator[None]:
    """Name the ranks that are lost in the block, and call ``end_run(runner, error)`` after it.

    ``error`` is what the block raised, or None. Ranks do not wait for each other there, so the
    method must not enter a collective. What it raises becomes a warning in the log.

    Args:
        runner: The runner, whose instances of MapSageHook are called.
        task: Name of what the block does, for the error about lost ranks, such as ``'training'``.
    """
    error: Optional[BaseException] = None
    try:
        with lost_ranks_named(task):
            yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        for hook in mapsage_hooks(runner._hooks):
            try:
                hook.end_run(runner, error)
            # A user's subclass may raise anything, and the run has ended already.
            except Exception as failure:
                runner.logger.warning(f'{hook.name_in_messages}.end_run: {error_text(failure)}')
