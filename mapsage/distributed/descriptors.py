"""How many files and connections a process may have open, checked before they are needed."""
from __future__ import annotations

import errno
import math
import os
import resource
from pathlib import Path

from mapsage.errors import UserError

_OPEN = Path('/proc/self/fd')
# For what a run opens later beside connections to ranks: shards, logs, pipes of loader workers, and
# the connections of strangers that a guard holds for a moment (trust/guard.py).
_SPARE = 64 + 32
_PER_GROUP = 8  # of gloo, beside one connection to each rank


class DescriptorLimitError(UserError, RuntimeError):
    """The limit of open files is too low for this number of ranks."""


def check_descriptors(ranks: int, meshes: int, spare: int = _SPARE) -> None:
    """Check that this process may open what its connections to the other ranks need.

    Args:
        ranks: Number of ranks.
        meshes: How often this process will connect to every other rank, as a gloo group does and
            an exchange of samples may do. The channels beside these need ``2 * log2(ranks)``
            connections together.
        spare: Number of files and connections that must be left.

    Raises:
        DescriptorLimitError: With the limit, the number needed and the command that raises it.
    """
    if ranks < 2 or not _OPEN.exists():
        return
    needed = (len(os.listdir(_OPEN)) + meshes * (ranks - 1 + _PER_GROUP)
              + 2 * math.ceil(math.log2(ranks)) + spare)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and needed > soft:
        raise DescriptorLimitError(_text(soft, hard, f'{ranks} ranks need {needed}', needed))


def check_limit(error: OSError) -> None:
    """Raise DescriptorLimitError if an operation failed since no descriptor was left."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise DescriptorLimitError(_text(soft, hard, 'all are in use', 2 * soft)) from error


def _text(soft: int, hard: int, why: str, needed: int) -> str:
    most = 'unlimited' if hard == resource.RLIM_INFINITY else str(hard)
    return (f'this process may open {soft} files and connections, and {why}. Raise the limit '
            f'before the start, on every host: ulimit -n {2 ** math.ceil(math.log2(needed))} '
            f'(the hard limit is {most}).')
