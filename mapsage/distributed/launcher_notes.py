"""What a rank leaves for its launcher when it fails."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from pathlib import Path
from typing import Any, List, NoReturn, Sequence

from mapsage.base.console import printable
from mapsage.base.errors import UserError
from mapsage.distributed.channels.agreement import RankError
from mapsage.distributed.channels.channel import RankLostError, error_text
from mapsage.distributed.channels.open_channels import tell_why
from mapsage_launcher.rank_notes import FOLDER_VARIABLE
from mapsage_launcher.ranks.failure_report import NOBODY
from mapsage_launcher.stop_request import write_note

_JOINING = 'joining.'  # with the rank: names of the signs of ranks that come to the meeting
_kept: List[int] = []


def keep_descriptor() -> None:
    """Keep a descriptor for the note of this rank, which may fail because it has no other left."""
    if os.environ.get(FOLDER_VARIABLE) and not _kept:
        with contextlib.suppress(OSError):
            _kept.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


def note_for_launcher(text: str, kind: str = '', blamed: Sequence[Any] = ()) -> None:
    """Write down why this rank failed, for mapsage_launcher/ranks/failure_report.py.

    Args:
        text: Words for the error.
        kind: ``FINAL_FILE`` if it would come again were the ranks started anew, ``BROKEN_FILE`` if
            the devices of this machine are at fault.
        blamed: Ranks that the error blames, see :func:`blamed_ranks`.
    """
    while _kept:
        os.close(_kept.pop())
    name = f'{time.time_ns()}-{os.environ.get("RANK", "0")}-{",".join(map(str, blamed[:32]))}'
    # Where the note cannot be written, stderr has the error as well.
    if write_note(name, printable(text)) and kind:
        write_note(kind)


def blamed_ranks(error: BaseException) -> Sequence[Any]:
    """Return the ranks that an error blames.

    Empty for an error of this rank, and ``[NOBODY]`` for one that every rank raises.
    """
    if isinstance(error, RankError):
        return [error.rank]
    if isinstance(error, RankLostError):
        return error.ranks or [NOBODY]
    if not isinstance(error, UserError):
        return []
    return [NOBODY] if error.on_every_rank else list(error.ranks)


def end_process(error: RankLostError) -> NoReturn:
    """Report an error from a thread, and end a process whose main thread cannot be interrupted."""
    try:
        note_for_launcher(error_text(error), blamed=blamed_ranks(error))
        sys.stderr.write(f'[rank {os.environ.get("RANK", "0")}] {error_text(error)}\n')
        sys.stderr.flush()
        tell_why(error)
    finally:
        os._exit(1)


def note_joining() -> None:
    """Leave a sign that this rank comes to the meeting of all ranks."""
    write_note(f'{_JOINING}{os.environ.get("RANK", "0")}')


def absent_ranks() -> List[int]:
    """Return the ranks of this machine that have not come to the meeting of all ranks.

    Empty if all have, and where the launcher's folder or the ranks of the machine are not known.
    """
    folder, environ = Path(os.environ.get(FOLDER_VARIABLE, '')), os.environ
    names = ('RANK', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE')
    if not (
        folder.is_dir()
        and (folder / f'{_JOINING}{environ.get("RANK")}').exists()
        and all(environ.get(name, '').isdigit() for name in names)
    ):
        return []
    first = int(environ['RANK']) - int(environ['LOCAL_RANK'])
    return [
        rank
        for rank in range(first, first + int(environ['LOCAL_WORLD_SIZE']))
        if not (folder / f'{_JOINING}{rank}').exists()
    ]
