"""What a rank leaves for its launcher when it fails."""
from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

from .elastic import MET_FILE


def note_for_launcher(text: str, kind: str = '') -> None:
    """Write down why this rank failed; tools/launch.py prints the earliest such note at its end.

    Args:
        text: Words for the error.
        kind: ``FINAL_FILE`` if it would come again were the ranks started anew, ``BROKEN_FILE`` if
            the devices of this machine are at fault.
    """
    folder = os.environ.get('MAPSAGE_ERROR_NOTES')
    if not folder:
        return
    name = f"{time.time_ns()}-{os.environ.get('RANK', '0')}"
    try:
        Path(folder, name).write_text(text, encoding='utf-8')
        if kind:
            Path(folder, kind).touch()
    except OSError:  # the disk is full, or the launcher has gone: stderr has the error as well
        pass


def note_met() -> None:
    """Tell the launcher that the ranks have met the others, and notice by themselves who is lost.
    """
    folder = os.environ.get('MAPSAGE_ERROR_NOTES')
    if folder:
        with contextlib.suppress(OSError):  # it is on another machine, or the disk is full
            Path(folder, MET_FILE).touch()
