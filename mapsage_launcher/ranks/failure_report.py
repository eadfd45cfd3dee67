"""Who is the cause where ranks have failed: what tools/launch.py prints at its end.

What the ranks wrote decides, and then how they ended: torchrun may notice the end of a rank that
has lost its peer before the end of the peer. """
from __future__ import annotations

import signal
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

# What a note blames for an error that no rank is to blame for, such as that of a config.
NOBODY = 'nobody'
# torchrun waits 30 s for ranks to end on its signal, then it kills them. This is somewhat less,
# since it notes the times in whole seconds.
_SECONDS_UNTIL_KILLED = 25
_BY_LAUNCHER = (-signal.SIGUSR2, -signal.SIGTERM)


class Note(NamedTuple):
    """What a rank left when it failed.

    Attributes:
        rank: Global rank that wrote it.
        blamed: Ranks that it says were lost or failed; empty for an error of its own.
        blames_nobody: Whether no rank is to blame for the error, this one included.
        text: The error.
    """

    rank: int
    blamed: List[int]
    blames_nobody: bool
    text: str


def read_notes(folder: Path) -> List[Note]:
    """Return the notes of the ranks, in the order of their times; none if the folder is gone."""
    notes = []
    for path in sorted(path for path in folder.glob('*-*') if path.is_file()):
        _, rank, *rest = path.name.split('-')
        blamed = rest[0] if rest else ''
        notes.append(Note(
            int(rank), [int(number) for number in blamed.split(',') if number.isdigit()],
            blamed == NOBODY,
            # a rank that was killed while it wrote may have cut a character
            path.read_text(encoding='utf-8', errors='replace')))
    return notes


def describe_failure(failed: Any, folder: Path) -> str:
    """Return who is the cause of a failure, with the error that says most about it.

    A rank that was killed is the cause of the other ranks' errors. Three ways to be killed are no
    cause: SIGUSR2, with which the other ranks are ended (SIGTERM where torchrun does it);
    torchrun's SIGKILL for those that do not react, which are named at the end, because a rank that
    hangs is often what the others have waited for; and SIGABRT of a rank that has left an error, or
    beside such a hung rank, or beside one that others have waited for, since the watchdog of a
    communication backend ends a rank in this way that has waited for another one. If no rank was
    killed, the earliest error decides.

    Args:
        failed: ``ChildFailedError`` of torchrun.
        folder: Folder of the ranks' notes.
    """
    failures = dict(failed.failures)
    ended = failed.get_first_failure()[1].timestamp + _SECONDS_UNTIL_KILLED
    stuck = sorted(rank for rank, failure in failures.items()
                   if failure.exitcode == -signal.SIGKILL and failure.timestamp >= ended)
    notes = read_notes(folder)
    text = _report_status(failed, stuck, notes) or _report_notes(notes)
    if stuck:
        text += (f'\nrank(s) {stuck} did not end when asked to and were killed: they '
                 f'were stopped, or hung in native code or on a device.')
    return f'\nerror: {text}'


def _report_status(failed: Any, stuck: Sequence[int], notes: Sequence[Note]) -> Optional[str]:
    """Return the report of a rank that died without a word; None if the notes say more."""
    failures: Dict[int, Any] = dict(failed.failures)
    explained = {note.rank for note in notes}
    blamed = {rank for note in notes for rank in note.blamed}

    def has_waited(rank: int) -> bool:
        return bool(stuck) or rank in explained or bool(blamed - {rank}) and rank not in blamed

    killed = [rank for rank, failure in failures.items()
              if failure.exitcode < 0 and rank not in stuck
              and failure.exitcode not in _BY_LAUNCHER
              and not (failure.exitcode == -signal.SIGABRT and has_waited(rank))]
    aborted = [rank for rank in killed if failures[rank].exitcode == -signal.SIGABRT]
    alive = sorted(rank for rank, failure in failures.items() if failure.exitcode in _BY_LAUNCHER)
    if aborted and aborted == killed and alive:  # nothing says which of them is the cause
        return (f'rank(s) {sorted(aborted)} aborted while rank(s) {alive} still ran:\n'
                f'{_describe_status(failures[aborted[0]])}')
    if not killed and notes:
        return None
    rank = killed[0] if killed else failed.get_first_failure()[0]
    return f'rank {rank} failed first:\n{_describe_status(failures[rank])}'


def _describe_status(failure: Any) -> str:
    by = failure.signal_name() if failure.exitcode < 0 else ''
    if not by:
        return (f'it ended with status {failure.exitcode} and left no error. What it printed is '
                f'above; if that says nothing, its code or a library called exit.')
    text = f'killed by {by}'
    if by == 'SIGKILL':
        text += '. If nobody has sent it, the machine ran out of memory: see `dmesg`.'
    if by == 'SIGABRT':
        text += ('. Native code gave up, and what it printed is above. The watchdog of a '
                 'communication backend (NCCL, ECCL) does so with a rank that has waited for '
                 'another one longer than env_cfg.dist_cfg.timeout.')
    return text


def _report_notes(notes: Sequence[Note]) -> str:
    """Return the report of what the ranks wrote: the earliest, or what the rank it blames wrote."""
    first, seen = notes[0], {notes[0].rank}
    by_rank = {note.rank: note for note in reversed(notes)}
    while first.blamed:
        # What a rank says of itself, or of others, says more than that it is missing. If it blames
        # those who blame it, it was late.
        others = [by_rank[rank] for rank in first.blamed if rank in by_rank and rank not in seen
                  and not seen & set(by_rank[rank].blamed)]
        if not others:
            break
        first = others[0]
        seen.add(first.rank)
    same = sorted({note.rank for note in notes if note.text == first.text})
    if not first.blamed and (first.blames_nobody or len(same) > 1):
        return f'rank(s) {same} report:\n{first.text}'
    if first.blamed and first.blamed != [first.rank]:
        return f'{_lost(first.blamed)}, rank {first.rank} reports:\n{first.text}'
    return f'rank {first.rank} failed first:\n{first.text}'


def _lost(ranks: Sequence[int]) -> str:
    return f'rank(s) {list(ranks)} {"was" if len(ranks) == 1 else "were"} waited for in vain'
