"""The ranks that are missing from a collective, and the sentences about them in errors.

``roll_call.py`` finds out which ranks are missing. The functions here are pure.
"""

from __future__ import annotations

from typing import Dict, List, NamedTuple, Optional, Tuple

from .main_thread import Activity, Position


class Missing(NamedTuple):
    """The ranks that are missing from a collective.

    Attributes:
        ranks: Global ranks.
        silent: Whether the processes of these ranks did not report either.
        reasons: What is known about these ranks, and about some that wait elsewhere, by rank.
    """

    ranks: List[int]
    silent: bool
    reasons: Dict[int, str]


def describe_missing(missing: Optional[Missing], rank: int) -> Tuple[Tuple[str, str], List[int]]:
    """Return a description of the missing ranks with advice, and the missing ranks. Pure.

    Args:
        missing: Result of :meth:`RollCall.find_missing`.
        rank: Global rank of this process.

    Returns:
        Two texts, the description as a clause and the advice as sentences; and the global ranks.
    """
    log = 'look at the first error in their log.'
    if missing is None:
        return (
            'the rendezvous store does not answer',
            'The process that keeps it has ended or '
            f'hangs: the launcher, or rank 0 where there is none: {log}',
        ), [0]
    if missing.ranks == [rank]:
        return (
            f'the others have waited for it, rank {rank}, in vain',
            f'{_format_reasons(missing)}The others have given up: {log}',
        ), [rank]
    ranks = [missing_rank for missing_rank in missing.ranks if missing_rank != rank]
    if not ranks:
        return (
            'every rank came to it, this one perhaps too late',
            f'Another one has ended or gave up before: {log}',
        ), []
    advice = (
        'They died, there or in it, hang, or have opened no channel yet'
        if missing.silent
        else 'They are slow or took a path without this agreement'
    )
    return (
        f'rank(s) {ranks} did not come to it',
        f'{_format_reasons(missing)}{advice}: {log}',
    ), ranks


def _format_reasons(missing: Missing) -> str:
    """Return the known reasons of the missing ranks as sentences. Pure."""
    return ''.join(f'{reason[:1].upper()}{reason[1:]}. ' for reason in missing.reasons.values())


def describe_pause(seconds: float) -> str:
    """Return a description of a pause, which follows the name of the process. Pure."""
    return (
        f'did not run for {seconds:.0f} s: it was stopped, or its machine was, or native code '
        f'kept the interpreter to itself'
    )


def describe_position(position: Position) -> str:
    """Return a description of a main thread, which follows 'rank R answers'. Pure."""
    if not position.line:
        return ''
    doing = {
        Activity.RUNS: 'is',
        Activity.IN_BACKWARD: 'computes gradients',
        Activity.IN_COLLECTIVE: 'waits in a collective',
    }[position.activity]
    return f', and its main thread {doing} at {position.line}'
