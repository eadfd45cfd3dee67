"""One connection between two ranks, for frames: a header, and the bytes that it announces.

A frame belongs to a collective of a channel, or to the process itself (:data:`CONTROL`), such as
the error with which a rank ends. A peer may send anything, so sizes are checked before memory is
taken. ``mesh.py`` opens the connections and reads them.
"""

from __future__ import annotations

import socket
import struct
import threading
from typing import Callable, List, Optional, Tuple, TypedDict, Union

Buffer = Union[bytes, bytearray, memoryview]
# Lane (number of the channel), number of the collective in the channel, tag of the message in the
# collective, and number of bytes that follow.
HEADER = struct.Struct('<QQIQ')
Header = Tuple[int, int, int, int]
# Lane of messages for the process itself, which are JSON.
CONTROL = 0
# Seconds that a thread waits for a peer before it checks again whether waiting makes sense.
POLL_SECONDS = 0.5
# Largest first message, by which a peer says its rank; largest control message; largest frame.
_MAX_HELLO_BYTES, _MAX_CONTROL_BYTES, _MAX_BYTES = 2**12, 2**20, 2**40
# Memory that is taken for a frame before any of its bytes has arrived.
_AT_ONCE_BYTES = 2**26
_SMALL_BYTES = 4096
# Notice after two minutes that a host has lost power, even if nothing is sent.
_KEEP_ALIVE = dict(TCP_KEEPIDLE=60, TCP_KEEPINTVL=10, TCP_KEEPCNT=6)


class Message(TypedDict, total=False):
    """A message for a process itself, sent as JSON in the lane CONTROL.

    The first message of a connection has ``rank`` and ``host`` only. The others have a ``kind``:

    - ``'last words'``: the sender ends with an error. Has ``text``.
    - ``'failed'``: a rank gives up a lane. Has ``lane``, ``name``, ``ranks``, ``lost``, ``waited``.
    - ``'text'``: a rank publishes a text. Has ``lane``, ``ranks``, ``key``, ``text``.

    Ranks forward the last two kinds to each other (``roll_call.py``).
    """

    kind: str
    rank: int
    host: str
    text: str
    lane: int
    name: str
    ranks: List[int]
    # Pairs of a rank and the reason of its loss.
    lost: List[Tuple[int, str]]
    # Seconds that a rank may be late in the lane.
    waited: float
    key: str


class MeshLink:
    """One connection. Any thread may send; only the mesh's thread reads.

    Args:
        connection: Connected socket.
        rank: Global rank of the peer; None until the peer has sent it.
        host: Name of the peer's host.

    Attributes:
        torn: Whether an error interrupted a frame. The peer waits for the rest of that frame, so
            nothing else can be sent.
    """

    def __init__(self, connection: socket.socket, rank: Optional[int], host: str) -> None:
        connection.settimeout(POLL_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEP_ALIVE.items():
            # Some platforms lack these options.
            if hasattr(socket, name):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self.socket, self.rank, self.host = connection, rank, host
        self.torn = False
        # Held while a frame is sent.
        self._lock = threading.Lock()
        # Header of the frame that is being read; None while the header itself is read.
        self._head: Optional[Header] = None
        # View of the memory for the bytes that have not arrived yet.
        self._missing = memoryview(b'')
        self._expect(HEADER.size)

    def send(self, head: bytes, body: Buffer, check: Callable[[], object]) -> None:
        """Send a frame.

        Args:
            head: Packed header.
            body: Bytes that the header announces.
            check: Function that is called while the peer reads nothing. It raises to end the wait.

        Raises:
            OSError: If the connection is broken or torn.
        """
        while not self._lock.acquire(timeout=POLL_SECONDS):
            check()
        begun = False
        try:
            if self.torn:
                raise OSError('it took no messages')
            # A small frame is sent as one packet, so that the peer's thread wakes up only once.
            for piece in [head + bytes(body)] if len(body) < _SMALL_BYTES else [head, body]:
                view = memoryview(piece)
                while view:
                    # Set before send(), whose interruption may leave a part of the frame sent.
                    was_begun, begun = begun, True
                    try:
                        view = view[self.socket.send(view) :]
                    except socket.timeout as error:
                        # With an errno, the connection itself has timed out.
                        if error.errno is not None:
                            raise
                        begun = was_begun
                        check()
            begun = False
        finally:
            self.torn = self.torn or begun
            self._lock.release()

    def read(self) -> Optional[Tuple[Header, bytearray]]:
        """Read the bytes that have arrived.

        Returns:
            Header and bytes of a frame that is complete now; else None.

        Raises:
            EOFError: If the peer has closed the connection, or announced too large a frame.
        """
        while True:
            if self._missing:
                try:
                    count = self.socket.recv_into(self._missing)
                except socket.timeout as error:
                    # With an errno, the connection itself has timed out.
                    if error.errno is not None:
                        raise
                    return None
                if not count:
                    raise EOFError
                self._missing = self._missing[count:]
                if self._missing:
                    return None
            if len(self._data) < self._size:
                self._grow()
                return None
            data, head = self._data, self._head
            if head is not None:
                self._head = None
                self._expect(HEADER.size)
                return head, data
            lane, number, tag, size = HEADER.unpack(data)
            self._head = lane, number, tag, size
            if (
                size
                > (
                    _MAX_HELLO_BYTES
                    if self.rank is None
                    else _MAX_CONTROL_BYTES
                    if lane == CONTROL
                    else _MAX_BYTES
                )
                or self.rank is None
                and lane != CONTROL
            ):
                raise EOFError(f'it announced a message of {size} bytes')
            self._expect(size)
            if self._missing:
                return None

    def _expect(self, size: int) -> None:
        """Prepare to read a number of bytes."""
        self._size = size
        self._data = bytearray(min(size, _AT_ONCE_BYTES))
        self._missing = memoryview(self._data)

    def _grow(self) -> None:
        """Double the memory for a large frame, now that its first half has really arrived."""
        self._missing.release()
        arrived = len(self._data)
        self._data.extend(bytes(min(self._size - arrived, arrived)))
        self._missing = memoryview(self._data)[arrived:]
