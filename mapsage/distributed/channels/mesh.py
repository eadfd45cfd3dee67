"""The connections of a process to other ranks, which all its channels share.

A gloo group connects every rank with every other, and two threads cannot use one group in different
orders. Here a process has one connection to each rank that it communicates with, about
``2 * log2(ranks)``, opened when it is first needed. The header of a frame names the channel, the
collective and the message (``mesh_link.py``), so frames of several channels arrive in any order.

A single thread per process reads all connections, whatever the other threads do. So it notices the
end of a peer, and answers for a rank whose main thread is busy.
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
from typing import (
    Callable,
    Dict,
    Iterable,
    List,
    NamedTuple,
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
from .mesh_link import CONTROL, HEADER, POLL_SECONDS, Buffer, MeshLink, Message
from .pauses import Pauses

# First pause before looking again for the address of a rank that has just started.
_FIRST_POLL_SECONDS = 0.005
# Time for a connection and its handshake: of a thread that must wait for the connection anyway, and
# of a thread that can do without it.
_CONNECT_SECONDS, _TRY_SECONDS = 5.0, 1.0
# Purpose of the handshake.
_PURPOSE = 'mesh'


class _Address(NamedTuple):
    """The entry of a rank in the rendezvous store.

    Attributes:
        host: Numeric address.
        port: Port of the listener.
        listener: Number of the listener, see :func:`new_listener`, in hexadecimal digits.
        host_name: Name of the host, for messages.
    """

    host: str
    port: int
    listener: str
    host_name: str


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

    Making a mesh is not collective: it starts to listen and writes its address into the store.

    Args:
        store: Rendezvous store.
        prefix: Prefix of the mesh's keys in the store; equal on all ranks.
        rank: Global rank of this process.
        ranks: Number of ranks. A peer that claims another rank is disconnected.
        control: Function that takes a message sent by :meth:`tell`, on the reading thread.

    Attributes:
        lost: Reason of the end of every peer whose connection has ended, by global rank.
        hosts: Names of the known hosts, by global rank.
        pauses: Pauses of this process, as the reading thread notices them.
        news: Condition that is notified about every frame and every loss.
        messages: Number of frames that this process has sent.
        bytes: Number of bytes that this process has sent, headers included.

    Raises:
        SecretError: If this process has no secret of the job, see :func:`job_secret`.
    """

    def __init__(
        self,
        store: LockedStore,
        prefix: str,
        rank: int,
        ranks: int,
        control: Callable[[Message], None],
    ) -> None:
        self._store, self._prefix, self._rank, self._control = store, prefix, rank, control
        self._ranks, self._secret = ranks, job_secret(os.environ)
        self.lost: Dict[int, str] = {}
        self.hosts: Dict[int, str] = {rank: socket.gethostname()}
        self.news = threading.Condition()
        self.messages = self.bytes = 0
        self._frames: Dict[Tuple[int, int, int, int], bytearray] = {}
        self._links: Dict[int, MeshLink] = {}
        # Number of connections by rank: two ranks that connect to each other at once have two.
        self._open: Dict[int, int] = {}
        self._sockets: Set[socket.socket] = set()
        self._connecting: Dict[int, threading.Lock] = {}
        self._last_words: Dict[int, str] = {}
        self._closed = False
        host, number = reachable_host(), new_listener()
        listener = bind_listener(host)
        self._selector = selectors.DefaultSelector()
        # A listener never becomes writable. The event is its end: when the guard closes it, the
        # reading thread wakes up.
        self._selector.register(listener, selectors.EVENT_WRITE, None)
        self._guard = Guard(
            listener,
            lambda: ListenerHandshake(self._secret, _PURPOSE, number),
            lambda connection: self._watch(MeshLink(connection, None, '')),
        )
        store.set(
            f'{prefix}/address/{rank}',
            json.dumps([host, listener.getsockname()[1], number.hex(), socket.gethostname()]),
        )
        self.pauses = Pauses()
        threading.Thread(target=self._read, daemon=True, name='mapsage mesh').start()
        _meshes.add(self)

    def send(
        self, rank: int, lane: int, number: int, tag: int, data: Buffer, check: Callable[[], object]
    ) -> None:
        """Send bytes to a rank.

        Args:
            rank: Global rank.
            lane: Number of the channel.
            number: Number of the collective in the channel.
            tag: Number that tells apart the messages of the collective.
            data: Bytes to send.
            check: Function that is called repeatedly while the rank cannot be reached or reads
                nothing. It raises to end the wait.

        Raises:
            LinkLostError: If the rank has ended.
        """
        link = self._link(rank, check)
        try:
            self._send(link, HEADER.pack(lane, number, tag, len(data)), data, check)
        except OSError as error:
            self._lose(link, str(error))
            with self.news:
                self.lost.setdefault(rank, f'its process has ended ({error})')
            self._raise_lost(rank)

    def receive(
        self, rank: int, lane: int, number: int, tag: int, check: Callable[[], object]
    ) -> bytearray:
        """Return the bytes that a rank has sent with these numbers, see :meth:`send`."""
        key = (lane, number, tag, rank)
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
            # Without a connection, this process would not notice the end of the rank.
            if rank not in self._links:
                self._try_link(rank, _TRY_SECONDS)

    def tell(self, rank: int, message: Message, connect: bool = True) -> None:
        """Send a message to a rank's process, if it can be reached. Never raises, hardly waits.

        Args:
            rank: Global rank.
            message: Message to send.
            connect: Whether to connect to the rank if there is no connection yet.
        """
        deadline = time.monotonic() + POLL_SECONDS

        def check() -> None:
            if time.monotonic() > deadline:
                raise OSError('it takes nothing')

        try:
            if connect:
                self._try_link(rank, _TRY_SECONDS)
            link = self._links.get(rank)
            if link is not None:
                data = json.dumps(message).encode()
                self._send(link, HEADER.pack(CONTROL, 0, 0, len(data)), data, check)
        except (OSError, RuntimeError, ValueError, KeyError):
            pass

    def probe(self, ranks: Iterable[int]) -> None:
        """Connect to ranks, so that :meth:`reasons` includes the ranks whose process has ended.

        This ends after a few seconds. Hosts that do not answer use up that time, so ranks later in
        the list may be left out.
        """
        end = time.monotonic() + _CONNECT_SECONDS
        for rank in ranks:
            if time.monotonic() > end:
                break
            try:
                self._try_link(rank, _TRY_SECONDS)
            # The process has ended, which reasons() includes now.
            except (OSError, RuntimeError, ValueError, KeyError):
                pass

    def describe(self, rank: int) -> str:
        """Return 'rank R on host H', or 'rank R' if its host is not known."""
        return f'rank {rank}' + (f' on host {self.hosts[rank]}' if rank in self.hosts else '')

    def locate(self, rank: int) -> str:
        """Return 'rank R on host H'; a host that is not known yet is read from the store."""
        address = None if rank in self.hosts else self._address(rank)
        if address is not None:
            self.hosts[rank] = address.host_name
        return self.describe(rank)

    def reasons(self) -> Dict[int, str]:
        """Return a text with rank, host and reason for every rank whose connection has ended."""
        return {
            rank: f'{self.describe(rank)}: {reason}' for rank, reason in list(self.lost.items())
        }

    def refused(self) -> Optional[Tuple[List[int], str]]:
        """Return two ranks that cannot prove themselves to each other, and the reason, or None."""
        try:
            text = self._store.find(f'{self._prefix}/refused')
        # The process that keeps the store has ended.
        except RuntimeError:
            return None
        if text is None:
            return None
        ranks, reason = json.loads(text)
        return ranks, reason

    def drop(self, lane: int) -> None:
        """Drop the frames that have arrived for a channel that has failed."""
        with self.news:
            for key in [key for key in self._frames if key[0] == lane]:
                del self._frames[key]

    def say_why(self, text: str) -> None:
        """Send the error that ends this process to the connected peers."""
        for rank in list(self._links):
            self.tell(rank, Message(kind='last words', text=text), connect=False)

    def close(self) -> None:
        """Disconnect; if an error ends the interpreter, send it to the peers first."""
        if self._closed:
            return
        error = getattr(sys, 'last_value', None)
        if isinstance(error, Exception):
            self.say_why(error_text(error))
        self._closed = True
        self._guard.close()
        for connection in list(self._sockets):
            # Shutting a connection down wakes the reading thread.
            try:
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
        self.forget()

    def forget(self) -> None:
        """Close the descriptors of this process; a parent process keeps its connections.

        A forked loader worker would otherwise keep a connection open for a rank that has died.
        """
        self._closed = True
        for connection in list(self._sockets):
            connection.close()
        self._selector.close()

    def _watch(self, link: MeshLink) -> None:
        self._sockets.add(link.socket)
        self._selector.register(link.socket, selectors.EVENT_READ, link)

    def _send(self, link: MeshLink, head: bytes, data: Buffer, check: Callable[[], object]) -> None:
        """Send a frame over a link; the link counts as lost if it is torn."""
        try:
            link.send(head, data, check)
        except BaseException as error:
            if link.torn:
                self._lose(
                    link, str(error) if isinstance(error, OSError) else 'it took no messages'
                )
            raise
        self.messages += 1
        self.bytes += len(head) + len(data)

    def _raise_lost(self, rank: int) -> NoReturn:
        raise LinkLostError(rank, f'{self.describe(rank)}: {self.lost[rank]}')

    def _link(self, rank: int, check: Callable[[], object]) -> MeshLink:
        """Return the connection to a rank; wait until it can be made, or ``check`` raises."""
        pause = _FIRST_POLL_SECONDS
        while True:
            link = self._try_link(rank, _CONNECT_SECONDS)
            if link is not None:
                return link
            check()
            with self.news:
                self.news.wait(pause)
            pause = min(2 * pause, POLL_SECONDS)

    def _try_link(self, rank: int, seconds: float) -> Optional[MeshLink]:
        """Return the connection to a rank; None if it cannot be made now.

        Raises:
            LinkLostError: If the rank has ended.
        """
        with self.news:
            one_at_a_time = self._connecting.setdefault(rank, threading.Lock())
        while True:
            link = self._links.get(rank)
            if link is not None:
                return link
            if rank in self.lost:
                self._raise_lost(rank)
            with one_at_a_time:
                if rank not in self._links and self._connect(rank, seconds):
                    continue
            if rank not in self._links and rank not in self.lost:
                return None

    def _connect(self, rank: int, seconds: float) -> bool:
        """Connect to a rank, if its address is in the store.

        Returns:
            Whether the rank is either connected or known to have ended.
        """
        address = self._address(rank)
        if address is None:
            return False
        self.hosts[rank] = address.host_name
        try:
            connection = connect(
                (address.host, address.port),
                ClientHandshake(self._secret, _PURPOSE, bytes.fromhex(address.listener)),
                seconds,
            )
            link = MeshLink(connection, rank, address.host_name)
            hello = json.dumps(Message(rank=self._rank, host=socket.gethostname()))
            link.send(HEADER.pack(CONTROL, 0, 0, len(hello)), hello.encode(), lambda: None)
        except (SecretMismatchError, OtherVersionError) as error:
            text = f'{self.describe(self._rank)} cannot talk with {self.describe(rank)}: {error}'
            self._store.set(f'{self._prefix}/refused', json.dumps([[self._rank, rank], text]))
            self._record_loss(rank, str(error))
            return True
        except (
            ConnectionRefusedError,
            ConnectionResetError,
            BrokenPipeError,
            HandshakeError,
        ) as error:
            self._record_loss(rank, f'its process has ended ({error})')
            return True
        # The host of the rank does not answer, or not yet.
        except OSError as error:
            check_limit(error)
            return False
        with self.news:
            # First, because a thread that finds the link in the table may already lose it.
            self._watch(link)
            self._links.setdefault(rank, link)
            self._open[rank] = self._open.get(rank, 0) + 1
        return True

    def _record_loss(self, rank: int, reason: str) -> None:
        with self.news:
            self.lost.setdefault(rank, reason)
            self.news.notify_all()

    def _address(self, rank: int) -> Optional[_Address]:
        text = self._store.find(f'{self._prefix}/address/{rank}')
        return None if text is None else _Address(*json.loads(text))

    def _read(self) -> None:
        """Read all connections until the mesh is closed; the reading thread runs this."""
        ended: Dict[MeshLink, str] = {}
        until = 0.0
        while not self._closed:
            self.pauses.tick()
            try:
                # With a timeout, because a peer with an invalid frame counts as ended, although its
                # connection may stay open and cause no further event.
                events = self._selector.select(POLL_SECONDS)
                ready = [key for key, _ in events if key.data not in ended]
            # The mesh was closed.
            except (OSError, ValueError):
                return
            # An end counts after all bytes that have arrived are read, because a peer may have sent
            # its last frame over another connection. A steady stream delays it only until `until`.
            if ended and (not ready or time.monotonic() > until):
                for link, reason in ended.items():
                    self._lose(link, reason)
                ended = {}
            for key in ready:
                if self._closed or key.data is None:
                    return
                try:
                    self._take(key.data)
                # Whatever a peer sends ends its connection only, not the thread of all connections.
                except Exception as error:
                    until = until if ended else time.monotonic() + POLL_SECONDS
                    ended[key.data] = str(error)

    def _take(self, link: MeshLink) -> None:
        """Read from a connection, and store or handle a frame that is complete."""
        frame = link.read()
        if frame is None:
            return
        (lane, number, tag, _), data = frame
        if lane != CONTROL:
            assert link.rank is not None
            with self.news:
                self._frames[lane, number, tag, link.rank] = data
                self.news.notify_all()
            return
        message: Message = json.loads(data)
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
        """Close a connection; its rank is lost if this was the last connection to it."""
        if self._closed:
            return
        try:
            self._selector.unregister(link.socket)
        # Another thread has lost the link already.
        except (KeyError, ValueError):
            return
        if link.rank is not None:
            last_words = self._last_words.get(link.rank)
            description = (
                f'it ended with {last_words}'
                if last_words
                else f'its process has ended ({reason or "it closed the connection"})'
            )
            with self.news:
                self._open[link.rank] -= 1
                if not self._open[link.rank]:
                    self.lost.setdefault(link.rank, description)
                elif self._links.get(link.rank) is link:
                    del self._links[link.rank]
                self.news.notify_all()
        self._sockets.discard(link.socket)
        link.socket.close()


_meshes: weakref.WeakSet[Mesh] = weakref.WeakSet()


def _forget_in_child() -> None:
    for mesh in list(_meshes):
        mesh.forget()


os.register_at_fork(after_in_child=_forget_in_child)
