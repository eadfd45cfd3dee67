"""Who is missing where a collective does not complete.

A healthy step asks nobody. The first rank whose wait fails tells a few others, these tell more,
and so within log2(ranks) hops every process hears of it on a thread of its own, also one whose main
thread is somewhere else. Each writes into the rendezvous store how far it is; one rank reads what
all have written and stores whom it found missing. This takes a number of requests in proportion to
the ranks. A process that writes nothing has ended or hangs.
"""
from __future__ import annotations

import hashlib
import json
import threading
import time
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from mapsage.distributed.store import LockedStore

from .main_thread import Activity, Position, find_stragglers, main_thread_position
from .mesh import Mesh

# How long the ranks may be silent, none reporting, before those that have not are named, seconds.
_GRACE_SECONDS = 3.0
_MOST_SECONDS = 30.0  # in all
_SHOWN_WAITING = 2  # ranks that wait elsewhere, as examples in an error
_PAUSE_SECONDS = (0.01, 0.5)  # between two looks into the store, growing


class Lane:
    """One channel, as the processes know it that take part.

    Args:
        name: Name of the channel; equal on all ranks and unlike that of any other.
        ranks: Global ranks, in group order.

    Attributes:
        key: Number made from the name.
        entered: Number of collectives that this rank has entered.
        inside: Whether it is in one now.
    """

    def __init__(self, name: str, ranks: Sequence[int]) -> None:
        self.name, self.ranks = name, list(ranks)
        self.key = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), 'big')
        self.entered, self.inside = 0, False


def is_late(paused: float, waited: float) -> bool:
    """Return whether a pause of a process may be what others have waited for. Pure.

    Args:
        paused: Seconds of the pause.
        waited: Seconds that a rank may be late.
    """
    return paused > 0 and paused >= waited / 2


def describe_pause(seconds: float) -> str:
    """Return words about a pause of a process, to stand behind its name. Pure."""
    return (f'did not run for {seconds:.0f} s: it was stopped, or its machine was, or native code '
            f'kept the interpreter to itself')


def describe_position(position: Position) -> str:
    """Return words about a main thread, to stand behind the name of its rank. Pure."""
    if not position.line:
        return ''
    doing = {Activity.RUNS: 'is', Activity.IN_BACKWARD: 'computes gradients',
             Activity.IN_COLLECTIVE: 'waits in a collective'}[position.activity]
    return f', and its main thread {doing} at {position.line}'


class Missing(NamedTuple):
    """Whom the ranks found missing.

    Attributes:
        ranks: Global ranks.
        silent: Whether their processes did not answer either.
        reasons: What is known of why, by rank.
    """

    ranks: List[int]
    silent: bool
    reasons: Dict[int, str]


class RollCall:
    """The lanes of this process, their failures, and the texts published about them.

    Args:
        store: Rendezvous store.
        prefix: Prefix of its keys there; equal on all ranks and unlike that of any other.
        rank: Global rank of this process.
        ranks: Number of ranks.
    """

    def __init__(self, store: LockedStore, prefix: str, rank: int, ranks: int) -> None:
        self.store, self.rank = store, rank
        self._prefix, self._ranks = prefix, ranks
        self._lanes: Dict[int, Lane] = {}
        self._failed: Dict[int, Dict[str, Any]] = {}
        self._reported: Set[int] = set()
        # Questions where the main threads are that this process has heard.
        self._questions: Set[str] = set()
        self._texts: Dict[Tuple[int, str], str] = {}
        self.mesh = Mesh(store, prefix, rank, ranks, self._hear)

    def open(self, name: str, ranks: Sequence[int], kind: Callable[..., Lane] = Lane,
             *options: Any) -> Lane:
        """Return the lane of this name, a ``kind(name, ranks, *options)``. No collective."""
        lane = kind(f'{self._prefix}/{name}', ranks, *options)
        return self._lanes.setdefault(lane.key, lane)

    def failed(self, lane: Lane) -> bool:
        """Return whether a rank has given up this lane."""
        return lane.key in self._failed

    def alarm(self, lane: Lane, lost: Dict[int, str], waited: float = 0.0) -> None:
        """Make known that this rank gives up the lane.

        Args:
            lane: Lane that failed.
            lost: Reason by global rank, for ranks whose connection broke.
            waited: Seconds that a rank may be late in the lane.
        """
        message = dict(kind='failed', lane=lane.key, name=lane.name, ranks=lane.ranks,
                       lost=[[rank, reason] for rank, reason in lost.items()], waited=waited)
        if self._note(message):
            self._spread(message, connect=False)  # before this process may end
            threading.Thread(target=self._pass_on, args=(message,), daemon=True).start()
            self._report(message)

    def find_missing(self, lane: Lane) -> Optional[Missing]:
        """Return whom the ranks found missing once one has given up; None if it cannot be known.

        It cannot where the rendezvous store has ended and no connection has broken. Where the rank
        that reads the reports has died, nobody is named unless a connection has broken.
        """
        unknown: Optional[Missing] = Missing([], False, {})
        try:
            if self.store.add(f'{lane.name}/namer', 1) == 1:
                missing = self._read_reports(lane)
                self.store.set(f'{lane.name}/missing', json.dumps(
                    [missing.ranks, missing.silent, list(missing.reasons.items())]))
                return missing
            deadline, pause = time.monotonic() + _MOST_SECONDS + _GRACE_SECONDS, _PAUSE_SECONDS[0]
            while time.monotonic() < deadline:
                found = self.store.find(f'{lane.name}/missing')
                if found is not None:
                    ranks, silent, reasons = json.loads(found)
                    return Missing(ranks, silent, dict(reasons))
                time.sleep(pause)
                pause = min(2 * pause, _PAUSE_SECONDS[1])
        except RuntimeError:  # the process that keeps the store has ended
            unknown = None
        lost = self._lost(lane)
        return Missing(list(lost), True, lost) if lost else unknown

    def ask_positions(self, question: str, ranks: Sequence[int]) -> Dict[int, Position]:
        """Return where the main threads of ranks are. A rank is left out if it does not answer.

        Args:
            question: Key in the store; a question can be asked once.
            ranks: Global ranks to wait for, for some seconds.
        """
        message = dict(kind='position', question=question, ranks=list(range(self._ranks)))
        if self._note(message):
            threading.Thread(target=self._pass_on, args=(message,), daemon=True).start()
        positions: Dict[int, Position] = {}
        deadline = time.monotonic() + _GRACE_SECONDS
        while len(positions) < len(ranks) and time.monotonic() < deadline:
            time.sleep(_PAUSE_SECONDS[0])
            for rank in ranks:
                position = self._read_position(question, rank) if rank not in positions else None
                if position is not None:
                    positions[rank] = position
        return positions

    def publish(self, lane: Lane, key: str, text: str) -> bool:
        """Keep a text for all ranks; return whether it is the first under its key."""
        message = dict(kind='text', lane=lane.key, ranks=lane.ranks, key=key, text=text)
        if self._note(message):
            self._spread(message, connect=False)
            threading.Thread(target=self._spread, args=(message,), daemon=True).start()
        try:
            first = self.store.add(f'{lane.name}/{key}/count', 1) == 1
            if first:
                self.store.set(f'{lane.name}/{key}/text', text)
            return first
        except RuntimeError:  # the process that keeps the store has ended
            return False

    def published(self, lane: Lane, key: str) -> Optional[str]:
        """Return the text that was published first, or None."""
        try:
            found = self.store.find(f'{lane.name}/{key}/text')
        except RuntimeError:  # the process that keeps the store has ended
            found = None
        return self._texts.get((lane.key, key)) if found is None else found

    def _hear(self, message: Dict[str, Any]) -> None:
        """Take a message of another rank, on the mesh's thread."""
        if self._note(message):
            # That thread must go on reading: telling others may have to wait.
            threading.Thread(target=self._pass_on, args=(message,), daemon=True).start()

    def _note(self, message: Dict[str, Any]) -> bool:
        """Remember a message; return whether it is new."""
        with self.mesh.news:
            if message['kind'] == 'failed':
                first = self._failed.setdefault(message['lane'], message) is message
            elif message['kind'] == 'position':
                first = message['question'] not in self._questions
                self._questions.add(message['question'])
            else:
                key = message['lane'], message['key']
                first = key not in self._texts
                self._texts.setdefault(key, message['text'])
            self.mesh.news.notify_all()
            return first

    def _pass_on(self, message: Dict[str, Any]) -> None:
        self._spread(message, connect=False)
        if message['kind'] == 'failed':
            self._report(message)
        if message['kind'] == 'position':
            try:
                self._write_position(message['question'])
            except RuntimeError:  # the process that keeps the store has ended
                return
        self._spread(message)

    def _spread(self, message: Dict[str, Any], connect: bool = True) -> None:
        """Tell the ranks at the distances 1, 2, 4, ... of this one."""
        ranks = message['ranks']
        if self.rank not in ranks:
            return
        me, step = ranks.index(self.rank), 1
        while step < len(ranks):
            for rank in {ranks[(me + step) % len(ranks)], ranks[(me - step) % len(ranks)]}:
                if rank != self.rank:
                    self.mesh.tell(rank, message, connect)
            step *= 2

    def _report(self, message: Dict[str, Any]) -> None:
        """Write how far this rank is: odd numbers for a rank that is in none of the collectives."""
        with self.mesh.news:
            if message['lane'] in self._reported:
                return
            self._reported.add(message['lane'])
        lane = self._lanes.get(message['lane'])
        entered, inside = (lane.entered, lane.inside) if lane else (0, False)
        paused = self.mesh.paused(message['waited'] + _MOST_SECONDS)
        try:
            if is_late(paused, message['waited']):
                self.store.add(f'{message["name"]}/paused/{self.rank}', int(paused))
            for rank in set(message['ranks']) & set(self.mesh.lost):
                self.store.add(f'{message["name"]}/unconnected/{rank}', 1)
            self._write_position(message['name'])
            self.store.add(f'{message["name"]}/at/{self.rank}', 2 * entered + 1 + inside)
            self.store.add(f'{message["name"]}/reported', 1)
        except RuntimeError:  # the process that keeps the store has ended
            pass

    def _lost(self, lane: Lane) -> Dict[int, str]:
        """Return the ranks that had ended when the lane failed, as the first to notice tells."""
        lost = {int(rank): reason for rank, reason in self._failed[lane.key]['lost']}
        return lost or {rank: why for rank, why in self.mesh.reasons().items()
                        if rank in lane.ranks}

    def _read_reports(self, lane: Lane) -> Missing:
        self._await_reports(lane)
        far = {rank: self.store.add(f'{lane.name}/at/{rank}', 0) for rank in lane.ranks}
        silent = [rank for rank in lane.ranks if not far[rank]]
        most = max((value - 1) // 2 for value in far.values())
        behind = [rank for rank in lane.ranks if far[rank] and (far[rank] - 1) // 2 < most]
        # A broadcast ends sooner on some ranks, so a rank that waits may be one collective behind.
        elsewhere = [rank for rank in behind if far[rank] % 2]
        reasons = {**self.mesh.reasons(), **self._lost(lane)}
        if not silent:
            apart = self._read_pauses(lane) or self._read_broken_connections(lane)
            if apart:
                return Missing(list(apart), False, apart)
        if silent:
            return Missing(silent, True, {
                rank: reasons.get(rank) or f'{self.mesh.locate(rank)} does not answer'
                for rank in silent})
        positions = {rank: self._read_position(lane.name, rank) or Position(Activity.RUNS, '')
                     for rank in elsewhere or behind}
        stragglers = find_stragglers(positions)
        waiting = [rank for rank in positions if rank not in stragglers]
        return Missing(stragglers, False, {
            rank: reasons.get(rank) or f'{self.mesh.locate(rank)} answers'
            f'{describe_position(positions[rank])}'
            for rank in [*stragglers, *waiting[:_SHOWN_WAITING]]})

    def _write_position(self, prefix: str) -> None:
        self.store.set(f'{prefix}/position/{self.rank}', json.dumps(main_thread_position()))

    def _read_position(self, prefix: str, rank: int) -> Optional[Position]:
        text = self.store.find(f'{prefix}/position/{rank}')
        if text is None:
            return None
        activity, line = json.loads(text)
        return Position(Activity(activity), line)

    def _read_pauses(self, lane: Lane) -> Dict[int, str]:
        """Return the ranks that did not run for as long as others waited, with words about it."""
        paused = {rank: self.store.add(f'{lane.name}/paused/{rank}', 0) for rank in lane.ranks}
        return {rank: f'{self.mesh.locate(rank)} {describe_pause(seconds)}'
                for rank, seconds in paused.items() if seconds}

    def _read_broken_connections(self, lane: Lane) -> Dict[int, str]:
        """Return the ranks that most others lost, though all of them answer, with words about it.

        A connection has two ends. That of others, who are just not there yet, is no reason.
        """
        if not self._lost(lane):
            return {}
        counts = {rank: self.store.add(f'{lane.name}/unconnected/{rank}', 0)
                  for rank in lane.ranks}
        most = max(counts.values())
        return {rank: f'{self.mesh.locate(rank)} answers, and {count} rank(s) have lost the '
                      f'connection with it' for rank, count in counts.items()
                if count and count == most}

    def _await_reports(self, lane: Lane) -> None:
        """Wait until all ranks have reported that can, or none has for a while."""
        end = time.monotonic() + _MOST_SECONDS
        quiet_until, seen, ended = time.monotonic() + _GRACE_SECONDS, 0, 0
        pause, known = _PAUSE_SECONDS[0], -1
        while time.monotonic() < min(end, quiet_until):
            count = self.store.add(f'{lane.name}/reported', 0)
            gone = set(self._lost(lane)) | {each for each in list(self.mesh.lost)
                                            if each in lane.ranks}
            if (count, len(gone)) != (seen, known):
                quiet_until = time.monotonic() + _GRACE_SECONDS if count != seen else quiet_until
                pause = _PAUSE_SECONDS[0]
                seen, known = count, len(gone)
                ended = sum(not self.store.add(f'{lane.name}/at/{rank}', 0) for rank in gone)
            if seen + ended >= len(lane.ranks):
                return
            time.sleep(pause)
            pause = min(2 * pause, _PAUSE_SECONDS[1])
