"""One thread that takes the connections of a listener, and hands on those that prove themselves.

Whoever reaches the port can connect. Until a connection has proved that it belongs to the job, it
costs one descriptor and less than a hundred bytes, for a few seconds at most, and it can delay
nobody: the thread never waits for one of them.

This file imports only the standard library, since the watch of a node loads it by its path.
"""
from __future__ import annotations

import os
import selectors
import socket
import threading
import time
import weakref
from typing import Any, Callable, Dict, List

MAX_UNPROVED = 32  # connections
_GREETING_SECONDS = 5.0  # from the first byte to the proof
# A full table takes a new connection by closing the oldest one, but not before this one had time
# for its round trip. So at the start of a thousand ranks none of them pushes another one out.
_ROUND_TRIP_SECONDS = 0.1
_PAUSE_SECONDS = 0.5  # while the process may open no descriptor
_BACKLOG = 1024


class _Greeting:
    """A connection that has not proved itself."""

    def __init__(self, connection: socket.socket, handshake: Any, since: float) -> None:
        self.socket, self.handshake, self.since = connection, handshake, since
        self.descriptor = connection.fileno()
        self.data, self.is_answered = b'', False


class Guard:
    """Takes the connections of one listener.

    Args:
        listener: Stream socket that listens, see :func:`bind_listener`; closed with the guard.
        handshake: Function that returns the listener's side of a new handshake.
        admit: Function that takes a connection, non-blocking, whose client has proved itself.
            Called by the guard's thread: it must not wait. If it raises, the connection is closed.
        seconds: Time for a whole handshake.

    Attributes:
        refused: Number of connections that have ended at the proof, as those of a process do that
            holds another secret.
    """

    def __init__(self, listener: socket.socket, handshake: Callable[[], Any],
                 admit: Callable[[socket.socket], None],
                 seconds: float = _GREETING_SECONDS) -> None:
        self._listener, self._handshake, self._admit = listener, handshake, admit
        self._seconds = seconds
        self.refused = 0
        self._greetings: Dict[int, _Greeting] = {}  # by descriptor, the oldest one first
        self._closed = False
        # Of those that wait, poll needs no descriptor.
        self._selector = selectors.PollSelector()
        self._listens_from = 0.0  # time before which no connection is accepted
        self._is_registered = False
        listener.setblocking(False)
        self._thread = threading.Thread(target=self._run, name='mapsage guard', daemon=True)
        _guards.add(self)
        self._thread.start()

    def close(self) -> None:
        """Take no more connections, and close those that have not proved themselves."""
        if self._closed:
            return
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        except OSError:
            pass
        if self._thread is not threading.current_thread():
            self._thread.join(_PAUSE_SECONDS)
        self.forget()

    def forget(self) -> None:
        """Close the descriptors in this process, and leave the connections to the one it came from.
        """
        self._closed = True
        for each in self.sockets():
            each.close()

    def sockets(self) -> List[socket.socket]:
        """Return the listener and the connections that have not proved themselves."""
        return [self._listener, *(greeting.socket for greeting in list(self._greetings.values()))]

    def _run(self) -> None:
        while not self._closed:
            now = time.monotonic()
            self._listen(now >= self._listens_from)
            try:
                ready = [key.fd for key, _ in self._selector.select(self._wait(now))]
            except (OSError, ValueError):  # closed
                return
            if self._closed:
                return
            for descriptor in ready:
                if descriptor in self._greetings:
                    self._hear(self._greetings[descriptor])
            self._drop_late(time.monotonic())
            # Last: who has answered needs no place any more.
            if self._is_registered and self._listener.fileno() in ready:
                self._accept()

    def _wait(self, now: float) -> Any:
        oldest = list(self._greetings.values())[:1]
        times = [greeting.since + self._seconds for greeting in oldest]
        if not self._is_registered:
            times.append(self._listens_from)
        return max(0.0, min(times) - now) if times else None

    def _listen(self, listens: bool) -> None:
        """Wait for connections or not; one that is not accepted would wake the thread for ever."""
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
        except (BlockingIOError, ConnectionError):  # who asked is gone
            return
        except OSError:  # this process or machine may open no descriptor
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
        """Close the oldest connection that has not proved itself; return whether there is room."""
        oldest = next(iter(self._greetings.values()))
        self._listens_from = oldest.since + _ROUND_TRIP_SECONDS
        if now < self._listens_from:
            return False
        self._drop(oldest)
        return True

    def _hear(self, greeting: _Greeting) -> None:
        try:
            while not greeting.handshake.proved:
                part = greeting.socket.recv(greeting.handshake.needed - len(greeting.data))
                greeting.data += part
                if not part:
                    raise EOFError
                if len(greeting.data) == greeting.handshake.needed:
                    answer = greeting.handshake.take(greeting.data)
                    greeting.data = b''
                    greeting.is_answered = True
                    if greeting.socket.send(answer) < len(answer):
                        raise EOFError
        except BlockingIOError:
            return
        except (OSError, EOFError):  # it is gone, or cannot prove itself
            self.refused += greeting.is_answered
            self._drop(greeting)
            return
        _admitted.add(greeting.socket)
        self._forget(greeting)
        try:
            self._admit(greeting.socket)
        except Exception:  # this thread must go on for the other connections
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
    """Return a socket that listens at any free port of a numeric address, for :class:`Guard`."""
    listener = socket.socket(socket.AF_INET6 if ':' in host else socket.AF_INET)
    try:
        listener.bind((host, 0))
        listener.listen(_BACKLOG)
    except OSError:
        listener.close()
        raise
    return listener


_guards: Any = weakref.WeakSet()
_admitted: Any = weakref.WeakSet()


def _forget_all() -> None:
    """Close all connections in a forked child: it must not keep one open for a rank that has died.
    """
    for guard in list(_guards):
        guard.forget()
    for connection in list(_admitted):
        descriptor = connection.detach()  # close() would leave it to the files made from it
        if descriptor >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_forget_all)
