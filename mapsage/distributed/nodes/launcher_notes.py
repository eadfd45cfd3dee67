"""What a rank leaves for its launcher when it fails."""
from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any, List, NoReturn, Sequence

from mapsage.distributed.channels.agreement import RankError
from mapsage.distributed.channels.channel import RankLostError, error_text
from mapsage.distributed.channels.group_channel import tell_why

from .elastic import MET_FILE

_kept: List[int] = []


def keep_descriptor() -> None:
    """Keep a descriptor for the note of this rank, which may fail because it has no other left."""
    if os.environ.get('MAPSAGE_ERROR_NOTES') and not _kept:
        with contextlib.suppress(OSError):
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def note_for_launcher(text: str, kind: str = '', blamed: Sequence[Any] = ()) -> None:
    """Write down why this rank failed, for mapsage/engine/ranks/failure_report.py.

    Args:
        text: Words for the error.
        kind: ``FINAL_FILE`` if it would come again were the ranks started anew, ``BROKEN_FILE`` if
            the devices of this machine are at fault.
        blamed: Ranks that the error blames; ``[EVERY_RANK]`` for one that every rank raises alike.
    """
    folder = os.environ.get('MAPSAGE_ERROR_NOTES')
    if not folder:
        return
    while _kept:
        os.close(_kept.pop())
    name = f"{time.time_ns()}-{os.environ.get('RANK', '0')}-{','.join(map(str, blamed))}"
    try:
        Path(folder, name).write_text(text, encoding='utf-8')
        if kind:
            Path(folder, kind).touch()
    except OSError:  # the disk is full, or the launcher has gone: stderr has the error as well
        pass


def blamed_ranks(error: BaseException) -> List[int]:
    """Return the ranks that an error says were lost or failed; empty if it is this rank's own."""
    if isinstance(error, RankError):
        return [error.rank]
    return error.ranks if isinstance(error, RankLostError) else []


def end_process(error: RankLostError) -> NoReturn:
    """Report an error from a thread, and end a process whose main thread cannot be interrupted."""
    try:
        note_for_launcher(error_text(error), blamed=error.ranks)
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
