"""Tells hooks that a training or test ends, however it does."""
from __future__ import annotations

from contextlib import contextmanager
from typing import Any, Iterator, Optional

from mapsage.distributed import error_text


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
        for hook in runner._hooks:
            if hasattr(hook, 'end_run'):
                try:
                    hook.end_run(runner, error)
                except Exception as failure:  # such as that it is another method of a user's hook
                    runner.logger.warning(
                        f'{type(hook).__name__}.end_run: {error_text(failure)}')
