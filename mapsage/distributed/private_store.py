"""A rendezvous store that no other user and no other machine can reach.

Torch unpickles what is in a store, so whoever writes into it runs code as the user of the job. The
first choice is a ``FileStore`` on a file without a name, which only holders of its descriptor can
open. Where that cannot be had, it is a ``TCPStore`` on 127.0.0.1, which other users of the machine
reach. The ranks of a job agree on one in ``job_store.py``.

This file imports only the standard library, since tools/launch.py loads it by its path.
"""
from __future__ import annotations

import fcntl
import os
import socket
import tempfile
from datetime import timedelta
from typing import Any, Sequence, Tuple

if __package__:
    from mapsage.errors import UserError
else:
    # The launcher loads this file by its path: it prints the errors itself, and importing mapsage
    # would take seconds.
    UserError = type('UserError', (Exception,), {})  # type: ignore[misc,assignment]

RISK = ('warning: this job cannot keep its rendezvous store in a private file ({cause}), so it is '
        'at 127.0.0.1:{port}. Other users of this machine can reach it there, and torch unpickles '
        'what is in it: whoever does so can run code as this user. On a shared machine, set TMPDIR '
        'to a folder on a local disk.')


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
        # glibc of old systems lacks the call, and Python the function then
        descriptor = os.memfd_create('mapsage-store') if hasattr(os, 'memfd_create') else None
    except OSError:
        descriptor = None
    if descriptor is None:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        # As FileStore does before each request. A network disk may refuse it.
        with open(file_path(descriptor), 'r+b') as again:
            fcntl.flock(again.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def file_path(descriptor: int) -> str:
    """Return a path by which this process and its forks open a file that has no name."""
    return f'/proc/self/fd/{descriptor}'


def loopback_store(cause: object, timeout: timedelta) -> Tuple[Any, str]:
    """Return a store that listens on 127.0.0.1, and a line about the risk, which has the port.

    Args:
        cause: Why there is no private file.
        timeout: Time that a request may take.

    Raises:
        PrivateStoreError: If torch can only listen on all interfaces.
    """
    from torch.distributed import TCPStore
    if 'master_listen_fd' not in (TCPStore.__init__.__doc__ or ''):
        raise PrivateStoreError(
            f'this job cannot keep its rendezvous store in a private file ({cause}), and this '
            f'version of torch can only keep it where all machines reach it. Set TMPDIR to a '
            f'folder on a local disk, and mount /proc.')
    with socket.create_server(('127.0.0.1', 0), backlog=1024) as listener:
        port = listener.getsockname()[1]
        store = TCPStore('127.0.0.1', port, is_master=True, timeout=timeout,
                         wait_for_workers=False, master_listen_fd=os.dup(listener.fileno()))
    return store, RISK.format(cause=cause, port=port)
