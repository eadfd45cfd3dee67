"""Who is lost: the one place that decides which ranks the others wait for, from one record.

A rank whose collective does not complete files a :class:`Report` in a :class:`Record` in the
rendezvous store. One rank reads the reports for all, when all have come or none comes any more,
decides with one of the functions here, and stores its :class:`Finding` for the others. A healthy
run sends no request. The decisions are pure:

- :func:`find_missing`: every process that lives reports how far it has come in a channel, or in the
  collectives of a card (``channels/roll_call.py``, ``backend_watch.py``).
- :func:`find_culprit`: a rank reports when a collective of torch.distributed itself has failed on
  it (``broken_collective.py``). One that has not may have died, hang, or wait elsewhere.
- Watches notice a loss outside of collectives, such as the heartbeat between machines of the extra
  elastic. Where one has found ranks, they are the cause.

What a rank leaves for its launcher is in ``launcher_notes.py``; the launcher's last words are in
``mapsage_launcher/ranks/failure_report.py``.
"""

from __future__ import annotations

import enum
import json
import time
from collections import defaultdict
from typing import Callable, Collection, Dict, List, NamedTuple, Optional, Protocol, Sequence, Tuple

from .store import LockedStore

# Seconds of waiting without a new report after which the others do not come any more. Ranks in the
# same collective time out shortly one after the other.
QUIET_SECONDS = 3.0
# Longest time for all reports, in seconds.
MOST_SECONDS = 30.0
# First and longest time between two requests for the same value in the store.
_RETRY_SECONDS = (0.01, 0.5)
# How many of the ranks that wait elsewhere an error shows as examples.
_SHOWN_WAITING = 2


class LossWatch(Protocol):
    """Notices lost ranks outside of collectives, as a heartbeat between machines does."""

    def lost_ranks(self) -> Dict[int, str]:
        """Return the ranks that were found to be lost, each with a text about it or ''."""

    def leave(self) -> None:
        """Say that this process ends as it should, so that its end is not taken for a loss."""


# Watches of this process. An extra adds the one that it starts.
watches: List[LossWatch] = []


def leave_watches() -> None:
    """Say goodbye to all watches."""
    for watch in watches:
        watch.leave()


def watched_losses() -> Dict[int, str]:
    """Return the ranks that a watch has found to be lost, each with a text about it or ''."""
    return next(filter(None, (watch.lost_ranks() for watch in watches)), {})


class Activity(enum.IntEnum):
    """What a main thread does, by how likely it is that it waits for another rank."""

    RUNS = 0
    # DDP waits for the other ranks' gradients here, and a kernel may also hang here.
    IN_BACKWARD = 1
    IN_COLLECTIVE = 2


class Position(NamedTuple):
    """Where the main thread of a rank is.

    Attributes:
        activity: What it does.
        line: File, line and function of the innermost frame that is not the waiting itself, such as
            ``'engine/runner.py:253 in _init_model_weights'``.
    """

    activity: Activity
    line: str


class Report(NamedTuple):
    """What a rank reports about a collective that does not complete.

    Attributes:
        progress: ``2 * entered + inside`` in a channel: the number of collectives that the rank has
            entered, and whether it is inside one now.
        activity, line: Position of its main thread, see :class:`Position`.
        paused: Seconds for which its process did not run, if that made the others wait; else 0.
        unconnected: Ranks to which it has lost the connection.
        error: Its error if the collective broke for another reason on this rank.
    """

    progress: int = 0
    activity: int = Activity.RUNS
    line: str = ''
    paused: int = 0
    unconnected: Sequence[int] = ()
    error: str = ''

    @property
    def position(self) -> Position:
        """Position of the rank's main thread."""
        return Position(Activity(self.activity), self.line)


class Finding(NamedTuple):
    """The ranks for which a collective has waited in vain.

    Attributes:
        ranks: Global ranks.
        reasons: What is known about these ranks, and about some that wait elsewhere, by rank.
        silent: Whether the processes of these ranks did not report either.
        failed: A rank that failed with an error of its own, and the error; then ``ranks`` is empty.
    """

    ranks: List[int]
    reasons: Dict[int, str]
    silent: bool = False
    failed: Optional[Tuple[int, str]] = None


class Record:
    """The reports of a group's ranks about one failure.

    Args:
        store: Rendezvous store.
        name: Prefix of its keys; equal on all ranks, and used for one failure.
        rank: Rank of this process.
        ranks: Ranks of the group.
    """

    def __init__(self, store: LockedStore, name: str, rank: int, ranks: Collection[int]) -> None:
        self._store, self._name, self._rank, self._ranks = store, name, rank, ranks

    def file(self, report: Report) -> None:
        """Store the report of this rank. Raises RuntimeError if the store has ended."""
        self._store.set(f'{self._name}/report/{self._rank}', json.dumps(report))
        self._store.add(f'{self._name}/reports', 1)

    def reports(self) -> Dict[int, Report]:
        """Return the reports that have been filed, by rank."""
        texts = {rank: self._store.find(f'{self._name}/report/{rank}') for rank in self._ranks}
        return {rank: Report(*json.loads(text)) for rank, text in texts.items() if text is not None}

    def settle(
        self,
        decide: Callable[[Dict[int, Report]], Finding],
        ended: Callable[[], Collection[int]] = tuple,
    ) -> Optional[Finding]:
        """Return the finding, which one rank decides from the reports for all.

        Args:
            decide: Function of the reports, by rank.
            ended: Function that returns ranks whose process has ended; nobody waits for these.

        Returns:
            None if the rank that decides has ended.
        """
        if self._store.add(f'{self._name}/reader', 1) == 1:
            self.wait(len(self._ranks), ended)
            finding = decide(self.reports())
            self._store.set(f'{self._name}/finding', json.dumps(finding))
            return finding
        deadline, pause = time.monotonic() + MOST_SECONDS + QUIET_SECONDS, _RETRY_SECONDS[0]
        while time.monotonic() < deadline:
            text = self._store.find(f'{self._name}/finding')
            if text is not None:
                ranks, reasons, silent, failed = json.loads(text)
                reasons = {int(rank): reason for rank, reason in reasons.items()}
                return Finding(ranks, reasons, silent, failed and tuple(failed))
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS[1])
        return None

    def wait(self, count: int, ended: Callable[[], Collection[int]] = tuple) -> None:
        """Wait for a number of reports, until no new one has come for a while.

        Args:
            count: Number of reports.
            ended: Function that returns ranks whose process has ended, see :meth:`settle`.
        """
        end = time.monotonic() + MOST_SECONDS
        # The pauses that are asked for, not the clock: where a busy machine gives this process few
        # turns, it gives few to those that report.
        quiet, pause = 0.0, _RETRY_SECONDS[0]
        seen, lost, absent = 0, -1, 0
        while time.monotonic() < end and quiet < QUIET_SECONDS:
            reported, ended_ranks = self._store.add(f'{self._name}/reports', 0), ended()
            if (reported, len(ended_ranks)) != (seen, lost):
                if reported != seen:
                    quiet = 0.0
                seen, lost, pause = reported, len(ended_ranks), _RETRY_SECONDS[0]
                # Some of these ranks had reported before they ended.
                absent = sum(
                    not self._store.add(f'{self._name}/report/{rank}/set', 0)
                    for rank in ended_ranks
                )
            if seen + absent >= count:
                return
            time.sleep(pause)
            quiet += pause
            pause = min(2 * pause, _RETRY_SECONDS[1])


def find_missing(
    reports: Dict[int, Report],
    ranks: Sequence[int],
    reasons: Dict[int, str],
    locate: Callable[[int], str],
    *,
    has_lost: bool = False,
    stuck_together: bool = False,
) -> Finding:
    """Return the ranks that are missing from a collective that every living process reports on.

    Args:
        reports: Reports by rank.
        ranks: Global ranks of the channel, in order.
        reasons: What is known about ranks whose connection has ended, by rank.
        locate: Function that returns 'rank R on host H'.
        has_lost: Whether a connection had broken when the channel failed.
        stuck_together: Whether all ranks may wait for ever, see ``Lane``.
    """
    silent = [rank for rank in ranks if rank not in reports]
    if silent:
        return Finding(
            silent,
            {rank: reasons.get(rank) or f'{locate(rank)} does not answer' for rank in silent},
            silent=True,
        )
    # All ranks answer, but some were stopped for a while or have lost their connections.
    disturbed = {
        rank: f'{locate(rank)} {describe_pause(report.paused)}'
        for rank, report in reports.items()
        if report.paused
    }
    if has_lost and not disturbed:
        # A broken connection has two ends, and the rank with the most broken ones is at fault.
        counts = [sum(rank in report.unconnected for report in reports.values()) for rank in ranks]
        disturbed = {
            rank: f'{locate(rank)} answers, and {count} rank(s) have lost the connection with it'
            for rank, count in zip(ranks, counts)
            if count and count == max(counts)
        }
    if disturbed:
        return Finding(list(disturbed), disturbed)
    most_entered = max(report.progress // 2 for report in reports.values())
    behind = [rank for rank in ranks if reports[rank].progress // 2 < most_entered]
    if stuck_together and not behind:
        # The smallest group of ranks on one line, unless several groups are as small.
        lonely = find_stragglers(
            {rank: Position(Activity.IN_COLLECTIVE, reports[rank].line) for rank in ranks}
        )
        return Finding(lonely if len(lonely) < len(ranks) else [], {})
    # A rank inside a collective may be one behind and wait nevertheless, because a broadcast ends
    # sooner on some ranks. So ranks outside this channel's collectives are suspected first.
    outside = [rank for rank in behind if not reports[rank].progress % 2]
    positions = {rank: reports[rank].position for rank in outside or behind}
    stragglers = find_stragglers(positions)
    waiting = [rank for rank in positions if rank not in stragglers]
    return Finding(
        stragglers,
        {
            rank: reasons.get(rank) or f'{locate(rank)} answers{describe_position(positions[rank])}'
            for rank in [*stragglers, *waiting[:_SHOWN_WAITING]]
        },
    )


def find_culprit(
    reports: Dict[int, Report],
    ranks: Sequence[int],
    known_ends: Callable[[Sequence[int]], Dict[int, str]],
    ask: Callable[[Sequence[int]], Dict[int, Report]],
) -> Finding:
    """Return the rank at fault where a collective of torch.distributed has failed on some ranks.

    Args:
        reports: Reports of these ranks.
        ranks: Global ranks of the job.
        known_ends: Function that returns those of some ranks whose process has ended, with a text.
        ask: Function that returns the reports of some ranks now, if they answer.
    """
    failed = _find_failed(reports)
    if failed is not None:
        return failed
    silent = [rank for rank in ranks if rank not in reports]
    late = {
        rank: f'rank {rank} {describe_pause(report.paused)}'
        for rank, report in reports.items()
        if report.paused
    }
    # A rank without a report need not be lost: only the neighbors of a dead rank notice its end.
    # The other ranks still wait, for ranks that have failed, and have not reported yet.
    known = known_ends(silent)
    ended = {rank: known[rank] for rank in silent if rank in known}
    if late and not silent:
        return Finding(list(late), late)
    if ended:
        return Finding(list(ended), ended)
    # A rank without a report may itself wait, in a later collective of another kind. If no rank
    # answers, this job has opened no channel yet, and all ranks without a report count.
    answers = ask(silent)
    failed = _find_failed(answers)
    if failed is not None:
        return failed
    positions = {rank: report.position for rank, report in answers.items()}
    hanging = [rank for rank in silent if rank not in positions] or find_stragglers(positions)
    if all(
        rank in positions and positions[rank].activity == Activity.IN_COLLECTIVE for rank in hanging
    ):
        # If all ranks wait, one of them may have been in a collective that no other has entered.
        positions.update((rank, report.position) for rank, report in reports.items())
        hanging = find_stragglers(positions)
        if len(hanging) == len(positions):
            return Finding([], {})
    return Finding(
        hanging,
        {
            rank: f'rank {rank} answers{describe_position(positions[rank])}'
            for rank in hanging
            if rank in positions
        },
    )


def _find_failed(reports: Dict[int, Report]) -> Optional[Finding]:
    """Return the finding that a rank failed with an error of its own, if one says so. Pure."""
    for rank, report in reports.items():
        if report.error:
            return Finding([], {}, failed=(rank, report.error))
    return None


def find_stragglers(positions: Dict[int, Position]) -> List[int]:
    """Return the ranks that the others most likely wait for. Pure.

    A rank that runs is suspected before one that computes gradients, and that one before a rank
    that is in a collective itself. If all of them are in collectives, the smallest group that is on
    one line is suspected: most ranks are where all should be. If the smallest groups are equally
    large, every rank is returned.

    Args:
        positions: Position by rank of the ranks that have not come to a collective.
    """
    if not positions:
        return []
    least = min(position.activity for position in positions.values())
    if least != Activity.IN_COLLECTIVE:
        return [rank for rank, position in positions.items() if position.activity == least]
    by_line: Dict[str, List[int]] = defaultdict(list)
    for rank, position in positions.items():
        by_line[position.line].append(rank)
    smallest, *larger = sorted(by_line.values(), key=len)
    if larger and len(larger[0]) > len(smallest):
        return smallest
    return list(positions)


def describe_missing(finding: Optional[Finding], rank: int) -> Tuple[Tuple[str, str], List[int]]:
    """Return a description of the missing ranks with advice, and the missing ranks. Pure.

    Args:
        finding: Result of :meth:`RollCall.find_missing`.
        rank: Global rank of this process.

    Returns:
        Two texts, the description as a clause and the advice as sentences; and the global ranks.
    """
    log = 'look at the first error in their log.'
    if finding is None:
        return (
            'the rendezvous store does not answer',
            'The process that keeps it has ended or '
            f'hangs: the launcher, or rank 0 where there is none: {log}',
        ), [0]
    if finding.ranks == [rank]:
        return (
            f'the others have waited for it, rank {rank}, in vain',
            f'{_format_reasons(finding)}The others have given up: {log}',
        ), [rank]
    ranks = [missing_rank for missing_rank in finding.ranks if missing_rank != rank]
    if not ranks:
        return (
            'every rank came to it, this one perhaps too late',
            f'Another one has ended or gave up before: {log}',
        ), []
    advice = (
        'They died, there or in it, hang, or have opened no channel yet'
        if finding.silent
        else 'They are slow or took a path without this agreement'
    )
    return (
        f'rank(s) {ranks} did not come to it',
        f'{_format_reasons(finding)}{advice}: {log}',
    ), ranks


def _format_reasons(finding: Finding) -> str:
    """Return the known reasons of the missing ranks as sentences. Pure."""
    return ''.join(f'{reason[:1].upper()}{reason[1:]}. ' for reason in finding.reasons.values())


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
