"""A server that strangers cannot exhaust: few connections, and a deadline for every request.

A request must be there in full some seconds after its connection was opened or the previous answer
was sent; an answer must progress, however slowly. If all connections are in use, the one that has
waited longest for a request makes room, and one that was never admitted goes before one that was.
"""
from __future__ import annotations

import io
import socket
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict

MOST_CONNECTIONS = 32
"""Number of connections at a time, each of which has a thread. A browser opens six to a host."""

PATIENCE = 15.0
"""Seconds until a request is there in full, until an idle connection is closed, and for which an
answer may stand still."""

_LONGEST_REQUEST = 1 << 16  # bytes of a request with its headers and its body
_SEND_BUFFER = 1 << 16  # bytes that leave ahead of the reader
_BUSY = (b'HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n'
         b'Content-Type: text/plain\r\nContent-Length: 58\r\n\r\n'
         b'All connections of the viewer are in use; reload the page.')


@dataclass
class _State:
    """What a connection does.

    Attributes:
        since: Time since when a request is awaited (seconds of the monotonic clock).
        is_waiting: Whether a request is awaited; False while one is answered.
        is_admitted: Whether its last request came from an admitted browser.
        is_ended: Whether it was ended to make room.
    """

    since: float
    is_waiting: bool = True
    is_admitted: bool = False
    is_ended: bool = False


class BoundedServer(ThreadingHTTPServer):
    """HTTP server of at most :data:`MOST_CONNECTIONS` threads, for a :class:`BoundedHandler`.

    Attributes:
        patience: Seconds, see :data:`PATIENCE`.
    """

    daemon_threads = True
    request_queue_size = 128
    patience = PATIENCE

    def __init__(self, *arguments: Any) -> None:
        self._changed = threading.Condition()
        self._states: Dict[Any, _State] = {}
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread, after another one has made room for it if need be."""
        with self._changed:
            while len(self._states) >= MOST_CONNECTIONS:
                if not self._end_one():
                    break
                self._changed.wait()
            has_room = len(self._states) < MOST_CONNECTIONS
            if has_room:
                self._states[request] = _State(time.monotonic())
        if has_room:
            super().process_request(request, client_address)
        else:
            request.settimeout(0)
            try:
                request.send(_BUSY)
            except OSError:  # it has hung up
                pass
            self.shutdown_request(request)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection, also one whose thread could not be started."""
        super().shutdown_request(request)
        with self._changed:
            self._states.pop(request, None)
            self._changed.notify_all()

    def await_request(self, request: Any) -> None:
        """Note that a connection waits for a request."""
        with self._changed:
            state = self._states[request]
            state.is_waiting, state.since = True, time.monotonic()

    def begin_answer(self, request: Any) -> None:
        """Note that a connection has got a request.

        Raises:
            ConnectionAbortedError: If it was ended meanwhile to make room.
        """
        with self._changed:
            if self._states[request].is_ended:
                raise ConnectionAbortedError('ended to make room')
            self._states[request].is_waiting = False

    def note_admission(self, request: Any, is_admitted: bool) -> None:
        """Note whether the request of a connection comes from an admitted browser."""
        with self._changed:
            self._states[request].is_admitted = is_admitted

    def _end_one(self) -> bool:
        """End the connection that makes room, or none while one still ends; False if none can."""
        states = self._states.items()
        if any(state.is_ended for _, state in states):
            return True
        waiting = [(state.is_admitted, state.since, request) for request, state in states
                   if state.is_waiting]
        if not waiting:
            return False
        request = min(waiting, key=lambda row: row[:2])[2]
        self._states[request].is_ended = True
        try:
            request.shutdown(socket.SHUT_RDWR)  # its thread reads the end
        except OSError:  # the browser has hung up at this moment
            pass
        return True


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler that keeps to the deadlines of its :class:`BoundedServer`."""

    protocol_version = 'HTTP/1.1'
    server: BoundedServer

    def setup(self) -> None:
        """Make the streams of the connection."""
        self.connection = self.request
        # Headers and body are sent apart, and Nagle's algorithm would hold back the second.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        # A buffer counts as free once a third of it is read: with the megabytes that Linux takes,
        # a slow reader would seem to stand still.
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
        self._requests = _Requests(self.connection)
        self.rfile = io.BufferedReader(self._requests)
        self.wfile = _Answers(self.connection, self.server.patience)  # type: ignore[assignment]

    def handle_one_request(self) -> None:
        """Wait for a request, and answer it."""
        self._requests.begin(self.server.patience)
        self.server.await_request(self.connection)
        super().handle_one_request()

    def parse_request(self) -> bool:
        """Read the headers of a request; return whether it can be answered."""
        is_request = super().parse_request()
        self.server.begin_answer(self.connection)
        return is_request


class _Requests(io.RawIOBase):
    """The bytes that arrive: as many as a request may have, until its deadline."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def begin(self, seconds: float) -> None:
        """Begin the time and the bytes of the next request."""
        self._deadline, self._left = time.monotonic() + seconds, _LONGEST_REQUEST

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise socket.timeout('the request did not arrive in time')
        if self._left <= 0:
            raise ConnectionAbortedError('the request is too long')
        self._connection.settimeout(seconds)
        size = self._connection.recv_into(buffer)
        self._left -= size
        return size


class _Answers(io.RawIOBase):
    """The bytes that leave: an answer may take long, but it must not stand still."""

    def __init__(self, connection: Any, seconds: float) -> None:
        self._connection, self._seconds = connection, seconds

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data)
        while left:
            # Each part has a deadline; sendall() would have a single one for all parts.
            self._connection.settimeout(self._seconds)
            left = left[self._connection.send(left):]
        return len(data)
