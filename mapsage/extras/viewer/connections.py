"""An HTTP server that strangers cannot exhaust: few connections, and a deadline for every request.

A request must arrive in full within some seconds after its connection was opened or the previous
answer was sent; an answer must progress, however slowly. If all connections are in use, a new
connection replaces the one that has waited longest for a request; connections that were never
admitted are replaced first. `server.py` defines the answers.

Numbers in headers may have any length: Python refuses to convert one of more than 4,300 digits, and
older versions take seconds for it, so a stranger's digits must not reach ``int()``.
"""

from __future__ import annotations

import contextlib
import io
import re
import socket
import sys
import threading
import time
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Dict, Optional, Tuple, Union

MOST_CONNECTIONS = 32
"""Largest number of connections, each with a thread. A browser opens up to six to a host."""

PATIENCE = 15.0
"""Seconds until a request must have arrived in full and until an idle connection is closed; also
the longest time without progress in an answer."""

# Largest request with its headers and its body, in bytes.
_LONGEST_REQUEST = 1 << 16
# Bytes that the system may take ahead of the reader.
_SEND_BUFFER = 1 << 16
_BUSY = (
    b'HTTP/1.1 503 Service Unavailable\r\nConnection: close\r\n'
    b'Content-Type: text/plain\r\nContent-Length: 58\r\n\r\n'
    b'All connections of the viewer are in use; reload the page.'
)


@dataclass
class _State:
    """State of a connection.

    Attributes:
        since: When the connection began to wait for a request (seconds of the monotonic clock).
        is_waiting: Whether the connection waits for a request; False while it answers one.
        is_admitted: Whether the last request came from an admitted browser.
        is_ended: Whether the connection was ended to make room.
    """

    since: float
    is_waiting: bool = True
    is_admitted: bool = False
    is_ended: bool = False


_Request = Union[socket.socket, Tuple[bytes, socket.socket]]


class BoundedServer(ThreadingHTTPServer):
    """HTTP server with up to :data:`MOST_CONNECTIONS` threads, for a :class:`BoundedHandler`.

    Attributes:
        patience: Seconds, see :data:`PATIENCE`.
    """

    daemon_threads = True
    request_queue_size = 128
    patience = PATIENCE

    def __init__(self, *arguments: Any) -> None:
        self._changed = threading.Condition()
        self._states: Dict[socket.socket, _State] = {}
        super().__init__(*arguments)

    def process_request(self, request: _Request, client_address: Tuple[str, int]) -> None:
        """Answer a connection in a thread; if all are in use, end another connection first."""
        assert isinstance(request, socket.socket)
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
            # The client may have hung up.
            with contextlib.suppress(OSError):
                request.send(_BUSY)
            self.shutdown_request(request)

    def shutdown_request(self, request: _Request) -> None:
        """Close a connection, even if its thread could not be started."""
        super().shutdown_request(request)
        assert isinstance(request, socket.socket)
        with self._changed:
            self._states.pop(request, None)
            self._changed.notify_all()

    def await_request(self, connection: socket.socket) -> None:
        """Record that a connection waits for a request."""
        with self._changed:
            state = self._states[connection]
            state.is_waiting, state.since = True, time.monotonic()

    def begin_answer(self, connection: socket.socket) -> None:
        """Record that a connection has received a request.

        Raises:
            ConnectionAbortedError: If the connection was ended meanwhile to make room.
        """
        with self._changed:
            if self._states[connection].is_ended:
                raise ConnectionAbortedError('ended to make room')
            self._states[connection].is_waiting = False

    def note_admission(self, connection: socket.socket, is_admitted: bool) -> None:
        """Record whether the request of a connection comes from an admitted browser."""
        with self._changed:
            self._states[connection].is_admitted = is_admitted

    def _end_one(self) -> bool:
        """End a connection to make room, unless one is ending already; return False if none can be."""
        states = self._states.items()
        if any(state.is_ended for _, state in states):
            return True
        waiting = [
            (state.is_admitted, state.since, connection)
            for connection, state in states
            if state.is_waiting
        ]
        if not waiting:
            return False
        connection = min(waiting, key=lambda row: row[:2])[2]
        self._states[connection].is_ended = True
        # The connection's thread then reads the end of the stream. An error means that the browser
        # has hung up at this moment.
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        return True


class BoundedHandler(BaseHTTPRequestHandler):
    """Handler that keeps to the deadlines of its :class:`BoundedServer`."""

    protocol_version = 'HTTP/1.1'
    server: BoundedServer

    def setup(self) -> None:
        """Create the streams of the connection."""
        self.connection = self.request
        # Headers and body are sent separately, and Nagle's algorithm would hold back the body.
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, True)
        # A send buffer counts as free once a third of it is read. With the megabytes that Linux
        # takes by default, a slow reader would seem to make no progress.
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
    """Bytes that arrive: up to the largest size of a request, until its deadline."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def begin(self, seconds: float) -> None:
        """Start the deadline and the count of bytes of the next request."""
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
    """Bytes that are sent: an answer may take long, but it must make progress."""

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection, self._seconds = connection, seconds

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        left = memoryview(data)
        while left:
            # Not sendall(), whose deadline is for all bytes together.
            self._connection.settimeout(self._seconds)
            left = left[self._connection.send(left) :]
        return len(data)


def requested_part(header: Optional[str], size: int) -> Optional[Tuple[int, int]]:
    """Return start and end (exclusive) of the bytes that a ``Range`` header asks for.

    Returns:
        None for the whole file: without a header, and for headers that a server may ignore (several
        ranges, other units, a malformed header; RFC 9110, section 14.2). A range beyond the end of
        the file is empty: its start is not below its end.
    """
    match = re.fullmatch('bytes=([0-9]*)-([0-9]*)', header or '')
    if match is None or match.group(0) == 'bytes=-':
        return None
    first, last = match.groups()
    if not first:
        # 'bytes=-500' asks for the last 500 bytes.
        length = as_bytes(last)
        return (max(0, size - length), size) if length else (size, size)
    if last and _sort_key(last) < _sort_key(first):
        return None
    return as_bytes(first), min(size, as_bytes(last) + 1 if last else size)


def as_bytes(digits: str) -> int:
    """Return a number of bytes; ``sys.maxsize``, more than any file has, for 19 digits or more."""
    digits = digits.lstrip('0') or '0'
    return int(digits) if len(digits) < 19 else sys.maxsize


def _sort_key(digits: str) -> Tuple[int, str]:
    """Return a key that orders numbers of any length by their value."""
    digits = digits.lstrip('0')
    return len(digits), digits
