"""A connection of two processes for messages, which is opened again when it breaks.

States of a link: connecting, connected but unconfirmed (``_connection``), greeted,
when both ends know that they are connected and messages can be sent, and done. Messages of a broken
connection are lost; the receiver hears of it and asks again. Nearly everything runs in the hub's
thread, see the comment in :class:`Link`.
"""

from __future__ import annotations

import abc
import selectors
import socket
import threading
import time
from collections import deque
from typing import Callable, Deque, NamedTuple, Optional, Tuple

import torch

from mapsage.extras.streaming.source import StreamingError
from mapsage_launcher.trust.handshake import ClientHandshake, HandshakeError, connect

from .connection import Connection
from .header import Header, Kind
from .hub import Hub

# Seconds until a lost connection is opened again: first, and at most. The pause doubles with every
# attempt, and starts again at the first value after a connection that lasted _STABLE seconds.
_FIRST_PAUSE, _MAX_PAUSE, _STABLE = 0.2, 30.0, 60.0
# Seconds to wait for the first answer of the peer before another connection is opened.
_FIRST_ANSWER = 10.0


class LinkError(StreamingError):
    """The peer of a link did not come, fell silent, ended or sent something unreadable."""


class Dial(NamedTuple):
    """The address of a peer, and the first bytes of every connection to it.

    Attributes:
        address: Host and port.
        secret, purpose, listener: Arguments of :class:`ClientHandshake`.
        hello: Bytes that the peer expects after the handshake, uint8 (n,).
    """

    address: Tuple[str, int]
    secret: bytes
    purpose: str
    listener: bytes
    hello: torch.Tensor


class Receiver(abc.ABC):
    """Receives the messages of links. Only the hub's thread calls its methods."""

    @abc.abstractmethod
    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
        """Return memory for a payload, uint8 (header.nbytes,); None if the link shall allocate it.

        A call of :meth:`received` follows in any case.
        """

    @abc.abstractmethod
    def received(
        self, link: Link, header: Header, payload: torch.Tensor, damage: Optional[str]
    ) -> None:
        """Process a message.

        Args:
            link: Link on which it arrived.
            header: Header of the message.
            payload: Payload, uint8 (header.nbytes,).
            damage: Sentence about the damage if the payload differs from the sent one, else None.
        """

    @abc.abstractmethod
    def lost(self, link: Link, reason: Optional[str]) -> None:
        """React to the end of a connection: messages that were sent on it will not be answered.

        Called a second time, with ``link.reopens`` False, when the link will not be opened again.

        Args:
            link: Link whose connection has ended.
            reason: Reason why it broke; None after CLOSE.
        """

    def opened(self, link: Link) -> None:  # noqa: B027
        """React to a new connection after a loss."""


class Link:
    """One end of a connection between an encoder and a head, over TCP and host memory.

    A peer that dies breaks only its own links. When a connection breaks, the end with a ``dial``
    opens it again until the peer closes the link, or refuses connections because its process has
    ended.

    Args:
        hub: Thread that reads and writes.
        peer: Name of the other process in errors, for example ``'encoder rank 1'``.
        dial: Address of the peer; None at the end that listens.

    Attributes:
        reopens: Whether a lost connection is expected to be opened again.
    """

    def __init__(self, hub: Hub, peer: str, dial: Optional[Dial] = None) -> None:
        self.peer, self.peer_timeout = peer, hub.peer_timeout
        self.reopens = True
        self._hub, self._dial = hub, dial
        self._receiver: Optional[Receiver] = None
        self._connection: Optional[Connection] = None
        self._outbox: Deque[Tuple[Header, torch.Tensor]] = deque()
        self._lock = threading.Lock()
        # Set while messages can be sent.
        self._open = threading.Event()
        # Whether CLOSE was sent.
        self._closing = False
        self._peer_closed = False
        self._done = threading.Event()
        # Whether both ends know that they are connected now, and whether they ever were.
        self._greeted = self._known = False
        # Why there is no connection.
        self._reason: Optional[str] = None
        # Time of the current connection's beginning.
        self._since = 0.0
        self._pause = _FIRST_PAUSE
        # Number of the current connection, so that timers of an earlier one do nothing.
        self._era = 0
        hub.enter()

    @property
    def alive(self) -> bool:
        """Whether a message that is sent now can arrive."""
        return self._open.is_set() and not self._closing

    def await_open(self, timeout: float) -> Optional[str]:
        """Wait for the first connection; return None, or the reason for its absence."""
        deadline = time.monotonic() + timeout
        while not self._open.wait(min(0.1, max(0.0, deadline - time.monotonic()))):
            if not self.reopens or time.monotonic() >= deadline:
                return self._reason or f'no connection within {timeout:g} s'
        return None

    def start(self, receiver: Receiver) -> None:
        """Begin to read, and pass the messages to ``receiver``."""

        def begin() -> None:
            self._receiver = receiver
            if self._connection is not None:
                self._connection.paused = False
            if self._greeted:
                self._hub.liveness.watch(self, self._beat, self._silent)
                self._watch()
            elif self._reason is not None:
                receiver.lost(self, self._reason)

        self._hub.call(begin)

    def send(self, header: Header, payload: Optional[torch.Tensor] = None) -> None:
        """Queue a message and return at once. Does nothing on a broken link.

        Args:
            header: Header of the message; its ``nbytes`` and ``checksum`` are filled in.
            payload: uint8 (n,), contiguous, in host memory; do not write to it until it was sent.
        """
        if payload is None:
            payload = torch.empty(0, dtype=torch.uint8)
        is_close = header.kind == Kind.CLOSE
        with self._lock:
            if self._closing or not (is_close or self._open.is_set()):
                return
            self._closing = is_close
            self._outbox.append((header, payload))
        self._hub.call(self._on_outbox)

    def close(self, timeout: float) -> bool:
        """Send CLOSE and wait for the answer; return whether the connection has ended.

        A broken connection is opened once more for this, so that the peer does not wait for a
        process that has finished.

        Args:
            timeout: Seconds after which the connection is broken without an answer.
        """
        self.send(Header(Kind.CLOSE))
        if not self._done.wait(timeout):
            self._hub.call(lambda: self._finish(f'no answer to CLOSE within {timeout:g} s'))
            self._done.wait(timeout)
        self._hub.join(timeout)
        return self._done.is_set()

    def abandon(self, reason: str) -> None:
        """Break the current connection, so that both ends notice it."""
        with self._lock:
            self._open.clear()
            era = self._era
        self._hub.call(lambda: self._disconnect(reason) if era == self._era else None)

    # All methods below run in the hub's thread, except _connect, _beat and _silent.

    def adopt(self, sock: socket.socket) -> None:
        """Replace the current connection by one that the peer has opened."""
        self._disconnect('it opened another connection')
        if self._done.is_set():
            self._hub.drop(sock)
            return
        self._era += 1
        self._connection = Connection(sock, self._allocate, self._deliver)
        # The answer to the peer's hello.
        self._connection.put(Header(Kind.HEARTBEAT), torch.empty(0, dtype=torch.uint8))
        self._greet()

    def dial(self) -> None:
        """Open the connection."""
        if self._done.is_set() or self._connection is not None or self._dial is None:
            return
        self._drop_socket()
        self._era += 1
        era = self._era
        patience = self.peer_timeout if self._known else min(self.peer_timeout, _FIRST_ANSWER)

        def give_up() -> None:
            if era == self._era and not self._greeted:
                self._dial_failed(TimeoutError(f'no answer for {patience:g} s'))

        threading.Thread(
            target=self._connect, args=(self._dial, era, patience), name='feature-dial', daemon=True
        ).start()
        self._hub.later(patience, give_up)

    def _connect(self, dial: Dial, era: int, patience: float) -> None:
        """Connect to the peer; runs in a thread of its own, since it waits for the peer's proof."""
        try:
            handshake = ClientHandshake(dial.secret, dial.purpose, dial.listener)
            sock = connect(dial.address, handshake, patience)
        except OSError as error:
            # The name is bound until the end of this block only.
            failure = error
            self._hub.call(lambda: self._dial_failed(failure) if era == self._era else None)
        else:
            sock.setblocking(False)
            self._hub.call(lambda: self._on_connected(sock, dial, era))

    def _on_connected(self, sock: socket.socket, dial: Dial, era: int) -> None:
        if era != self._era:
            self._hub.drop(sock)
            return
        self._connection = Connection(sock, self._allocate, self._deliver)
        self._connection.put_bytes(dial.hello)
        # The first heartbeat of the peer confirms the hello.
        self._watch()

    def _dial_failed(self, error: OSError) -> None:
        self._drop_socket()
        if isinstance(error, HandshakeError):
            self._reason = str(error)
        self._reason = self._reason or f'it cannot be reached ({error})'
        # The process has ended, or another one listens in its place.
        if isinstance(error, (ConnectionRefusedError, HandshakeError)):
            self._give_up()
        else:
            self._redial()

    def _drop_socket(self) -> None:
        if self._connection is not None:
            self._hub.drop(self._connection.sock)
        self._connection = None

    def _redial(self) -> None:
        self._era += 1
        era = self._era
        # The other end waits for peer_timeout, and several attempts must fit into that time.
        self._hub.later(
            min(self._pause, self.peer_timeout / 4),
            lambda: self.dial() if era == self._era else None,
        )
        self._pause = min(2 * self._pause, _MAX_PAUSE)

    def _greet(self) -> None:
        """Allow messages, because both ends know that they are connected."""
        again, self._reason = self._reason is not None, None
        self._since, self._greeted, self.reopens = time.monotonic(), True, True
        self._known = True
        with self._lock:
            # Messages of an earlier connection are void, except CLOSE.
            self._outbox.clear()
            if self._closing:
                self._outbox.append((Header(Kind.CLOSE), torch.empty(0, dtype=torch.uint8)))
            self._open.set()
        if self._connection is not None:
            # Messages stay in the socket until start().
            self._connection.paused = self._receiver is None
        self._hub.liveness.watch(self, self._beat, self._silent)
        self._watch()
        if again and self._receiver is not None:
            self._receiver.opened(self)

    def _beat(self) -> None:
        """Send a heartbeat, unless messages are waiting, which prove the same."""
        if self.alive and not self._outbox:
            self.send(Header(Kind.HEARTBEAT))

    def _silent(self, seconds: float) -> None:
        """Break the connection to a silent peer."""
        if self._receiver is None:
            # Nothing was read yet, so the silence says nothing about the peer.
            self._hub.liveness.watch(self, self._beat, self._silent)
        else:
            self.abandon(f'it went away, or said and took nothing for {seconds:.0f} s')

    def _watch(self) -> None:
        """Watch the socket for the events that this end can handle now."""
        connection = self._connection
        if connection is not None:
            reads = self._receiver is not None or not self._greeted
            writes = connection.has_pending or (self._greeted and self._outbox)
            self._hub.watch(
                connection.sock,
                (selectors.EVENT_READ if reads else 0) | (selectors.EVENT_WRITE if writes else 0),
                self._on_ready,
            )

    def _on_outbox(self) -> None:
        if self._connection is not None:
            if self._greeted:
                self._write()
        elif self._closing and not self._done.is_set():
            if self._dial is None or not self.reopens:
                self._finish()
            else:
                self.dial()

    def _on_ready(self, events: int) -> None:
        connection = self._connection
        if events & selectors.EVENT_READ and connection is not None:
            self._hub.liveness.heard(self)
            self._guarded(connection.read)
        if events & selectors.EVENT_WRITE and connection is self._connection:
            self._write()

    def _write(self) -> None:
        connection = self._connection
        if connection is None:
            return

        def write() -> None:
            while connection.write() and self._greeted:
                with self._lock:
                    message = self._outbox.popleft() if self._outbox else None
                if message is None:
                    return
                connection.put(*message)

        self._guarded(write)
        if self._connection is connection:
            if self._peer_closed and not connection.has_pending and not self._outbox:
                self._finish()
            else:
                self._watch()

    def _guarded(self, work: Callable[[], None]) -> None:
        """Read or write. An error breaks the connection and becomes the reason."""
        try:
            work()
        except StreamingError as error:
            # An unreadable header, or an error of the receiver.
            self._disconnect(str(error))
        except (OSError, EOFError) as error:
            self._disconnect(f'it went away ({str(error) or "it closed the connection"})')
        except BaseException as error:
            # A defect of the program. The error is handed to the receiver, in another thread.
            self._disconnect(f'reading failed: {type(error).__name__}: {error}')

    def _allocate(self, header: Header) -> Optional[torch.Tensor]:
        assert self._receiver is not None
        return self._receiver.place(self, header)

    def _deliver(self, header: Header, payload: torch.Tensor, damage: Optional[str]) -> None:
        if header.kind == Kind.HEARTBEAT:
            if not self._greeted:
                self._greet()
        elif header.kind == Kind.CLOSE:
            self._peer_closed, self.reopens = True, False
            self.send(Header(Kind.CLOSE))
            if self._receiver is not None:
                self._receiver.lost(self, None)
            self._write()
        else:
            assert self._receiver is not None
            self._receiver.received(self, header, payload, damage)

    def _disconnect(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if connection is None:
            return
        was_greeted, self._greeted = self._greeted, False
        self._era += 1
        with self._lock:
            self._open.clear()
            self._outbox.clear()
        self._reason = self._reason or reason
        self._hub.liveness.forget(self)
        self._hub.drop(connection.sock)
        if self._peer_closed or (self._closing and self._dial is None):
            self._finish()
            return
        if was_greeted and time.monotonic() - self._since > _STABLE:
            self._pause = _FIRST_PAUSE
        if self._dial is not None:
            self._redial()
        else:
            era = self._era
            self._hub.later(
                self.peer_timeout, lambda: self._give_up() if era == self._era else None
            )
        # The receiver comes last, because it may raise an error.
        if was_greeted and self._receiver is not None:
            connection.fail(reason)
            self._receiver.lost(self, reason)

    def _give_up(self) -> None:
        """Stop waiting for the peer."""
        self.reopens = False
        if self._closing:
            self._finish()
        elif self._receiver is not None:
            self._receiver.lost(self, self._reason)

    def _finish(self, reason: Optional[str] = None) -> None:
        """End the link permanently."""
        if self._done.is_set():
            return
        self.reopens = False
        with self._lock:
            self._closing = True
            self._open.clear()
        self._hub.liveness.forget(self)
        self._era += 1
        connection, was_greeted, self._greeted = self._connection, self._greeted, False
        self._drop_socket()
        if (
            connection is not None
            and was_greeted
            and not self._peer_closed
            and self._receiver is not None
        ):
            connection.fail('the link was closed')
            self._receiver.lost(self, reason)
        self._hub.leave()
        self._done.set()
