"""The launcher's report after ranks have failed: which rank is the cause, with its error.

The errors that the ranks wrote decide; if they do not, the way in which the ranks ended. The order
in which torchrun notices the ends is not enough: it may see the end of a rank that has lost its
peer before the end of the peer. Ranks write their notes in
`mapsage/distributed/launcher_notes.py`.
"""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

# What a note blames if no rank is to blame for the error, such as a mistake in the config.
NOBODY = 'nobody'
# torchrun kills ranks that have not ended 30 s after its signal. This is somewhat less, because
# torchrun records times in whole seconds.
_SECONDS_UNTIL_KILLED = 25
_BY_LAUNCHER = (-signal.SIGUSR2, -signal.SIGTERM)


class Note(NamedTuple):
    """The note that a rank left when it failed.

    Attributes:
        rank: Global rank that wrote the note.
        blamed: Ranks that were lost or failed, according to the note; empty if the error is this
            rank's.
        blames_nobody: Whether no rank is to blame for the error, including the one that wrote it.
        text: The error.
    """

    rank: int
    blamed: List[int]
    blames_nobody: bool
    text: str


def read_notes(folder: Path) -> List[Note]:
    """Return the notes of the ranks, oldest first; empty if the folder does not exist."""
    notes = []
    for path in sorted(path for path in folder.glob('*-*') if path.is_file()):
        _, rank, *rest = path.name.split('-')
        blamed = rest[0] if rest else ''
        notes.append(
            Note(
                int(rank),
                [int(number) for number in blamed.split(',') if number.isdigit()],
                blamed == NOBODY,
                # A rank that was killed while it wrote may have left half a character.
                path.read_text(encoding='utf-8', errors='replace'),
            )
        )
    return notes


def describe_failure(failed: Any, folder: Path) -> str:
    """Return which rank is the cause of a failure, with the error that says most about it.

    A rank that was killed is the cause of the other ranks' errors, except in three cases:

    - SIGUSR2 (or torchrun's SIGTERM): the launcher ends the other ranks with it.
    - SIGKILL by torchrun, for ranks that do not react. They are named at the end of the report,
      because the other ranks have often waited for a rank that hangs.
    - SIGABRT of a rank that has left an error, or that has waited for another rank: the watchdog of
      a communication backend ends waiting ranks in this way. A rank has waited if some rank hangs,
      or if notes blame other ranks and not this one.

    If no rank was killed, the earliest error decides.

    Args:
        failed: ``ChildFailedError`` of torchrun.
        folder: Folder of the ranks' notes.
    """
    failures = dict(failed.failures)
    ended = failed.get_first_failure()[1].timestamp + _SECONDS_UNTIL_KILLED
    stuck = sorted(
        rank
        for rank, failure in failures.items()
        if failure.exitcode == -signal.SIGKILL and failure.timestamp >= ended
    )
    notes = read_notes(folder)
    text = _report_status(failed, stuck, notes) or _report_notes(notes)
    if stuck:
        text += (
            f'\nrank(s) {stuck} did not end when asked to and were killed: they '
            f'were stopped, or hung in native code or on a device.'
        )
    return f'\nerror: {text}'


def _report_status(failed: Any, stuck: Sequence[int], notes: Sequence[Note]) -> Optional[str]:
    """Return the report of a rank that died and left no note; None if the notes say more."""
    failures: Dict[int, Any] = dict(failed.failures)
    explained = {note.rank for note in notes}
    blamed = {rank for note in notes for rank in note.blamed}

    def has_waited(rank: int) -> bool:
        return bool(stuck) or rank in explained or bool(blamed - {rank}) and rank not in blamed

    killed = [
        rank
        for rank, failure in failures.items()
        if failure.exitcode < 0
        and rank not in stuck
        and failure.exitcode not in _BY_LAUNCHER
        and not (failure.exitcode == -signal.SIGABRT and has_waited(rank))
    ]
    aborted = [rank for rank in killed if failures[rank].exitcode == -signal.SIGABRT]
    alive = sorted(rank for rank, failure in failures.items() if failure.exitcode in _BY_LAUNCHER)
    if aborted and aborted == killed and alive:
        # Nothing tells which of these ranks is the cause.
        return (
            f'rank(s) {sorted(aborted)} aborted while rank(s) {alive} still ran:\n'
            f'{_describe_status(failures[aborted[0]])}'
        )
    if not killed and notes:
        return None
    rank = killed[0] if killed else failed.get_first_failure()[0]
    return f'rank {rank} failed first:\n{_describe_status(failures[rank])}'


def _describe_status(failure: Any) -> str:
    by = failure.signal_name() if failure.exitcode < 0 else ''
    if not by:
        return (
            f'it ended with status {failure.exitcode} and left no error. What it printed is '
            f'above; if that says nothing, its code or a library called exit.'
        )
    text = f'killed by {by}'
    if by == 'SIGKILL':
        text += '. If nobody has sent it, the machine ran out of memory: see `dmesg`.'
    if by == 'SIGABRT':
        text += (
            '. Native code gave up, and what it printed is above. The watchdog of a '
            'communication backend (NCCL, ECCL) does so with a rank that has waited for '
            'another one longer than env_cfg.dist_cfg.timeout.'
        )
    return text


def _report_notes(notes: Sequence[Note]) -> str:
    """Return the report of the earliest note, or of the note by a rank that it blames."""
    first, seen = notes[0], {notes[0].rank}
    by_rank = {note.rank: note for note in reversed(notes)}
    while first.blamed:
        # The note of a missing rank says more than the note about it. A rank that blames the ranks
        # that blame it was only late.
        better = [
            by_rank[rank]
            for rank in first.blamed
            if rank in by_rank and rank not in seen and not seen & set(by_rank[rank].blamed)
        ]
        if not better:
            break
        first = better[0]
        seen.add(first.rank)
    same = sorted({note.rank for note in notes if note.text == first.text})
    if not first.blamed and (first.blames_nobody or len(same) > 1):
        return f'rank(s) {same} report:\n{first.text}'
    if first.blamed and first.blamed != [first.rank]:
        return f'{_lost(first.blamed)}, rank {first.rank} reports:\n{first.text}'
    return f'rank {first.rank} failed first:\n{first.text}'


def _lost(ranks: Sequence[int]) -> str:
    return f'rank(s) {list(ranks)} {"was" if len(ranks) == 1 else "were"} waited for in vain'
