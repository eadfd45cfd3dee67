"""Writes a checkpoint file so that a crash, a power failure or a full disk keeps the previous one.

The bytes go to a file ``<path>.<8 hex digits>.partial``, are synced to the disk, and only then take
the final name. A partial file is locked while it is written: this is how :func:`remove_leftovers`
tells the leftovers of a killed process from a file that another run is still writing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from io import FileIO
from pathlib import Path
from typing import IO, List, Optional, Set, Tuple, Union

import torch

from mapsage.base.errors import UserError
from mapsage.base.file_locks import close_in_forks, lock
from mapsage.base.files import describe_room, megabytes
from mapsage.engine.checkpoints.writer_lease import check_writer

_PARTIAL = re.compile(r'\.[0-9a-f]{8}\.partial$')
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Files that this process is writing.
_open_partials: Set[IO] = set()
close_in_forks(_open_partials)


class SaveError(UserError, OSError):
    """A checkpoint could not be written; earlier checkpoints are kept."""


def write_checkpoint(checkpoint: object, path: str) -> int:
    """Write a checkpoint, which takes the name ``path`` once it is on the disk.

    Until then the file is called ``<path>.<8 hex digits>.partial``, so two runs in one folder never
    write into the same file.

    Args:
        checkpoint: Object for ``torch.save``.
        path: File to write. A missing folder is created.

    Returns:
        The size of the file in bytes.

    Raises:
        SaveError: If the file system refuses the file; for a full disk, with sizes. The partial
            file is removed and ``path`` is unchanged.
        SupersededError: If the job continues without this process; ``path`` is unchanged.
    """
    folder = os.path.dirname(path) or '.'
    partial, size = '', 0
    try:
        os.makedirs(folder, exist_ok=True)
        raw, partial = _create_partial(path)
        try:
            file = _ErrorKeepingFile(raw)
            torch.save(checkpoint, file)  # type: ignore[arg-type]
            size = file.size
            if file.error is not None:
                raise file.error
            os.fsync(raw.fileno())
        finally:
            raw.close()
            _open_partials.discard(raw)
        check_writer()
        os.replace(partial, path)
        sync_folder(folder)
    except OSError as error:
        raise _explain(error, path, folder, partial, size) from error
    finally:
        # Without an error the file has its final name, and this fails silently.
        with contextlib.suppress(OSError):
            os.remove(partial)
    return size


def sync_folder(folder: str) -> None:
    """Make the names of the files in ``folder`` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # EINVAL: the file system cannot sync folders.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(handle)


def remove_leftovers(folder: str) -> List[str]:
    """Remove the partial files that killed processes left in ``folder``; return their paths.

    A file that a process is still writing is locked and stays. On a file system without locks all
    partial files stay.
    """
    removed = []
    for path in Path(folder).glob('*.partial'):
        if not _PARTIAL.search(path.name):
            continue
        with contextlib.suppress(OSError):
            # NFS grants an exclusive lock only on a file that is open for writing.
            with open(path, 'r+b') as file:
                if lock(file):
                    path.unlink()
                    removed.append(str(path))
    return removed


class _ErrorKeepingFile:
    """A file for ``torch.save`` whose writes never raise: it keeps the first error instead.

    The archive writer of torch 1.10 ends the process if a write fails. The one of torch 2 replaces
    the error by ``enforce fail at inline_container.cc``, which does not say what went wrong.

    Attributes:
        size: Bytes that were written, or would have been without the error.
        error: Error of the first write that failed.
    """

    def __init__(self, raw: FileIO) -> None:
        self._raw = raw
        self.size = 0
        self.error: Optional[OSError] = None

    def write(self, data: Union[bytes, bytearray, memoryview]) -> int:
        length = len(memoryview(data).cast('B'))
        left = memoryview(data).cast('B')
        self.size += length
        try:
            while len(left) and self.error is None:
                # One system call writes at most 2 GiB.
                left = left[self._raw.write(left) :]
        except OSError as error:
            self.error = error
        return length

    def flush(self) -> None:
        """Do nothing: the file has no buffer."""


def _create_partial(path: str) -> Tuple[FileIO, str]:
    """Return a new partial file, locked, and its path."""
    while True:
        partial = f'{path}.{uuid.uuid4().hex[:8]}.partial'
        raw = open(partial, 'xb', buffering=0)
        _open_partials.add(raw)
        locked = lock(raw)
        # The file system may have no locks.
        if locked is None or (locked and os.path.exists(partial)):
            return raw, partial
        # Another process took the file for a leftover before it was locked.
        raw.close()
        _open_partials.discard(raw)


def _explain(error: OSError, path: str, folder: str, partial: str, size: int) -> SaveError:
    """Return the error of a write with the next step for the user."""
    text = f'the checkpoint {path} was not written: {error}.'
    if error.errno in _DISK_FULL:
        room, written = 'its room is unknown', 0
        # The message must not fail because the sizes cannot be read.
        with contextlib.suppress(OSError):
            written = os.path.getsize(partial)
        with contextlib.suppress(OSError):
            room = describe_room(folder, error, written)
        # Without a size, the file could not even be made.
        needs = f'it needs {megabytes(size)}, and ' if size else ''
        cause = ', since the disk is full' * (error.errno == errno.ENOSPC)
        text = (
            f'the checkpoint {path} was not written{cause}: {needs}{room} '
            f'({os.strerror(error.errno)}).'
        )
    return SaveError(
        f'{text} Earlier checkpoints are kept. Make room there, or give CheckpointHook '
        f'another out_dir or max_keep_ckpts, and continue with --resume.'
    )
