"""How one process reaches another that listens."""
from __future__ import annotations

import socket
from typing import Sequence, Tuple

import torch


class Dial:
    """The addresses of a peer, of which one is found to lead to it.

    Args:
        places: Addresses, (host, port), that may all lead to the peer.
        hello: Bytes that the peer expects first, uint8 (n,).
    """

    def __init__(self, places: Sequence[Tuple[str, int]], hello: torch.Tensor) -> None:
        self.places, self.hello = list(places), hello
        self._next = self._refused = 0

    def begin(self) -> socket.socket:
        """Return a socket that is connecting to the next place.

        Raises:
            OSError: If that is known to be impossible at once.
        """
        host, port = self.places[self._next % len(self.places)]
        self._next += 1
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        sock.setblocking(False)
        try:
            sock.connect(address)
        except BlockingIOError:
            pass
        except OSError:
            sock.close()
            raise
        return sock

    def succeeded(self) -> None:
        """Keep the place that was reached last as the only one."""
        self.places = [self.places[(self._next - 1) % len(self.places)]]
        self._refused = 0

    def failed(self, error: OSError) -> bool:
        """Return whether the peer's process has ended: one place after the other refuses."""
        self._refused = self._refused + 1 if isinstance(error, ConnectionRefusedError) else 0
        return self._refused >= len(self.places)
