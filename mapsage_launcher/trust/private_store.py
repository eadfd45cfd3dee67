"""A rendezvous store that no other user and no other machine can reach.

Torch unpickles the content of a store, so a process that writes into it can run code as the user of
the job. The first choice is a ``FileStore`` on a file without a name, which only processes with its
descriptor can open. If the system does not allow that, it is a ``TCPStore`` on 127.0.0.1, which
other users of the machine can reach. The ranks of a job agree on one in ``job_store.py``.
"""

from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from datetime import timedelta
from typing import TYPE_CHECKING, Sequence, Tuple

from mapsage_launcher.errors import UserError

if TYPE_CHECKING:
    from torch.distributed import TCPStore

RISK = (
    'warning: this job cannot keep its rendezvous store in a private file ({cause}), so it is '
    'at 127.0.0.1:{port}. Other users of this machine can reach it there, and torch unpickles '
    'what is in it: whoever does so can run code as this user. On a shared machine, set TMPDIR '
    'to a folder on a local disk.'
)


class PrivateStoreError(UserError, RuntimeError):
    """A job on one machine cannot make or reach its store.

    Attributes:
        ranks: Ranks that were waited for.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = list(ranks)


def private_file() -> int:
    """Return the descriptor of an empty file that has no name, for :func:`file_path`.

    Raises:
        OSError: If this system has no such file, or it cannot be locked.
    """
    try:
        # Python lacks the function if the system's glibc is too old for it.
        descriptor = os.memfd_create('mapsage-store') if hasattr(os, 'memfd_create') else None
    except OSError:
        descriptor = None
    if descriptor is None:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        # FileStore takes this lock for each request, and a network disk may refuse it.
        with open(file_path(descriptor), 'r+b') as reopened:
            fcntl.flock(reopened.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def file_path(descriptor: int) -> str:
    """Return a path by which this process and its forks open a file that has no name."""
    return f'/proc/self/fd/{descriptor}'


def loopback_store(cause: object, timeout: timedelta) -> Tuple[TCPStore, str]:
    """Return a store that listens on 127.0.0.1, and a warning about the risk with its port.

    Args:
        cause: Reason for which there is no private file.
        timeout: Time that a request may take.

    Raises:
        PrivateStoreError: If torch can only listen on all interfaces.
    """
    # Not at the top of the file, which the launcher loads without torch.
    from torch.distributed import TCPStore

    if 'master_listen_fd' not in (TCPStore.__init__.__doc__ or ''):
        raise PrivateStoreError(
            f'this job cannot keep its rendezvous store in a private file ({cause}), and this '
            f'version of torch can only keep it where all machines reach it. Set TMPDIR to a '
            f'folder on a local disk, and mount /proc.'
        )
    with socket.create_server(('127.0.0.1', 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        store = TCPStore(
            '127.0.0.1',
            port,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=os.dup(listener.fileno()),
        )
    return store, RISK.format(cause=cause, port=port)
