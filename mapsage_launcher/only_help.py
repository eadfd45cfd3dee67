"""Whether this process only prints the help of a program, which needs no package but Python's."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Iterator

_only_help = False


@contextmanager
def only_help() -> Iterator[None]:
    """Let the package ``mapsage`` import nothing in the block, see :func:`is_only_help`."""
    global _only_help
    _only_help = True
    try:
        yield
    finally:
        _only_help = False


def is_only_help() -> bool:
    """Return whether this process only prints the help of a program."""
    return _only_help
