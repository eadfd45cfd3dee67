"""Connects to a process that listens, without blocking.

The steps are methods, because `link.py` waits for the socket between them: :meth:`Dial.begin`
connects, :meth:`Dial.greet` starts the handshake, :meth:`Dial.prove` continues it.
"""

from __future__ import annotations

import socket
from typing import Tuple

import torch

from mapsage_launcher.trust.handshake import (
    ClientHandshake,
    GreetingDroppedError,
    HandshakeError,
    close_in_children,
)


class Dial:
    """The address of a peer, and the first bytes of every connection to it.

    Args:
        address: Address of the peer, (host, port).
        secret: Secret of the job.
        purpose: Purpose of the handshake.
        listener: Number that the listener has announced.
        hello: Bytes that the peer expects after the handshake, uint8 (n,).
    """

    def __init__(
        self,
        address: Tuple[str, int],
        secret: bytes,
        purpose: str,
        listener: bytes,
        hello: torch.Tensor,
    ) -> None:
        self.address, self.hello = address, hello
        self._key = secret, purpose, listener
        self._handshake: ClientHandshake
        self._data = b''

    def begin(self) -> socket.socket:
        """Return a socket that is connecting to the peer.

        Raises:
            OSError: If the connection fails at once.
        """
        host, port = self.address
        family, kind, protocol, _, resolved = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        close_in_children(sock)
        try:
            sock.connect(resolved)
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            raise
        return sock

    def greet(self, sock: socket.socket) -> None:
        """Begin the handshake on a socket that is connected now.

        Raises:
            OSError: If the connection broke.
        """
        self._handshake, self._data = ClientHandshake(*self._key), b''
        # The socket's buffer is empty, so this does not block.
        sock.sendall(self._handshake.greeting)

    def prove(self, sock: socket.socket) -> bool:
        """Continue the handshake as far as the peer has answered.

        Returns:
            Whether both ends have proved themselves.

        Raises:
            HandshakeError: If another process than the intended peer answers.
            OSError: If the connection broke.
        """
        handshake = self._handshake
        while not handshake.proved:
            try:
                received = sock.recv(handshake.needed - len(self._data))
            except BlockingIOError:
                return False
            except ConnectionError:
                received = b''
            if not received:
                raise GreetingDroppedError('it closed the connection before it had answered')
            self._data += received
            if len(self._data) == handshake.needed:
                answer, self._data = handshake.take(self._data), b''
                sock.sendall(answer)
        return True

    def is_hopeless(self, error: OSError) -> bool:
        """Return whether another attempt is useless, for example because the process has ended."""
        return isinstance(error, (ConnectionRefusedError, HandshakeError))
