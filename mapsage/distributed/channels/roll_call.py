"""Lets every process report when a collective does not complete.

A healthy step costs nothing. When a collective fails on a rank, the rank sends a message to a few
others, which forward it, so every process gets it within log2(ranks) hops. A process receives it on
the mesh's thread, even if its main thread hangs. Then it files its report in the record from which
``mapsage/distributed/lost_ranks.py`` decides which ranks are missing. A process without a report has
ended, or is stopped as a whole.

A channel is a *lane* here: the collectives of one channel, which fail together.
"""

from __future__ import annotations

import hashlib
import threading
import time
from typing import Callable, Dict, Optional, Sequence, Set, Tuple

from mapsage.distributed.lost_ranks import (
    MOST_SECONDS,
    Finding,
    Record,
    Report,
    find_missing,
)
from mapsage.distributed.store import LockedStore

from .main_thread import main_thread_position
from .mesh import Mesh
from .mesh_link import POLL_SECONDS, Message
from .pauses import is_late


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

    def find_missing(self, lane: Lane) -> Optional[Finding]:
        """Return the missing ranks of a lane that has failed.

        One rank finds them out and the others get its answer from the store. If that rank or the
        store has ended, this rank answers from the connections that it has lost.

        Returns:
            The missing ranks; an answer without any rank if nobody knows which one it is. None if
            the rendezvous store has ended and no connection has broken.
        """
        unknown: Optional[Finding] = Finding([], {})
        try:
            finding = self._record(lane.name, lane.ranks).settle(
                lambda reports: find_missing(
                    reports,
                    lane.ranks,
                    {**self.mesh.reasons(), **self._lost_ranks(lane)},
                    self.mesh.locate,
                    has_lost=bool(self._lost_ranks(lane)),
                    stuck_together=lane.stuck_together,
                ),
                lambda: set(lane.ranks) & {*self._lost_ranks(lane), *list(self.mesh.lost)},
            )
            if finding is not None:
                return finding
        # The process that keeps the store has ended.
        except RuntimeError:
            unknown = None
        lost = self._lost_ranks(lane)
        return Finding(list(lost), lost, silent=True) if lost else unknown

    def ask_reports(self, name: str) -> Dict[int, Report]:
        """Return reports with the positions of the main threads, of the ranks that answer.

        Args:
            name: Name of the question, which is asked once in a job; all ranks answer it.
        """
        everyone = range(self._ranks)
        self.alarm(Lane(name, everyone), {})
        record = self._record(name, everyone)
        record.wait(self._ranks)
        return record.reports()

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

    def _record(self, name: str, ranks: Sequence[int]) -> Record:
        return Record(self.store, name, self.rank, ranks)

    def _report(self, message: Message) -> None:
        """File the report of this rank about a failed lane."""
        if message['lost']:
            # A rank that lost all its connections is the one that most ranks have lost. The mesh
            # of this rank may not have noticed that yet.
            time.sleep(2 * POLL_SECONDS)
        with self.mesh.news:
            if message['lane'] in self._reported:
                return
            self._reported.add(message['lane'])
        lane = self._lanes.get(message['lane'])
        paused = self.mesh.pauses.longest(message['waited'] + MOST_SECONDS)
        report = Report(
            2 * lane.entered + lane.inside if lane else 0,
            *main_thread_position(),
            int(paused) if is_late(paused, message['waited']) else 0,
            sorted(set(message['ranks']) & set(self.mesh.lost)),
        )
        try:
            self._record(message['name'], message['ranks']).file(report)
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
