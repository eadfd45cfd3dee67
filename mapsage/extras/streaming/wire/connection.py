"""Reads and writes messages, each a header and a payload, on a non-blocking socket.

Payloads are tensors, and the receiver chooses the memory before the bytes are read: a payload goes
from the socket directly into the block of the batch that needs it. `link.py` decides when to read
and write.
"""

from __future__ import annotations

import socket
from collections import deque
from dataclasses import replace
from typing import Callable, Deque, Optional, Tuple

import torch

from .header import WORDS, Header, decode_header, encode_header
from .payload import checksum, host_bytes

# Bytes that one connection may read or write before the other connections of the hub get to run.
_MAX_BYTES_AT_ONCE = 8 * 2**20

Allocate = Callable[[Header], Optional[torch.Tensor]]
Deliver = Callable[[Header, torch.Tensor, Optional[str]], None]


class Connection:
    """Reads and writes messages on a socket, as far as possible without waiting.

    Used by one thread. The caller waits until the socket is ready.

    Args:
        sock: Connected socket; it is made non-blocking.
        allocate: Function that returns the memory for a payload, or None for new memory.
        deliver: Function that receives a header, its payload, and a sentence about the damage if
            the payload was damaged.

    Attributes:
        sock: The socket.
        paused: Whether reading stops before the next message.
    """

    def __init__(self, sock: socket.socket, allocate: Allocate, deliver: Deliver) -> None:
        sock.setblocking(False)
        if sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.paused = False
        self._allocate, self._deliver = allocate, deliver
        self._pending: Deque[Tuple[memoryview, torch.Tensor]] = deque()
        # Memory of the header or payload that is being read, and the part of it that is still
        # empty.
        self._tensor: torch.Tensor
        self._target: memoryview
        # Header of the payload that is being read; None while a header is read.
        self._header: Optional[Header] = None
        self._await_header()

    @property
    def has_pending(self) -> bool:
        """Whether bytes are waiting to be written."""
        return bool(self._pending)

    def put(self, header: Header, payload: torch.Tensor) -> None:
        """Queue a message. The header's ``nbytes`` and ``checksum`` are filled in."""
        header = replace(header, nbytes=len(payload), checksum=checksum(payload))
        self.put_bytes(encode_header(header), payload)

    def put_bytes(self, *tensors: torch.Tensor) -> None:
        """Queue the bytes of tensors. Do not write to the tensors until they were sent."""
        for tensor in tensors:
            if tensor.numel():
                view = memoryview(tensor.numpy()).cast('B')  # type: ignore[arg-type]
                self._pending.append((view, tensor))

    def write(self) -> bool:
        """Write as much as the socket accepts now; return whether nothing is left.

        Raises:
            OSError: If the connection broke.
        """
        left = _MAX_BYTES_AT_ONCE
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
        """Read the bytes that have arrived, and deliver the complete messages.

        Raises:
            EOFError: If the other side has closed the connection.
            OSError: If the connection broke.
            HeaderError: If a header cannot be read. Then no later bytes can be read either.
        """
        left = _MAX_BYTES_AT_ONCE
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
                self._finish_tensor()

    def fail(self, reason: str) -> None:
        """Deliver the payload that is being read as damaged. No more bytes are written into it."""
        header, self._header = self._header, None
        if header is not None:
            self._deliver(header, self._tensor, reason)

    def _await_header(self) -> None:
        self._header = None
        self._read_into(torch.empty(WORDS, dtype=torch.int64))

    def _read_into(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self._target = memoryview(tensor.numpy()).cast('B')  # type: ignore[arg-type]

    def _finish_tensor(self) -> None:
        header, tensor = self._header, self._tensor
        if header is not None:
            self._await_header()
            self._deliver(header, tensor, _describe_damage(header, tensor))
            return
        header = decode_header(tensor)
        if header.nbytes:
            memory = self._allocate(header)
            # Set only now: if the allocation fails, fail() must not deliver the payload as damaged.
            self._header = header
            self._read_into(host_bytes(header.nbytes) if memory is None else memory)
        else:
            self._await_header()
            self._deliver(header, torch.empty(0, dtype=torch.uint8), None)


def _describe_damage(header: Header, payload: torch.Tensor) -> Optional[str]:
    computed = checksum(payload)
    if computed == header.checksum:
        return None
    return (
        f'the checksum of {header.nbytes} bytes is {computed:08x}, expected '
        f'{header.checksum:08x}: they were damaged on their way'
    )
