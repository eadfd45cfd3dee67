"""How one process reaches another that listens."""
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
    """The address of a peer, and what is said first on each connection to it.

    Args:
        place: Address of the peer, (host, port).
        secret: Secret of the job.
        purpose: Purpose of the handshake.
        listener: Number that the listener has announced.
        hello: Bytes that the peer expects after the handshake, uint8 (n,).
    """

    def __init__(self, place: Tuple[str, int], secret: bytes, purpose: str, listener: bytes,
                 hello: torch.Tensor) -> None:
        self.place, self.hello = place, hello
        self._key = secret, purpose, listener
        self._handshake: ClientHandshake
        self._data = b''

    def begin(self) -> socket.socket:
        """Return a socket that is connecting to the peer.

        Raises:
            OSError: If that is known to be impossible at once.
        """
        host, port = self.place
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        close_in_children(sock)
        try:
            sock.connect(address)
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
        sock.sendall(self._handshake.greeting)  # its buffer is empty

    def prove(self, sock: socket.socket) -> bool:
        """Continue the handshake as far as the peer has answered.

        Returns:
            Whether both ends have proved themselves.

        Raises:
            HandshakeError: If the peer is not who was meant.
            OSError: If the connection broke.
        """
        handshake = self._handshake
        while not handshake.proved:
            try:
                part = sock.recv(handshake.needed - len(self._data))
            except BlockingIOError:
                return False
            except ConnectionError:
                part = b''
            if not part:
                raise GreetingDroppedError('it closed the connection before it had answered')
            self._data += part
            if len(self._data) == handshake.needed:
                answer, self._data = handshake.take(self._data), b''
                sock.sendall(answer)
        return True

    def is_hopeless(self, error: OSError) -> bool:
        """Return whether another attempt is useless, such as where the process has ended."""
        return isinstance(error, (ConnectionRefusedError, HandshakeError))
