"""Tells hooks that a training or test ends, however it does."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Optional

from mapsage.distributed import error_text
from mapsage.hooks.base import mapsage_hooks


@contextmanager
def end_told(runner: Any) -> Iterator[None]:
    """Call ``end_run(runner, error)`` of the hooks that have it, behind the block.

    ``error`` is what the block raised, or None. Ranks do not wait for each other there, so the
    method may enter no collective. What it raises is a warning in the log.
    """
    error: Optional[BaseException] = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        for hook in mapsage_hooks(runner._hooks):
            try:
                hook.end_run(runner, error)
            except Exception as failure:  # a user's hook may have another method of this name
                runner.logger.warning(
                    f'{hook.name}.end_run: {error_text(failure)}')
