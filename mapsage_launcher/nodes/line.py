"""A connection between a node's watch and a rank or another watch; JSON objects travel on it."""

from __future__ import annotations

import json
import socket
from typing import Any, Dict, List

# An object of a message; its values are checked where they are used.
Message = Dict[str, Any]

# How long a send or a read may block.
_BLOCKING_SECONDS = 1.0
MAX_LINE_BYTES = 1 << 16


class Line:
    """A connection on which JSON objects travel, one object per line of text.

    Args:
        connection: Connected stream socket; closed by :meth:`close`.

    Attributes:
        limit: Largest number of bytes of a line.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.socket = connection
        connection.settimeout(_BLOCKING_SECONDS)
        self._unread, self.limit = b'', MAX_LINE_BYTES

    def send(self, **message: Any) -> None:
        """Send an object. If it cannot be sent at once, it is lost, and so is the connection."""
        try:
            self.socket.sendall(json.dumps(message).encode() + b'\n')
        except OSError:
            # The side of this process that reads notices the end of the connection.
            pass

    def read(self) -> List[Message]:
        """Return the objects that have arrived.

        Raises:
            EOFError: If the connection has ended, or something other than objects arrives.
        """
        try:
            data = self.socket.recv(self.limit)
        except socket.timeout:
            return []
        except OSError:
            data = b''
        if not data or len(self._unread) > self.limit:
            raise EOFError
        *lines, self._unread = (self._unread + data).split(b'\n')
        try:
            messages = [json.loads(line.decode()) for line in lines]
        except (ValueError, RecursionError):
            raise EOFError from None
        if not all(isinstance(message, dict) for message in messages):
            raise EOFError
        return messages

    def close(self) -> None:
        """Close the connection."""
        self.socket.close()
