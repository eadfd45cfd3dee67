"""Ends encoder ranks that hang when all ranks that train have finished.

An encoder that hangs in a computation, or was stopped, does not notice that its heads have gone,
and torchrun would wait for it forever. Ranks write into a folder of the launcher what they are and
that they have finished; the launcher looks there.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import List, Set, Tuple

# How long an encoder may go on once its heads have finished, in seconds. It needs less than one,
# unless it is in the middle of an item.
PATIENCE = 30.0
_POLL_SECONDS = 1.0
_FOLDER = 'MAPSAGE_ERROR_NOTES'  # of the launcher
_ENCODERS, _FINISHED = 'encoders', 'finished'


def note_encoder() -> None:
    """Write down that this rank is an encoder. Never raises."""
    _note(_ENCODERS)


def note_finished() -> None:
    """Write down that this rank has finished its work. Never raises."""
    _note(_FINISHED)


class EncoderWatch:
    """Watches the ranks of this machine in a thread until it is stopped.

    A machine whose ranks all encode is left alone: it cannot know about the heads.

    Args:
        folder: Folder of the launcher's notes.
        ranks: Number of ranks on this machine.
        patience: Seconds for which an encoder may go on once all others have finished.

    Attributes:
        ended: Process numbers of the encoders that were killed.
    """

    def __init__(self, folder: Path, ranks: int, patience: float = PATIENCE) -> None:
        self._folder, self._ranks, self._patience = folder, ranks, patience
        self.ended: List[int] = []
        self._stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def stop(self) -> None:
        """Stop to watch."""
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
                except OSError:  # it has ended
                    pass
            sys.stderr.write(  # last, since nobody may read it any more
                f'\nthe encoder process(es) {left} hung: all ranks that train have finished '
                f'{self._patience:g} s ago. They were ended; the training is complete.\n')
            sys.stderr.flush()
            return


def left_over(folder: Path, ranks: int) -> List[int]:
    """Return the process numbers of encoders that run although all other ranks have finished.

    Args:
        folder: Folder of the launcher's notes.
        ranks: Number of ranks on this machine.
    """
    noted, ended = _notes(folder / _ENCODERS), _notes(folder / _FINISHED)
    # torchrun may have started all ranks again: those of an earlier start do not count.
    latest = max((start for start, _ in noted | ended), default=0)
    finished = {process for start, process in ended if start == latest}
    encoders = {process for start, process in noted
                if start == latest and (process in finished or _runs(process))}
    heads = ranks - len(encoders)
    return (sorted(encoders - finished)
            if encoders and 0 < heads == len(finished - encoders) else [])


def _notes(folder: Path) -> Set[Tuple[int, int]]:
    """Return the numbers of start and process of all notes in a folder."""
    found = (path.name.split('-') for path in folder.glob('*'))
    return {(int(start), int(process)) for start, process in found}


def _runs(process: int) -> bool:
    try:
        os.kill(process, 0)
    except OSError:
        return False
    return True


def _note(name: str) -> None:
    folder = os.environ.get(_FOLDER)
    if not folder:
        return
    try:
        place = Path(folder, name)
        place.mkdir(exist_ok=True)
        start = os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
        (place / f'{start}-{os.getpid()}').touch()
    except OSError:  # the disk is full, or the launcher has gone
        pass
