"""Saves that go on while the training does, one at a time."""
from __future__ import annotations

import os
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field
from typing import Any, Callable, List, Optional, Tuple

from mapsage.atomic_write import atomic_write
from mapsage.background_worker import BackgroundWorker
from mapsage.distributed.nodes.writer_lease import check_writer

from .files import SaveError, remove_leftovers, sync_folder, write_checkpoint
from .host_copy import HostCopies


@dataclass
class Save:
    """What is to be done on the disk for one save, in this order.

    Attributes:
        files: Copies of checkpoints, with their paths.
        pointers: Small files that name a checkpoint, with their contents.
        removals: Calls that remove what makes way.
        afterwards: Calls once all of that is done.
    """

    files: List[Tuple[Any, str]] = field(default_factory=list)
    pointers: List[Tuple[str, str]] = field(default_factory=list)
    removals: List[Callable[[], Any]] = field(default_factory=list)
    afterwards: List[Callable[[], Any]] = field(default_factory=list)

    def carry_out(self) -> None:
        """Write and remove.

        Raises:
            SaveError: If a file cannot be written. What comes after it is left undone.
            SupersededError: If the job has gone on without this process, likewise.
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
        raise SaveError(f'{path} was not written: {error}. The checkpoint {text}, which it was to '
                        f'name, is whole. Go on with --resume once the folder can be '
                        f'written.') from error


class BackgroundSaves:
    """The saves of a run, carried out in a thread. At most one is under way.

    Attributes:
        copies: Host memory for the checkpoints of the save that is under way.
    """

    def __init__(self) -> None:
        self.copies = HostCopies()
        self._worker = BackgroundWorker('checkpoints')
        self._save: Optional[Save] = None
        self._future: Optional[Future] = None
        self._cleared: List[str] = []
        self._late = False  # a wait for the save under way was in vain

    def begin(self, save: Save) -> None:
        """Let the thread carry out ``save``; the one before must have been waited for."""
        assert self._future is None
        self._save, self._future = save, self._worker.submit(self._carry_out, save)

    def raise_error(self) -> None:
        """Raise what ended the save under way, if something has. Never waits."""
        if self._future is not None and self._future.done():
            self.wait(0)

    def wait(self, timeout: float) -> None:
        """Wait until nothing is under way.

        Args:
            timeout: Longest wait, in seconds. A save that was not done then is not waited for
                again: the ranks are about to end because of it.

        Raises:
            SaveError: If the save failed, or is not done yet. That it failed is raised once.
        """
        if self._future is None or self._save is None:
            return
        if not wait_for([self._future], 0 if self._late else timeout).done:
            self._late = True
            paths = ', '.join(path for _, path in self._save.files)
            raise SaveError(
                f'the disk has not taken {paths} within {timeout:g} s. Look whether its folder '
                f'answers (a network disk?). The checkpoints before it are kept.')
        error = self._future.exception()
        self._forget()
        if error is not None:
            raise error

    def clear_leftovers(self, path: str) -> None:
        """Remove what a killed process left in the folder of ``path``, before the first save."""
        folder = os.path.dirname(path) or '.'
        if folder not in self._cleared:
            self._cleared.append(folder)
            remove_leftovers(folder)

    def close(self) -> None:
        """Give the memory back, and end the thread as soon as nothing is under way."""
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
