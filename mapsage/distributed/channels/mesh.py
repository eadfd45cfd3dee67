"""The connections between ranks over which their channels talk: few, opened when first needed.

A gloo group connects every rank with every other, and one group cannot serve two threads that talk
in different orders. Here all channels of a process share one connection to each rank that it talks
to, about ``2 * log2(ranks)`` of them. A frame says which channel, which of its collectives and
which part of it the data belongs to, so that it does not matter who comes first. One thread a
process reads, whatever the others do: it also sees a peer end, and answers for a rank that is busy.
"""
from __future__ import annotations

import json
import os
import selectors
import socket
import sys
import threading
import time
import weakref
from collections import deque
from typing import (
    Any,
    Callable,
    Deque,
    Dict,
    Iterable,
    List,
    NoReturn,
    Optional,
    Set,
    Tuple,
)

from mapsage.distributed.descriptors import check_limit
from mapsage.distributed.host_address import reachable_host
from mapsage.distributed.store import LockedStore
from mapsage_launcher.trust.guard import Guard, bind_listener
from mapsage_launcher.trust.handshake import (
    ClientHandshake,
    HandshakeError,
    ListenerHandshake,
    OtherVersionError,
    SecretMismatchError,
    connect,
    new_listener,
)
from mapsage_launcher.trust.job_secret import job_secret

from .channel import error_text
from .mesh_link import CONTROL, HEADER, POLL_SECONDS, MeshLink

_FIRST_POLL_SECONDS = 0.005  # for the address of a rank that has just started
# For a connection and its handshake: of who waits for it anyway, and of who goes on without it.
_CONNECT_SECONDS, _TRY_SECONDS = 5.0, 1.0
_PURPOSE = 'mesh'  # of the handshake
# The reading thread notices that its process did not run for this long, in seconds.
_PAUSE_SECONDS = 2.0


class LinkLostError(RuntimeError):
    """A rank has ended or closed its connection.

    Attributes:
        rank: Global rank of the peer.
    """

    def __init__(self, rank: int, reason: str) -> None:
        super().__init__(reason)
        self.rank = rank


class Mesh:
    """Connections of this process to other ranks, and the frames that have arrived on them.

    Making one is no collective: it listens and leaves its address in the store.

    Args:
        store: Rendezvous store.
        prefix: Prefix of the mesh's keys in it; equal on all ranks.
        rank: Global rank of this process.
        ranks: Number of ranks; who connects as another one is closed.
        control: Function that takes a message sent by :meth:`tell`, on the reading thread.

    Attributes:
        lost: Reason by global rank for each peer whose connection has ended.
        news: Condition that is notified about every frame and every loss.
        messages, bytes: What this process has sent, headers included.

    Raises:
        SecretError: If this process has no secret of the job, see :func:`job_secret`.
    """

    def __init__(self, store: LockedStore, prefix: str, rank: int, ranks: int,
                 control: Callable[[Dict[str, Any]], None]) -> None:
        self._store, self._prefix, self._rank, self._control = store, prefix, rank, control
        self._ranks, self._secret = ranks, job_secret(os.environ)
        self.lost: Dict[int, str] = {}
        self.hosts: Dict[int, str] = {rank: socket.gethostname()}
        self.news = threading.Condition()
        self.messages = self.bytes = 0
        self._frames: Dict[Tuple[int, int, int, int], bytearray] = {}
        self._links: Dict[int, MeshLink] = {}
        self._open: Dict[int, int] = {}  # connections by rank
        self._sockets: Set[socket.socket] = set()  # of all connections; a pair may have two
        self._connecting: Dict[int, threading.Lock] = {}
        self._last_words: Dict[int, str] = {}
        self._pauses: Deque[Tuple[float, float]] = deque(maxlen=100)  # end, seconds
        self._closed = False
        host, number = reachable_host(), new_listener()
        listener = bind_listener(host)
        self._selector = selectors.DefaultSelector()
        # It is never writable. Its end, when the guard closes it, wakes the reading thread.
        self._selector.register(listener, selectors.EVENT_WRITE, None)
        self._guard = Guard(
            listener, lambda: ListenerHandshake(self._secret, _PURPOSE, number),
            lambda connection: self._watch(MeshLink(connection, None, '')))
        store.set(f'{prefix}/address/{rank}', json.dumps(
            [host, listener.getsockname()[1], number.hex(), socket.gethostname()]))
        self._awake = time.monotonic()  # when the reading thread ran the last time
        threading.Thread(target=self._read, daemon=True, name='mapsage mesh').start()
        _meshes.add(self)

    def send(self, rank: int, lane: int, number: int, part: int, data: Any,
             check: Callable[[], Any]) -> None:
        """Send bytes to a rank.

        Args:
            rank: Global rank.
            lane: Number of the channel.
            number: Number of the collective in it.
            part: Number of the message in that.
            data: Bytes.
            check: Function called now and then while the rank is not there or takes nothing; it
                raises when the wait shall end.

        Raises:
            LinkLostError: If the rank has ended.
        """
        link = self._link(rank, check)
        try:
            self._send(link, HEADER.pack(lane, number, part, len(data)), data, check)
        except OSError as error:
            self._lose(link, str(error))
            with self.news:
                self.lost.setdefault(rank, f'its process has ended ({error})')
            self._raise_lost(rank)

    def receive(self, rank: int, lane: int, number: int, part: int,
                check: Callable[[], Any]) -> bytearray:
        """Return what a rank has sent with these numbers, see :meth:`send`."""
        key = (lane, number, part, rank)
        while True:
            with self.news:
                if key not in self._frames:
                    check()
                    if rank not in self.lost:
                        self.news.wait(POLL_SECONDS)
                if key in self._frames:
                    return self._frames.pop(key)
                check()
            if rank in self.lost:
                self._raise_lost(rank)
            if rank not in self._links:  # so that its end is noticed
                self._link(rank, check, patient=False)

    def tell(self, rank: int, message: Dict[str, Any], connect: bool = True) -> None:
        """Send a message to a rank's process if it can be done; never raises, hardly waits."""
        deadline = time.monotonic() + POLL_SECONDS

        def check() -> None:
            if time.monotonic() > deadline:
                raise OSError('it takes nothing')
        try:
            if connect:
                self._link(rank, check, patient=False)
            link = self._links.get(rank)
            if link is not None:
                data = json.dumps(message).encode()
                self._send(link, HEADER.pack(CONTROL, 0, 0, len(data)), data, check)
        except (OSError, RuntimeError, ValueError, KeyError):
            pass

    def probe(self, ranks: Iterable[int]) -> None:
        """Connect to ranks, so that :meth:`reasons` has those whose process has ended.

        Hosts that do not answer take the time of one; the ranks behind them are left out.
        """
        end = time.monotonic() + _CONNECT_SECONDS
        for rank in ranks:
            if time.monotonic() > end:
                break
            try:
                self._link(rank, lambda: None, patient=False)
            except (OSError, RuntimeError, ValueError, KeyError):  # it is known to have ended
                pass

    def where(self, rank: int) -> str:
        """Return words for a rank with the name of its host, where that is known."""
        return f'rank {rank}' + (f' on host {self.hosts[rank]}' if rank in self.hosts else '')

    def locate(self, rank: int) -> str:
        """Return words for a rank with the name of its host, which may be in the store."""
        address = None if rank in self.hosts else self._address(rank)
        if address is not None:
            self.hosts[rank] = address[3]
        return self.where(rank)

    def reasons(self) -> Dict[int, str]:
        """Return the ranks whose connection has ended, with words for who and why."""
        return {rank: f'{self.where(rank)}: {why}' for rank, why in list(self.lost.items())}

    def refused(self) -> Optional[Tuple[List[int], str]]:
        """Return two ranks that cannot prove themselves to each other, and why; None if all can."""
        try:
            text = self._store.find(f'{self._prefix}/refused')
        except RuntimeError:  # the process that keeps the store has ended
            return None
        return None if text is None else tuple(json.loads(text))

    def paused(self, seconds: float) -> float:
        """Return the longest time in which this process did not run, of those that ended lately.

        It was stopped, its machine was, or code in it kept the interpreter to itself.

        Args:
            seconds: How long ago the pause may have ended.
        """
        since = time.monotonic() - seconds
        # read by the thread that keeps them, which may not have had the time to note the last one
        open_pause = time.monotonic() - self._awake
        pauses = [pause for end, pause in list(self._pauses) if end >= since]
        return max([*pauses, open_pause if open_pause >= _PAUSE_SECONDS else 0.0])

    def connections(self) -> int:
        """Return how many ranks this process is connected with."""
        return len(self._links)

    def drop(self, lane: int) -> None:
        """Forget what has arrived for a channel that has failed."""
        with self.news:
            for key in [key for key in self._frames if key[0] == lane]:
                del self._frames[key]

    def say_why(self, text: str) -> None:
        """Tell connected peers with what error this process ends."""
        for rank in list(self._links):
            self.tell(rank, dict(kind='last words', text=text), connect=False)

    def close(self) -> None:
        """Disconnect, and say why if an error ends the interpreter."""
        if self._closed:
            return
        error = getattr(sys, 'last_value', None)
        if isinstance(error, Exception):
            self.say_why(error_text(error))
        self._closed = True
        self._guard.close()
        for each in list(self._sockets):
            try:
                each.shutdown(socket.SHUT_RDWR)  # wakes the reading thread
            except OSError:
                pass
        self.forget()

    def forget(self) -> None:
        """Close the descriptors of this process and leave the connections to the one it came from.

        A forked loader worker must not keep a connection open for a rank that has died.
        """
        self._closed = True
        for each in list(self._sockets):
            each.close()
        self._selector.close()

    def _watch(self, link: MeshLink) -> None:
        self._sockets.add(link.socket)
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _send(self, link: MeshLink, head: bytes, data: Any, check: Callable[[], Any]) -> None:
        try:
            link.send(head, data, check)
        except BaseException as error:
            if link.torn:
                self._lose(link, str(error) if isinstance(error, OSError) else
                           'it took no messages')
            raise
        self.messages += 1
        self.bytes += len(head) + len(data)

    def _raise_lost(self, rank: int) -> NoReturn:
        raise LinkLostError(rank, f'{self.where(rank)}: {self.lost[rank]}')

    def _link(self, rank: int, check: Callable[[], Any], patient: bool = True) -> Any:
        """Return the connection to a rank; without patience None where it cannot be made now."""
        with self.news:
            waiting = self._connecting.setdefault(rank, threading.Lock())
        pause = _FIRST_POLL_SECONDS
        while True:
            if rank in self._links:
                return self._links[rank]
            if rank in self.lost:
                self._raise_lost(rank)
            with waiting:
                if rank not in self._links and self._connect(
                        rank, _CONNECT_SECONDS if patient else _TRY_SECONDS):
                    continue
            if rank in self._links or rank in self.lost:
                continue
            if not patient:
                return None
            check()
            with self.news:
                self.news.wait(pause)
            pause = min(2 * pause, POLL_SECONDS)

    def _connect(self, rank: int, seconds: float) -> bool:
        """Connect to a rank that has left its address; return whether anything is known now."""
        address = self._address(rank)
        if address is None:
            return False
        host, port, number, name = address
        self.hosts[rank] = name
        try:
            connection = connect((host, port), ClientHandshake(
                self._secret, _PURPOSE, bytes.fromhex(number)), seconds)
            link = MeshLink(connection, rank, name)
            hello = json.dumps(dict(rank=self._rank, host=socket.gethostname()))
            link.send(HEADER.pack(CONTROL, 0, 0, len(hello)), hello.encode(), lambda: None)
        except (SecretMismatchError, OtherVersionError) as error:
            text = f'{self.where(self._rank)} cannot talk with {self.where(rank)}: {error}'
            self._store.set(f'{self._prefix}/refused', json.dumps([[self._rank, rank], text]))
            return self._cannot_connect(rank, str(error))
        except (ConnectionRefusedError, ConnectionResetError, BrokenPipeError,
                HandshakeError) as error:
            return self._cannot_connect(rank, f'its process has ended ({error})')
        except OSError as error:  # its host does not answer, or not yet
            check_limit(error)
            return False
        with self.news:
            self._watch(link)  # first: who finds the link may lose it
            self._links.setdefault(rank, link)
            self._open[rank] = self._open.get(rank, 0) + 1
        return True

    def _cannot_connect(self, rank: int, reason: str) -> bool:
        with self.news:
            self.lost.setdefault(rank, reason)
            self.news.notify_all()
        return True

    def _address(self, rank: int) -> Any:
        text = self._store.find(f'{self._prefix}/address/{rank}')
        return None if text is None else json.loads(text)

    def _read(self) -> None:
        ended: Dict[MeshLink, str] = {}
        until = 0.0
        while not self._closed:
            self._note_pause()
            try:
                # With a limit: a peer that sent what is none of ours may leave its connection open.
                events = self._selector.select(POLL_SECONDS)
                ready = [key for key, _ in events if key.data not in ended]
            except (OSError, ValueError):  # closed
                return
            # An end counts once all is read that has arrived: a peer may have sent its last frame
            # over another connection. What streams on without a pause cannot put it off for long.
            if ended and (not ready or time.monotonic() > until):
                for link, reason in ended.items():
                    self._lose(link, reason)
                ended = {}
            for key in ready:
                if self._closed or key.data is None:
                    return
                try:
                    self._take(key.data)
                except Exception as error:  # this thread must go on for the other ranks
                    until = until if ended else time.monotonic() + POLL_SECONDS
                    ended[key.data] = str(error)

    def _note_pause(self) -> None:
        now = time.monotonic()
        if now - self._awake >= _PAUSE_SECONDS:
            self._pauses.append((now, now - self._awake))
        self._awake = now

    def _take(self, link: MeshLink) -> None:
        frame = link.read()
        if frame is None:
            return
        (lane, number, part, _), data = frame
        if lane != CONTROL:
            assert link.rank is not None
            with self.news:
                self._frames[lane, number, part, link.rank] = data
                self.news.notify_all()
            return
        message = json.loads(data)
        if link.rank is None:
            rank = message['rank']
            if type(rank) is not int or rank == self._rank or not 0 <= rank < self._ranks:
                raise EOFError
            link.rank, link.host = rank, str(message['host'])
            with self.news:
                self.hosts[link.rank] = link.host
                self._links.setdefault(link.rank, link)
                self._open[link.rank] = self._open.get(link.rank, 0) + 1
                self.news.notify_all()
        elif message['kind'] == 'last words':
            self._last_words[link.rank] = message['text']
        else:
            self._control(message)

    def _lose(self, link: MeshLink, reason: str) -> None:
        if self._closed:
            return
        try:
            self._selector.unregister(link.socket)
        except (KeyError, ValueError):
            return  # by another thread, already
        if link.rank is not None:
            words = self._last_words.get(link.rank)
            why = (f'it ended with {words}' if words else
                   f'its process has ended ({reason or "it closed the connection"})')
            with self.news:
                self._open[link.rank] -= 1
                # two ranks that connect to each other at once have two
                if not self._open[link.rank]:
                    self.lost.setdefault(link.rank, why)
                elif self._links.get(link.rank) is link:
                    del self._links[link.rank]
                self.news.notify_all()
        self._sockets.discard(link.socket)
        link.socket.close()


_meshes: Any = weakref.WeakSet()


def _forget_all() -> None:
    for mesh in list(_meshes):
        mesh.forget()


os.register_at_fork(after_in_child=_forget_all)
