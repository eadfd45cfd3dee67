"""Writes a checkpoint so that a crash, a power failure or a full disk leaves the one before."""
from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import shutil
import uuid
from pathlib import Path
from typing import Any, List, Set, Tuple

import torch

from mapsage.distributed.nodes.writer_lease import check_writer
from mapsage.errors import UserError

_PARTIAL = re.compile(r'\.[0-9a-f]{8}\.partial$')
_FULL = (errno.ENOSPC, errno.EDQUOT)
_being_written: Set[Any] = set()  # files of this process


class SaveError(UserError, OSError):
    """A checkpoint could not be written; those before it are kept."""


def write_checkpoint(checkpoint: Any, path: str) -> int:
    """Write a checkpoint that takes the place of ``path`` once it is on the disk.

    Until then the file has a name of its own, ``<path>.<8 hex digits>.partial``, so that two runs
    in one folder do not write into one file. It is locked while it is written, by which
    :func:`remove_leftovers` tells it from one that a killed process left.

    Args:
        checkpoint: What ``torch.save`` takes.
        path: File to write. Its folder is made if it is missing.

    Returns:
        The size of the file in bytes.

    Raises:
        SaveError: If the file system refuses it; with sizes if it is full. The partial file is
            removed and ``path`` is as it was.
        SupersededError: If the job has gone on without this process; nothing is changed then.
    """
    folder = os.path.dirname(path) or '.'
    partial, size = '', 0
    try:
        os.makedirs(folder, exist_ok=True)
        raw, partial = _create(path)
        try:
            file: Any = _ErrorsKept(raw)
            torch.save(checkpoint, file)
            size = file.size
            if file.error is not None:
                raise file.error
            os.fsync(raw.fileno())
        finally:
            raw.close()
            _being_written.discard(raw)
        check_writer()
        os.replace(partial, path)
        sync_folder(folder)
    except OSError as error:
        raise _explained(error, path, folder, partial, size) from error
    finally:
        with contextlib.suppress(OSError):
            os.remove(partial)  # after an error; otherwise it has its name
    return size


def sync_folder(folder: str) -> None:
    """Let the names of the files in ``folder`` survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno != errno.EINVAL:  # a file system that has no such thing
            raise
    finally:
        os.close(handle)


def remove_leftovers(folder: str) -> List[str]:
    """Remove the partial files of processes that were killed while they wrote; return their paths.

    A file that any process still writes is locked and stays, and so does every file where the file
    system has no locks.
    """
    removed = []
    for path in Path(folder).glob('*.partial'):
        if not _PARTIAL.search(path.name):
            continue
        with contextlib.suppress(OSError):
            # NFS gives an exclusive lock to those alone who may write.
            with open(path, 'r+b') as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                removed.append(str(path))
    return removed


class _ErrorsKept:
    """A file for ``torch.save`` whose writes never fail: the first error is kept.

    The archive writer of torch 1.10 ends the process if a write fails, and that of torch 2 replaces
    the error by ``enforce fail at inline_container.cc``, which does not say what went wrong.

    Attributes:
        size: Bytes that the whole file has, or would have.
        error: What the first write that failed raised.
    """

    def __init__(self, raw: Any) -> None:
        self._raw = raw
        self.size = 0
        self.error: Any = None

    def write(self, data: Any) -> int:
        left = memoryview(data).cast('B')
        self.size += len(left)
        try:
            while len(left) and self.error is None:
                left = left[self._raw.write(left):]  # one call writes 2 GiB at most
        except OSError as error:
            self.error = error
        return len(memoryview(data).cast('B'))

    def flush(self) -> None:
        """Do nothing: the file has no buffer."""


def _create(path: str) -> Tuple[Any, str]:
    """Return a new partial file, locked, and its path."""
    while True:
        partial = f'{path}.{uuid.uuid4().hex[:8]}.partial'
        raw: Any = open(partial, 'xb', buffering=0)
        _being_written.add(raw)
        try:
            fcntl.flock(raw, fcntl.LOCK_EX | fcntl.LOCK_NB)
            ours = os.path.exists(partial)
        except BlockingIOError:
            ours = False
        except OSError:  # a file system without locks
            ours = True
        if ours:
            return raw, partial
        # Before it was locked, another process took it for a leftover.
        raw.close()
        _being_written.discard(raw)


def _let_go() -> None:
    """Close what the parent of this process writes.

    A loader's worker, forked meanwhile, would keep the lock when its parent is killed, and the room
    of the file on the disk once that is removed.
    """
    for file in _being_written:
        file.close()
    _being_written.clear()


os.register_at_fork(after_in_child=_let_go)


def _explained(error: OSError, path: str, folder: str, partial: str, size: int) -> SaveError:
    """Return the error with what to do about it."""
    text = f'the checkpoint {path} was not written: {error}.'
    if error.errno in _FULL:
        free = 0
        with contextlib.suppress(OSError):  # the report must get out
            free = shutil.disk_usage(folder).free
            free += os.path.getsize(partial)
        text = (f'the checkpoint {path} was not written, since the disk is full: it needs '
                f'{_megabytes(size)}, and {_megabytes(free)} are free in {folder} '
                f'({os.strerror(error.errno)}).')
    return SaveError(
        f'{text} The checkpoints before it are kept. Make room there, or give CheckpointHook '
        f'another out_dir or max_keep_ckpts, and go on with --resume.')


def _megabytes(size: int) -> str:
    return f'{size / 1e6:,.1f} MB'
