"""Finds out which ranks are missing when a collective does not complete.

A healthy step costs nothing. When a collective fails on a rank, the rank sends a message to a few
others, which forward it, so every process gets it within log2(ranks) hops. A process receives it on
the mesh's thread, even if its main thread hangs. Then every process reports to the rendezvous store
how many collectives it has entered. One rank reads all reports and stores the missing ranks for the
others, so the number of requests grows only linearly with the number of ranks. A process without a
report has ended, or is stopped as a whole.

A channel is a *lane* here: the collectives of one channel, which fail together.

``missing_ranks.py`` has the sentences for errors; ``main_thread.py`` finds out which of several
missing ranks the others wait for.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from typing import Callable, Dict, List, Optional, Sequence, Set, Tuple

from mapsage.distributed.store import LockedStore

from .main_thread import Activity, Position, find_stragglers, main_thread_position
from .mesh import Mesh
from .mesh_link import POLL_SECONDS, Message
from .missing_ranks import Missing, describe_pause, describe_position
from .pauses import is_late

# Seconds without a new report after which the ranks without a report count as missing.
_GRACE_SECONDS = 3.0
# Longest time for all reports, in seconds.
_MOST_SECONDS = 30.0
# How many of the ranks that wait elsewhere an error shows as examples.
_SHOWN_WAITING = 2
# First and longest time between two requests for the same value in the store.
_RETRY_SECONDS = (0.01, 0.5)


class Lane:
    """The collectives of one channel, counted on this rank.

    Args:
        name: Name of the channel. It is equal on all ranks, and no other channel has it.
        ranks: Global ranks, in group order.

    Attributes:
        key: Number made from the name.
        entered: Number of collectives that this rank has entered.
        inside: Whether this rank is inside a collective now.
        stuck_together: Whether all ranks may wait in it for ever, because one of them has started
            another collective than the others.
    """

    stuck_together = False

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, list(ranks)
        self.key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), 'big')
        self.entered, self.inside = 0, False


class RollCall:
    """The lanes of this process, their failures, and the texts published about them.

    Args:
        store: Rendezvous store.
        prefix: Prefix of this roll call's keys in the store; equal on all ranks, and no other roll
            call has it.
        rank: Global rank of this process.
        ranks: Number of ranks.

    Attributes:
        mesh: Connections of this process.
    """

    def __init__(self, store: LockedStore, prefix: str, rank: int, ranks: int) -> None:
        self.store, self.rank = store, rank
        self._prefix, self._ranks = prefix, ranks
        self._lanes: Dict[int, Lane] = {}
        # The first message about the failure of a lane, by the lane's key.
        self._failures: Dict[int, Message] = {}
        self._reported: Set[int] = set()
        # Questions for the positions of main threads that this process has received.
        self._questions: Set[str] = set()
        # Published texts, by the key of the lane and the key of the text.
        self._texts: Dict[Tuple[int, str], str] = {}
        self.mesh = Mesh(store, prefix, rank, ranks, self._receive)

    def open(
        self, name: str, ranks: Sequence[int], kind: Callable[..., Lane] = Lane, *options: object
    ) -> Lane:
        """Return the lane with this name, made by ``kind(name, ranks, *options)``.

        The call is not collective.
        """
        lane = kind(f'{self._prefix}/{name}', ranks, *options)
        return self._lanes.setdefault(lane.key, lane)

    def failed(self, lane: Lane) -> bool:
        """Return whether a rank has given up this lane."""
        return lane.key in self._failures

    def alarm(self, lane: Lane, lost: Dict[int, str], waited: float = 0.0) -> None:
        """Inform all ranks of a lane that this rank gives it up.

        Args:
            lane: Lane that failed.
            lost: Reason by global rank, for ranks whose connection broke.
            waited: Seconds for which ranks wait for each other in this lane.
        """
        message = Message(
            kind='failed',
            lane=lane.key,
            name=lane.name,
            ranks=lane.ranks,
            lost=list(lost.items()),
            waited=waited,
        )
        if self._remember(message):
            # First to connected ranks, and not on a thread, because this process may end soon. The
            # thread then connects to the others.
            self._spread(message, connect=False)
            threading.Thread(target=self._forward, args=(message,), daemon=True).start()
            self._report(message)

    def find_missing(self, lane: Lane) -> Optional[Missing]:
        """Return the missing ranks of a lane that has failed.

        One rank finds them out and the others get its answer from the store. If that rank or the
        store has ended, this rank answers from the connections that it has lost.

        Returns:
            The missing ranks; an answer without any rank if nobody knows which one it is. None if
            the rendezvous store has ended and no connection has broken.
        """
        unknown: Optional[Missing] = Missing([], False, {})
        try:
            if self.store.add(f'{lane.name}/reader', 1) == 1:
                missing = self._read_reports(lane)
                self.store.set(
                    f'{lane.name}/missing',
                    json.dumps([missing.ranks, missing.silent, list(missing.reasons.items())]),
                )
                return missing
            deadline, pause = time.monotonic() + _MOST_SECONDS + _GRACE_SECONDS, _RETRY_SECONDS[0]
            while time.monotonic() < deadline:
                text = self.store.find(f'{lane.name}/missing')
                if text is not None:
                    ranks, silent, reasons = json.loads(text)
                    return Missing(ranks, silent, dict(reasons))
                time.sleep(pause)
                pause = min(2 * pause, _RETRY_SECONDS[1])
        # The process that keeps the store has ended.
        except RuntimeError:
            unknown = None
        lost = self._lost_ranks(lane)
        return Missing(list(lost), True, lost) if lost else unknown

    def ask_positions(self, question: str, ranks: Sequence[int]) -> Dict[int, Position]:
        """Return the positions of the main threads of ranks, without ranks that do not answer.

        Args:
            question: Key in the store. Each question is asked once in a job, and goes to all ranks.
            ranks: Global ranks whose answers to wait for, for some seconds.
        """
        message = Message(kind='position', question=question, ranks=list(range(self._ranks)))
        if self._remember(message):
            threading.Thread(target=self._forward, args=(message,), daemon=True).start()
        positions: Dict[int, Position] = {}
        deadline = time.monotonic() + _GRACE_SECONDS
        while len(positions) < len(ranks) and time.monotonic() < deadline:
            time.sleep(_RETRY_SECONDS[0])
            for rank in ranks:
                position = self._read_position(question, rank) if rank not in positions else None
                if position is not None:
                    positions[rank] = position
        return positions

    def publish(self, lane: Lane, key: str, text: str) -> bool:
        """Store a text for all ranks; return whether it is the first under its key."""
        message = Message(kind='text', lane=lane.key, ranks=lane.ranks, key=key, text=text)
        if self._remember(message):
            self._spread(message, connect=False)
            threading.Thread(target=self._spread, args=(message,), daemon=True).start()
        try:
            is_first = self.store.add(f'{lane.name}/{key}/count', 1) == 1
            if is_first:
                self.store.set(f'{lane.name}/{key}/text', text)
            return is_first
        # The process that keeps the store has ended.
        except RuntimeError:
            return False

    def published(self, lane: Lane, key: str) -> Optional[str]:
        """Return the first text published under a key, or None."""
        try:
            text = self.store.find(f'{lane.name}/{key}/text')
        # The process that keeps the store has ended, but the mesh may have brought the text.
        except RuntimeError:
            text = None
        return self._texts.get((lane.key, key)) if text is None else text

    def _receive(self, message: Message) -> None:
        """Handle a message of another rank, on the mesh's thread."""
        if self._remember(message):
            # On another thread, because sending may have to wait, and the mesh's thread must read.
            threading.Thread(target=self._forward, args=(message,), daemon=True).start()

    def _remember(self, message: Message) -> bool:
        """Store a message; return whether it is new."""
        # The condition is also the lock of what this class stores.
        with self.mesh.news:
            if message['kind'] == 'failed':
                is_new = self._failures.setdefault(message['lane'], message) is message
            elif message['kind'] == 'position':
                is_new = message['question'] not in self._questions
                self._questions.add(message['question'])
            else:
                key = message['lane'], message['key']
                is_new = key not in self._texts
                self._texts.setdefault(key, message['text'])
            self.mesh.news.notify_all()
            return is_new

    def _forward(self, message: Message) -> None:
        """Send a message on, first to connected ranks, and do what it asks of this rank."""
        self._spread(message, connect=False)
        if message['kind'] == 'failed':
            self._report(message)
        if message['kind'] == 'position':
            try:
                self._write_position(message['question'])
            # The process that keeps the store has ended.
            except RuntimeError:
                return
        self._spread(message)

    def _spread(self, message: Message, connect: bool = True) -> None:
        """Send a message to the ranks at the distances 1, 2, 4, ... from this rank."""
        ranks = message['ranks']
        if self.rank not in ranks:
            return
        position, distance = ranks.index(self.rank), 1
        while distance < len(ranks):
            for rank in {
                ranks[(position + distance) % len(ranks)],
                ranks[(position - distance) % len(ranks)],
            }:
                if rank != self.rank:
                    self.mesh.tell(rank, message, connect)
            distance *= 2

    def _report(self, message: Message) -> None:
        """Write the progress of this rank in a failed lane into the store.

        The progress is ``2 * entered + 1 + inside``. It is odd if the rank is outside all
        collectives of this lane, and the store has 0 for a rank without a report.
        """
        if message['lost']:
            # A rank that lost all its connections is the one that most ranks have lost. The mesh
            # of this rank may not have noticed that yet.
            time.sleep(2 * POLL_SECONDS)
        with self.mesh.news:
            if message['lane'] in self._reported:
                return
            self._reported.add(message['lane'])
        lane = self._lanes.get(message['lane'])
        entered, inside = (lane.entered, lane.inside) if lane else (0, False)
        paused = self.mesh.pauses.longest(message['waited'] + _MOST_SECONDS)
        try:
            if is_late(paused, message['waited']):
                self.store.add(f'{message["name"]}/paused/{self.rank}', int(paused))
            for rank in set(message['ranks']) & set(self.mesh.lost):
                self.store.add(f'{message["name"]}/unconnected/{rank}', 1)
            self._write_position(message['name'])
            self.store.add(f'{message["name"]}/at/{self.rank}', 2 * entered + 1 + inside)
            self.store.add(f'{message["name"]}/reported', 1)
        # The process that keeps the store has ended.
        except RuntimeError:
            pass

    def _lost_ranks(self, lane: Lane) -> Dict[int, str]:
        """Return the ranks that had ended when the lane failed, and the reasons.

        The rank that gave up first knows best, if its error was a broken connection. Otherwise this
        returns the connections that this rank has lost.
        """
        lost = {int(rank): reason for rank, reason in self._failures[lane.key]['lost']}
        return lost or {
            rank: reason for rank, reason in self.mesh.reasons().items() if rank in lane.ranks
        }

    def _read_reports(self, lane: Lane) -> Missing:
        """Return the missing ranks according to the reports of all ranks."""
        self._await_reports(lane)
        progress = {rank: self.store.add(f'{lane.name}/at/{rank}', 0) for rank in lane.ranks}
        silent = [rank for rank in lane.ranks if not progress[rank]]
        most_entered = max((value - 1) // 2 for value in progress.values())
        behind = [
            rank
            for rank in lane.ranks
            if progress[rank] and (progress[rank] - 1) // 2 < most_entered
        ]
        # A rank inside a collective may be one behind and wait nevertheless, because a broadcast
        # ends sooner on some ranks. So ranks outside this lane's collectives are suspected first.
        outside = [rank for rank in behind if progress[rank] % 2]
        reasons = {**self.mesh.reasons(), **self._lost_ranks(lane)}
        if silent:
            return Missing(
                silent,
                True,
                {
                    rank: reasons.get(rank) or f'{self.mesh.locate(rank)} does not answer'
                    for rank in silent
                },
            )
        # All ranks answer, but some were stopped for a while or have lost their connections.
        disturbed = self._read_pauses(lane) or self._read_broken_connections(lane)
        if disturbed:
            return Missing(list(disturbed), False, disturbed)
        if lane.stuck_together and not behind:
            return Missing(self._find_lonely(lane), False, {})
        positions = {
            rank: self._read_position(lane.name, rank) or Position(Activity.RUNS, '')
            for rank in outside or behind
        }
        stragglers = find_stragglers(positions)
        waiting = [rank for rank in positions if rank not in stragglers]
        return Missing(
            stragglers,
            False,
            {
                rank: reasons.get(rank)
                or f'{self.mesh.locate(rank)} answers{describe_position(positions[rank])}'
                for rank in [*stragglers, *waiting[:_SHOWN_WAITING]]
            },
        )

    def _find_lonely(self, lane: Lane) -> List[int]:
        """Return the smallest group of ranks on one line; empty if several groups are as small."""
        positions = {rank: self._read_position(lane.name, rank) for rank in lane.ranks}
        lines = {
            rank: Position(Activity.IN_COLLECTIVE, position.line)
            for rank, position in positions.items()
            if position is not None
        }
        lonely = find_stragglers(lines)
        return lonely if len(lonely) < len(lane.ranks) else []

    def _write_position(self, prefix: str) -> None:
        self.store.set(f'{prefix}/position/{self.rank}', json.dumps(main_thread_position()))

    def _read_position(self, prefix: str, rank: int) -> Optional[Position]:
        text = self.store.find(f'{prefix}/position/{rank}')
        if text is None:
            return None
        activity, line = json.loads(text)
        return Position(Activity(activity), line)

    def _read_pauses(self, lane: Lane) -> Dict[int, str]:
        """Return a text for every rank whose process was paused for about as long as others waited."""
        paused = {rank: self.store.add(f'{lane.name}/paused/{rank}', 0) for rank in lane.ranks}
        return {
            rank: f'{self.mesh.locate(rank)} {describe_pause(seconds)}'
            for rank, seconds in paused.items()
            if seconds
        }

    def _read_broken_connections(self, lane: Lane) -> Dict[int, str]:
        """Return a text for the ranks to which most others lost the connection, though all answer.

        A broken connection has two ends, and the rank with the most broken ones is at fault. If no
        connection had broken when the lane failed, none counts.
        """
        if not self._lost_ranks(lane):
            return {}
        counts = {rank: self.store.add(f'{lane.name}/unconnected/{rank}', 0) for rank in lane.ranks}
        most = max(counts.values())
        return {
            rank: f'{self.mesh.locate(rank)} answers, and {count} rank(s) have lost the '
            f'connection with it'
            for rank, count in counts.items()
            if count and count == most
        }

    def _await_reports(self, lane: Lane) -> None:
        """Wait until all ranks have reported or ended, or no new report has come for a while."""
        end = time.monotonic() + _MOST_SECONDS
        quiet_until, seen, ended = time.monotonic() + _GRACE_SECONDS, 0, 0
        pause, lost_count = _RETRY_SECONDS[0], -1
        while time.monotonic() < min(end, quiet_until):
            count = self.store.add(f'{lane.name}/reported', 0)
            lost = set(self._lost_ranks(lane)) | {
                rank for rank in list(self.mesh.lost) if rank in lane.ranks
            }
            if (count, len(lost)) != (seen, lost_count):
                quiet_until = time.monotonic() + _GRACE_SECONDS if count != seen else quiet_until
                pause = _RETRY_SECONDS[0]
                seen, lost_count = count, len(lost)
                # Some lost ranks had reported before they ended.
                ended = sum(not self.store.add(f'{lane.name}/at/{rank}', 0) for rank in lost)
            if seen + ended >= len(lane.ranks):
                return
            time.sleep(pause)
            pause = min(2 * pause, _RETRY_SECONDS[1])
