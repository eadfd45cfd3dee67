"""What a rank leaves for its launcher when it fails."""
from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import NoReturn

from mapsage.distributed.channels.channel import RankLostError, error_text
from mapsage.distributed.channels.group_channel import tell_why

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


def end_process(error: RankLostError) -> NoReturn:
    """Report an error from a thread, and end a process whose main thread cannot be interrupted."""
    try:
        note_for_launcher(error_text(error))
        sys.stderr.write(f"[rank {os.environ.get('RANK', '0')}] {error_text(error)}\n")
        sys.stderr.flush()
        tell_why(error)
    finally:
        os._exit(1)


def note_met() -> None:
    """Tell the launcher that the ranks have met the others, and notice by themselves who is lost.
    """
    folder = os.environ.get('MAPSAGE_ERROR_NOTES')
    if folder:
        with contextlib.suppress(OSError):  # it is on another machine, or the disk is full
            Path(folder, MET_FILE).touch()
