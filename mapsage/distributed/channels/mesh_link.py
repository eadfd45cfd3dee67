"""A connection of two ranks for messages of a header and the bytes that it announces."""
from __future__ import annotations

import socket
import struct
import threading
from typing import Any, Callable, Optional, Tuple

HEADER = struct.Struct('<QQIQ')  # lane, number of the collective, part of it, bytes that follow
CONTROL = 0  # lane of messages for the process itself
# How long a thread waits for a peer before it looks again for what may have happened, in seconds.
POLL_SECONDS = 0.5
# Bytes of the message by which a peer says who it is, of a later one for the process, and of all.
_MAX_HELLO_BYTES, _MAX_CONTROL_BYTES, _MAX_BYTES = 2**12, 2**20, 2**40
_AT_ONCE_BYTES = 2**26  # for which memory is taken before anything has arrived
_SMALL_BYTES = 4096
# A host that has lost its power is noticed after two minutes, also where nothing is sent.
_KEEP_ALIVE = dict(TCP_KEEPIDLE=60, TCP_KEEPINTVL=10, TCP_KEEPCNT=6)


class MeshLink:
    """One connection. Any thread may send; the mesh's thread alone reads.

    Args:
        connection: Connected socket.
        rank: Global rank of the peer; None until it has said which it is.
        host: Name of its host.
    """

    def __init__(self, connection: socket.socket, rank: Optional[int], host: str) -> None:
        connection.settimeout(POLL_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            if hasattr(socket, name):  # not on every platform
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self.rank, self.host = connection, rank, host
        self.torn = False  # whether it holds part of a message whose rest will never come
        self._lock = threading.Lock()  # held while a frame is sent
        self._head: Optional[Tuple[int, ...]] = None
        self._left = memoryview(b'')
        self._expect(HEADER.size)

    def send(self, head: bytes, body: Any, check: Callable[[], Any]) -> None:
        """Send a frame; ``check`` may raise while the peer takes nothing.

        Raises:
            OSError: If the connection is broken or holds part of another frame.
        """
        while not self._lock.acquire(timeout=POLL_SECONDS):
            check()
        begun = False
        try:
            if self.torn:
                raise OSError('it took no messages')
            # one packet for what is small: the peer's thread then wakes once
            for piece in [head + bytes(body)] if len(body) < _SMALL_BYTES else [head, body]:
                view = memoryview(piece)
                while view:
                    before, begun = begun, True
                    try:
                        view = view[self.socket.send(view):]
                    except socket.timeout as error:
                        if error.errno is not None:  # of the connection
                            raise
                        begun = before
                        check()
            begun = False
        finally:
            self.torn = self.torn or begun
            self._lock.release()

    def read(self) -> Optional[Tuple[Tuple[int, ...], bytearray]]:
        """Read what has arrived; return a frame when it is complete. EOFError at the end."""
        while True:
            if self._left:
                try:
                    count = self.socket.recv_into(self._left)
                except socket.timeout as error:
                    if error.errno is not None:  # of the connection
                        raise
                    return None
                if not count:
                    raise EOFError
                self._left = self._left[count:]
                if self._left:
                    return None
            if len(self._data) < self._size:
                self._grow()
                return None
            data, head = self._data, self._head
            if head is not None:
                self._head = None
                self._expect(HEADER.size)
                return head, data
            self._head = HEADER.unpack(data)
            lane, size = self._head[0], self._head[3]
            if size > (_MAX_HELLO_BYTES if self.rank is None else
                       _MAX_CONTROL_BYTES if lane == CONTROL else _MAX_BYTES) \
                    or self.rank is None and lane != CONTROL:
                raise EOFError(f'it announced a message of {size} bytes')
            self._expect(size)
            if self._left:
                return None

    def _expect(self, size: int) -> None:
        self._size = size
        self._data = bytearray(min(size, _AT_ONCE_BYTES))
        self._left = memoryview(self._data)

    def _grow(self) -> None:
        """Take memory for as much again as has arrived of a long message."""
        self._left.release()
        arrived = len(self._data)
        self._data.extend(bytes(min(self._size - arrived, arrived)))
        self._left = memoryview(self._data)[arrived:]
