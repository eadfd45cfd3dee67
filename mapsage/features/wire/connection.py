"""Messages of a header and a payload on a socket that does not block."""
from __future__ import annotations

import socket
from collections import deque
from dataclasses import replace
from typing import Callable, Deque, Optional, Tuple

import torch

from .header import WORDS, Header, decode_header, encode_header
from .payload import checksum, host_bytes

# Bytes that one connection may read or write before the others have their turn.
_TURN = 8 * 2**20

Place = Callable[[Header], Optional[torch.Tensor]]
Deliver = Callable[[Header, torch.Tensor, Optional[str]], None]


class Connection:
    """Reads and writes whole messages on a socket, as far as it takes them now.

    Used by one thread. The caller waits until the socket is ready.

    Args:
        sock: Connected socket; it is made non-blocking.
        place: Function that returns the memory for a payload, or None for new memory.
        deliver: Function that takes a message and, if its payload was damaged, how.
    """

    def __init__(self, sock: socket.socket, place: Place, deliver: Deliver) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.paused = False  # nothing is read while it is set, from the next message on
        self._place, self._deliver = place, deliver
        self._pending: Deque[Tuple[memoryview, torch.Tensor]] = deque()
        self._target: memoryview  # what is left to read of a header or payload
        self._tensor: torch.Tensor  # the whole of it
        self._header: Optional[Header] = None  # of the payload that is being read
        self._await_header()

    @property
    def has_pending(self) -> bool:
        """Whether bytes wait to be written."""
        return bool(self._pending)

    def put(self, header: Header, payload: torch.Tensor) -> None:
        """Queue a message; its ``nbytes`` and ``checksum`` are filled in."""
        header = replace(header, nbytes=len(payload), checksum=checksum(payload))
        self.put_parts(encode_header(header), payload)

    def put_parts(self, *parts: torch.Tensor) -> None:
        """Queue the bytes of tensors, which must not be written to until they were sent."""
        for part in parts:
            if part.numel():
                view = memoryview(part.numpy()).cast('B')  # type: ignore[arg-type]
                self._pending.append((view, part))

    def write(self) -> bool:
        """Write what the socket takes now; return whether nothing is left.

        Raises:
            OSError: If the connection broke.
        """
        left = _TURN
        while self._pending and left > 0:
            view, tensor = self._pending[0]
            try:
                sent = self.sock.send(view)
            except BlockingIOError:
                return False
            left -= sent
            if sent == len(view):
                self._pending.popleft()
            else:
                self._pending[0] = (view[sent:], tensor)
        return not self._pending

    def read(self) -> None:
        """Read what is there, and deliver the messages that are complete.

        Raises:
            EOFError: If the other side has closed the connection.
            OSError: If the connection broke.
            HeaderError: If a header cannot be read; then nothing after it can be.
        """
        left = _TURN
        while left > 0 and not self.paused:
            try:
                count = self.sock.recv_into(self._target)
            except BlockingIOError:
                return
            if not count:
                raise EOFError
            left -= count
            self._target = self._target[count:]
            if not self._target:
                self._finish_part()

    def fail(self, reason: str) -> None:
        """Deliver the payload that was under way as damaged; nothing is written into it later."""
        header, self._header = self._header, None
        if header is not None:
            self._deliver(header, self._tensor, reason)

    def _await_header(self) -> None:
        self._header = None
        self._read_into(torch.empty(WORDS, dtype=torch.int64))

    def _read_into(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._target = memoryview(tensor.numpy()).cast('B')  # type: ignore[arg-type]

    def _finish_part(self) -> None:
        header, tensor = self._header, self._tensor
        if header is not None:
            self._await_header()
            self._deliver(header, tensor, _damage(header, tensor))
            return
        header = decode_header(tensor)
        if header.nbytes:
            place = self._place(header)
            # Only now, so that a payload without a place is never delivered as damaged.
            self._header = header
            self._read_into(host_bytes(header.nbytes) if place is None else place)
        else:
            self._await_header()
            self._deliver(header, torch.empty(0, dtype=torch.uint8), None)


def _damage(header: Header, payload: torch.Tensor) -> Optional[str]:
    found = checksum(payload)
    if found == header.checksum:
        return None
    return (f'the checksum of {header.nbytes} bytes is {found:08x}, expected '
            f'{header.checksum:08x}: they were damaged on their way')
