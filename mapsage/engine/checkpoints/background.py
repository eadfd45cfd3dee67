"""Checkpoints that a thread writes while the training continues, one save at a time.

A save is first collected as a :class:`Save`, which lists everything that has to happen on the disk
in a fixed order: files, pointers, removals. The tensors of its checkpoints were copied to host
memory before (`host_copy.py`), so the next training steps cannot change what is written.
`saving.py` decides when a save begins and who waits for it.
"""

from __future__ import annotations

import os
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Callable, List, Mapping, Optional, Tuple

from mapsage.base.files import atomic_write
from mapsage.base.process import BackgroundWorker
from mapsage.engine.checkpoints.writer_lease import check_writer

from .files import SaveError, remove_leftovers, sync_folder, write_checkpoint
from .host_copy import HostCopies


@dataclass
class Save:
    """The disk operations of one save, in the order in which they are carried out.

    Attributes:
        files: Pairs of a checkpoint's copy and the path to write it to.
        pointers: Pairs of a path and a text, for small files that name a checkpoint.
        removals: Calls that remove the files which the new checkpoints replace.
        afterwards: Calls that follow when everything above is done.
    """

    files: List[Tuple[Mapping[str, object], str]] = field(default_factory=list)
    pointers: List[Tuple[str, str]] = field(default_factory=list)
    removals: List[Callable[[], object]] = field(default_factory=list)
    afterwards: List[Callable[[], object]] = field(default_factory=list)

    def carry_out(self) -> None:
        """Carry out all operations.

        Raises:
            SaveError: If a file cannot be written. The operations that follow are left out.
            SupersededError: If the job continues without this process. The operations that follow
                are left out.
        """
        for checkpoint, path in self.files:
            write_checkpoint(checkpoint, path)
        for path, text in self.pointers:
            check_writer()
            _write_pointer(path, text)
        for remove in self.removals:
            check_writer()
            remove()
        for call in self.afterwards:
            call()


def _write_pointer(path: str, text: str) -> None:
    try:
        atomic_write(path, text.encode(), durable=True)
        sync_folder(os.path.dirname(path) or '.')
    except OSError as error:
        raise SaveError(
            f'{path} was not written: {error}. The checkpoint {text}, which it should '
            f'name, is whole. Continue with --resume once the folder can be '
            f'written.'
        ) from error


class BackgroundSaves:
    """Carries out the saves of a run in a thread. At most one save is pending.

    Attributes:
        copies: Host memory for the checkpoints of the pending save.
    """

    def __init__(self) -> None:
        self.copies = HostCopies()
        self._worker = BackgroundWorker('checkpoints')
        self._save: Optional[Save] = None
        self._future: Optional[Future] = None
        self._cleared_folders: List[str] = []
        # Whether a wait for the pending save has already timed out.
        self._late = False

    def begin(self, save: Save) -> None:
        """Let the thread carry out ``save``. Call :meth:`wait` for the previous save first."""
        assert self._future is None
        self._save, self._future = save, self._worker.submit(self._carry_out, save)

    def raise_error(self) -> None:
        """Raise the error of the pending save if it has failed. Never waits."""
        if self._future is not None and self._future.done():
            self.wait(0)

    def wait(self, timeout: float) -> None:
        """Wait until no save is pending.

        Args:
            timeout: Longest wait, in seconds. After one timeout, later calls do not wait for the
                same save: the ranks are about to end because of it.

        Raises:
            SaveError: If the save has failed (raised once), or is still pending.
        """
        if self._future is None or self._save is None:
            return
        if not wait_for([self._future], 0 if self._late else timeout).done:
            self._late = True
            paths = ', '.join(path for _, path in self._save.files)
            raise SaveError(
                f'the disk has not taken {paths} within {timeout:g} s. Check whether the folder '
                f'responds (a network disk?). Earlier checkpoints are kept.'
            )
        error = self._future.exception()
        self._forget()
        if error is not None:
            raise error

    def clear_leftovers(self, path: str) -> None:
        """Remove what killed processes left in the folder of ``path``, once per folder."""
        folder = os.path.dirname(path) or '.'
        if folder not in self._cleared_folders:
            self._cleared_folders.append(folder)
            remove_leftovers(folder)

    def close(self) -> None:
        """Free the host memory, and end the thread as soon as no save is pending."""
        if self._future is None:
            self.copies.clear()
        self._worker.close(timeout=0)

    def _forget(self) -> None:
        self._save, self._future, self._late = None, None, False
        self.copies.release()

    def _carry_out(self, save: Save) -> None:
        for _, path in save.files:
            self.clear_leftovers(path)
        save.carry_out()
