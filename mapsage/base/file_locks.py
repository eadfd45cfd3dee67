"""Locks on open files, which the kernel releases when a process ends, even if it is killed.

They work between the processes of one machine, and between machines over NFS (Linux 2.6.12 and
later) and SMB. Some file systems (FUSE, Lustre) have none.
"""

from __future__ import annotations

import fcntl
import os
from typing import IO, Optional, Set, Union


def lock(file: Union[int, IO], shared: bool = False, wait: bool = False) -> Optional[bool]:
    """Lock an open file until it is closed; NFS wants it open for writing if not shared.

    A forked process has the lock too, and keeps it: see :func:`close_in_forks` and :func:`unlock`.

    Args:
        file: The file, or its descriptor.
        shared: Whether several processes may have such a lock.
        wait: Whether to wait until no other process has the lock.

    Returns:
        Whether this process has the lock; None if the file system has no locks.
    """
    try:
        fcntl.flock(
            file,
            (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | (0 if wait else fcntl.LOCK_NB),
        )
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def unlock(file: Union[int, IO]) -> None:
    """Release the lock of a file, also for the processes that were forked since."""
    fcntl.flock(file, fcntl.LOCK_UN)


def close_in_forks(files: Set[IO]) -> None:
    """Close the files of a set in every process that is forked from now on.

    Otherwise a loader's worker would keep a lock after its parent was killed, and the disk space of
    a file that was removed.
    """

    def close() -> None:
        for file in files:
            file.close()
        files.clear()

    os.register_at_fork(after_in_child=close)
