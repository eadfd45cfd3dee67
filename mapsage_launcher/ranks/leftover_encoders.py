"""Kills encoder ranks that hang after all ranks that train have finished.

An encoder that hangs in a computation, or was stopped by a signal, does not notice that its heads
are gone, and torchrun would wait for it forever. So ranks leave notes in a folder of the launcher:
"I am an encoder", "I have finished". :class:`EncoderWatch` reads them in the launcher.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import List, Set, Tuple

from mapsage_launcher.stop_request import write_note

# How long an encoder may run after its heads have finished, in seconds. It needs less than one
# second, unless it is encoding an item.
PATIENCE = 30.0
_POLL_SECONDS = 1.0
_ENCODERS, _FINISHED = 'encoders', 'finished'


def note_encoder() -> None:
    """Leave a note that this rank is an encoder. Never raises."""
    _note_process(_ENCODERS)


def note_finished() -> None:
    """Leave a note that this rank has finished its work. Never raises."""
    _note_process(_FINISHED)


class EncoderWatch:
    """Watches the ranks of this machine in a thread until it is stopped.

    Nothing is killed on a machine whose ranks all encode, because it cannot know about the heads.

    Args:
        folder: Folder of the launcher's notes.
        ranks: Number of ranks on this machine.
        patience: Seconds for which an encoder may run after all other ranks have finished.

    Attributes:
        ended: Pids of the encoders that were killed.
    """

    def __init__(self, folder: Path, ranks: int, patience: float = PATIENCE) -> None:
        self._folder, self._ranks, self._patience = folder, ranks, patience
        self.ended: List[int] = []
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()

    def _run(self) -> None:
        waited = 0.0
        while not self._stopped.wait(_POLL_SECONDS):
            left = left_over(self._folder, self._ranks)
            waited = waited + _POLL_SECONDS if left else 0.0
            if waited < self._patience:
                continue
            self.ended += left
            for process in left:
                try:
                    os.kill(process, signal.SIGKILL)
                except OSError:
                    # The process has ended by itself.
                    pass
            # The message comes last, because nobody may read stderr any more and the write may
            # fail.
            sys.stderr.write(
                f'\nthe encoder process(es) {left} hung: all ranks that train have finished '
                f'{self._patience:g} s ago. They were ended; the training is complete.\n'
            )
            sys.stderr.flush()
            return


def left_over(folder: Path, ranks: int) -> List[int]:
    """Return the pids of encoders that are running although all other ranks have finished.

    Args:
        folder: Folder of the launcher's notes.
        ranks: Number of ranks on this machine.
    """
    noted, ended = _read_notes(folder / _ENCODERS), _read_notes(folder / _FINISHED)
    # torchrun may have restarted all ranks: notes of an earlier start do not count.
    latest = max((start for start, _ in noted | ended), default=0)
    finished = {process for start, process in ended if start == latest}
    encoders = {
        process
        for start, process in noted
        if start == latest and (process in finished or _is_running(process))
    }
    heads = ranks - len(encoders)
    return sorted(encoders - finished) if encoders and 0 < heads == len(finished - encoders) else []


def _read_notes(folder: Path) -> Set[Tuple[int, int]]:
    """Return the pairs (number of the start, pid) of all notes in a folder."""
    names = (path.name.split('-') for path in folder.glob('*'))
    return {(int(start), int(process)) for start, process in names}


def _is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _note_process(folder: str) -> None:
    start = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    write_note(f'{folder}/{start}-{os.getpid()}')
