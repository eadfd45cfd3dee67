"""Checks the limit of open files at the start of a job: connections of ranks count as files.

Without the check, a large job would fail in the middle of its start, when a library needs one more
descriptor, with an error that does not name the limit.
"""

from __future__ import annotations

import errno
import math
import os
import resource
from pathlib import Path

from mapsage.base.errors import UserError

# Folder with an entry for each open descriptor of this process.
_OPEN = Path('/proc/self/fd')
# Descriptors for what a run opens later: shards, logs and pipes of loader workers (64), and
# unproved connections in a guard (32, mapsage_launcher/trust/guard.py).
_SPARE = 64 + 32
# Descriptors of a gloo group in addition to one connection to each rank.
_PER_GROUP = 8


class DescriptorLimitError(UserError, RuntimeError):
    """The limit of open files is too low for this number of ranks."""


def check_descriptors(ranks: int, meshes: int, spare: int = _SPARE) -> None:
    """Check that this process may open the descriptors for its connections to other ranks.

    All channels together need ``2 * log2(ranks)`` connections, which are always included.

    Args:
        ranks: Number of ranks.
        meshes: Number of meshes to open. In a mesh, this process connects to every other rank, as
            in a gloo group or an exchange of samples.
        spare: Number of descriptors that must remain for other uses.

    Raises:
        DescriptorLimitError: With the limit, the number needed and the command that raises it.
    """
    if ranks < 2 or not _OPEN.exists():
        return
    needed = (
        len(os.listdir(_OPEN))
        + meshes * (ranks - 1 + _PER_GROUP)
        + 2 * math.ceil(math.log2(ranks))
        + spare
    )
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and needed > soft:
        raise DescriptorLimitError(
            _format_limit(soft, hard, f'{ranks} ranks need {needed}', needed)
        )


def check_limit(error: OSError) -> None:
    """Raise DescriptorLimitError if an operation failed because no descriptor was left."""
    if error.errno in (errno.EMFILE, errno.ENFILE):
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise DescriptorLimitError(_format_limit(soft, hard, 'all are in use', 2 * soft)) from error


def _format_limit(soft: int, hard: int, problem: str, needed: int) -> str:
    hard_limit = 'unlimited' if hard == resource.RLIM_INFINITY else str(hard)
    return (
        f'this process may open {soft} files and connections, and {problem}. Raise the limit '
        f'before the start, on every host: ulimit -n {2 ** math.ceil(math.log2(needed))} '
        f'(the hard limit is {hard_limit}).'
    )
