"""A thread that accepts the connections of a listener and passes on those that prove themselves.

Any process that reaches the port can connect. An unproved connection costs one descriptor and less
than a hundred bytes, for a few seconds at most. It delays no other connection, because the thread
never waits for a single one. The proof itself is in ``handshake.py``.
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import weakref
from typing import TYPE_CHECKING, Callable, Dict, List, Optional

if TYPE_CHECKING:
    from .handshake import ListenerHandshake

# Largest number of connections that have not proved themselves.
MAX_UNPROVED = 32
# Time from accepting a connection to its proof.
_GREETING_SECONDS = 5.0
# If the table is full, a new connection replaces the oldest one, but only after the oldest one had
# time for its round trip. So a thousand ranks that start together do not push each other out.
_ROUND_TRIP_SECONDS = 0.1
# Pause without accepting, while the process may open no descriptor.
_PAUSE_SECONDS = 0.5
_BACKLOG = 1024


class _Greeting:
    """A connection whose handshake is under way.

    Attributes:
        data: Received bytes of the client's next message.
        is_answered: Whether the client's greeting has been answered.
    """

    def __init__(
        self, connection: socket.socket, handshake: ListenerHandshake, since: float
    ) -> None:
        self.socket, self.handshake, self.since = connection, handshake, since
        self.descriptor = connection.fileno()
        self.data, self.is_answered = b'', False


class Guard:
    """Accepts the connections of one listener.

    Args:
        listener: Stream socket that listens, see :func:`bind_listener`; closed with the guard.
        handshake: Function that returns the listener's side of a new handshake.
        admit: Function that receives a non-blocking connection whose client has proved itself. It
            runs on the guard's thread and must not wait. If it raises, the connection is closed.
        seconds: Time for a whole handshake.

    Attributes:
        refused: Number of connections that ended during the proof. A process with another secret
            causes that.
    """

    def __init__(
        self,
        listener: socket.socket,
        handshake: Callable[[], ListenerHandshake],
        admit: Callable[[socket.socket], None],
        seconds: float = _GREETING_SECONDS,
    ) -> None:
        self._listener, self._handshake, self._admit = listener, handshake, admit
        self._seconds = seconds
        self.refused = 0
        # The keys are descriptors, the oldest connection first.
        self._greetings: Dict[int, _Greeting] = {}
        self._closed = False
        # Unlike epoll, poll itself needs no descriptor.
        self._selector = selectors.PollSelector()
        # Time before which no connection is accepted.
        self._listens_from = 0.0
        self._is_registered = False
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name='mapsage guard', daemon=True)
        _guards.add(self)
        self._thread.start()

    def close(self) -> None:
        """Accept no more connections, and close those that have not proved themselves."""
        if self._closed:
            return
        self._closed = True
        # Shutting the listener down wakes the thread.
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        if self._thread is not threading.current_thread():
            self._thread.join(_PAUSE_SECONDS)
        self.forget()

    def forget(self) -> None:
        """Close the descriptors of this process; a parent process keeps its connections."""
        self._closed = True
        for unproved_socket in self.sockets():
            unproved_socket.close()

    def sockets(self) -> List[socket.socket]:
        """Return the listener and the connections that have not proved themselves."""
        return [self._listener, *(greeting.socket for greeting in list(self._greetings.values()))]

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            self._listen(now >= self._listens_from)
            try:
                ready = [key.fd for key, _ in self._selector.select(self._next_timeout(now))]
            # The guard was closed.
            except (OSError, ValueError):
                return
            if self._closed:
                return
            for descriptor in ready:
                if descriptor in self._greetings:
                    self._hear(self._greetings[descriptor])
            self._drop_late(time.monotonic())
            # Last, because a connection that has proved itself leaves its slot to a new one.
            if self._is_registered and self._listener.fileno() in ready:
                self._accept()

    def _next_timeout(self, now: float) -> Optional[float]:
        """Return the seconds until the thread has something to do without an event, or None."""
        oldest = list(self._greetings.values())[:1]
        times = [greeting.since + self._seconds for greeting in oldest]
        if not self._is_registered:
            times.append(self._listens_from)
        return max(0.0, min(times) - now) if times else None

    def _listen(self, listens: bool) -> None:
        """Watch the listener or not: a pending connection that is not accepted wakes the thread."""
        if listens != self._is_registered:
            if listens:
                self._selector.register(self._listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(self._listener)
            self._is_registered = listens

    def _accept(self) -> None:
        now = time.monotonic()
        if len(self._greetings) >= MAX_UNPROVED and not self._make_room(now):
            return
        try:
            connection, _ = self._listener.accept()
        # The client has gone.
        except (BlockingIOError, ConnectionError):
            return
        # This process or machine may open no descriptor.
        except OSError:
            if not self._greetings:
                self._listens_from = now + _PAUSE_SECONDS
            else:
                self._make_room(now)
            return
        connection.setblocking(False)
        greeting = _Greeting(connection, self._handshake(), now)
        self._greetings[greeting.descriptor] = greeting
        self._selector.register(connection, selectors.EVENT_READ)
        self._hear(greeting)

    def _make_room(self, now: float) -> bool:
        """Close the oldest unproved connection if it had its round trip; return whether it had."""
        oldest = next(iter(self._greetings.values()))
        self._listens_from = oldest.since + _ROUND_TRIP_SECONDS
        if now < self._listens_from:
            return False
        self._drop(oldest)
        return True

    def _hear(self, greeting: _Greeting) -> None:
        try:
            while not greeting.handshake.proved:
                received = greeting.socket.recv(greeting.handshake.needed - len(greeting.data))
                greeting.data += received
                if not received:
                    raise EOFError
                if len(greeting.data) == greeting.handshake.needed:
                    answer = greeting.handshake.take(greeting.data)
                    greeting.data = b''
                    greeting.is_answered = True
                    if greeting.socket.send(answer) < len(answer):
                        raise EOFError
        except BlockingIOError:
            return
        # The client has gone, or it cannot prove itself.
        except (OSError, EOFError):
            self.refused += greeting.is_answered
            self._drop(greeting)
            return
        _admitted.add(greeting.socket)
        self._forget(greeting)
        try:
            self._admit(greeting.socket)
        # Whatever admit() raises ends this connection only, not the thread of all connections.
        except Exception:
            greeting.socket.close()

    def _drop_late(self, now: float) -> None:
        for greeting in list(self._greetings.values()):
            if now - greeting.since < self._seconds:
                return
            self._drop(greeting)

    def _drop(self, greeting: _Greeting) -> None:
        self._forget(greeting)
        greeting.socket.close()

    def _forget(self, greeting: _Greeting) -> None:
        self._selector.unregister(greeting.socket)
        del self._greetings[greeting.descriptor]


def bind_listener(host: str) -> socket.socket:
    """Return a socket that listens at a free port of a numeric address, for :class:`Guard`."""
    listener = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


_guards: weakref.WeakSet[Guard] = weakref.WeakSet()
_admitted: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close all connections in a forked child, which would keep them open for a dead rank."""
    for guard in list(_guards):
        guard.forget()
    for connection in list(_admitted):
        # Not close(): it waits until the files made from the socket are closed too.
        descriptor = connection.detach()
        if descriptor >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)
