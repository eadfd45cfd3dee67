"""The handshake at the start of every connection between ranks proves that both know the secret.

The secret of the job never travels. Each end sends a random challenge and answers the other end's
challenge with an HMAC over the purpose, its role, the listener and both challenges. So an answer is
useless on another connection, at another listener, or when reflected to its sender. All messages
have a fixed size, and the client reveals nothing about the job before the listener has proved
itself:

    client                                     listener
    version, challenge                     ->
                                           <-  version, listener number, challenge, proof
    proof                                  ->
                                           <-  welcome

Bytes after the handshake are neither encrypted nor authenticated. Pickled
bytes are sealed with the secret (`sealed.py`).
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
import weakref
from typing import Tuple

VERSION = 1
LISTENER_BYTES = 16
_MAGIC = b'MapSage'
_VERSION_WORD = _MAGIC + bytes([VERSION])
_NONCE_BYTES, _PROOF_BYTES = 32, hashlib.sha256().digest_size
_GREETING_BYTES = len(_VERSION_WORD) + _NONCE_BYTES
# Size of the listener's answer without the version word.
_ANSWER_BYTES = LISTENER_BYTES + _NONCE_BYTES + _PROOF_BYTES
_WELCOME = b'\x01'


class HandshakeError(OSError):
    """The other end of a connection cannot prove that it belongs to this job. Do not retry."""


class SecretMismatchError(HandshakeError):
    """The other end is the expected process, but it has another secret."""


class OtherVersionError(HandshakeError):
    """The other end runs a version of MapSage with another handshake."""


class OtherListenerError(HandshakeError):
    """Something else listens at the address: the process that announced it has ended."""


class GreetingDroppedError(OSError):
    """The listener closed the connection during the handshake: it was full, or it is ending."""


def new_listener() -> bytes:
    """Return a random number for a new listener, to be announced with its address.

    Ports are reused, and several jobs of a user may share a secret. The proofs cover the number, so
    a connection always leads to the process that announced it. The number is public.
    """
    return os.urandom(LISTENER_BYTES)


class ListenerHandshake:
    """The listener's side of one connection; the caller reads and writes the socket.

    Until :attr:`proved`, read exactly :attr:`needed` bytes, give them to :meth:`take` and send the
    bytes that it returns.

    Args:
        secret: Secret of the job.
        purpose: Name of the connection's use, such as ``'mesh'``.
        listener: Number of the listener, see :func:`new_listener`.

    Attributes:
        needed: Number of bytes of the client's next message.
        proved: Whether the client has proved that it knows the secret.
    """

    def __init__(self, secret: bytes, purpose: str, listener: bytes) -> None:
        self._secret, self._purpose, self._listener = secret, purpose, listener
        self._expected = b''
        self.needed, self.proved = _GREETING_BYTES, False

    def take(self, data: bytes) -> bytes:
        """Return the answer to a message of the client.

        Raises:
            HandshakeError: If the message is not a greeting of MapSage, or its proof is wrong.
        """
        if self._expected:
            if not hmac.compare_digest(data, self._expected):
                raise HandshakeError('the proof of the client is wrong')
            self.needed, self.proved = 0, True
            return _WELCOME
        if data[: len(_MAGIC)] != _MAGIC:
            raise HandshakeError('the first message is not a greeting of MapSage')
        if data[: len(_VERSION_WORD)] != _VERSION_WORD:
            self.needed = 0
            # From this version word the client makes an error for its user.
            return _VERSION_WORD
        client, server = data[len(_VERSION_WORD) :], os.urandom(_NONCE_BYTES)
        facts = self._secret, self._purpose, self._listener, client, server
        self._expected = _proof('client', *facts)
        self.needed = _PROOF_BYTES
        return _VERSION_WORD + self._listener + server + _proof('listener', *facts)


class ClientHandshake:
    """The side of the process that connects; used like :class:`ListenerHandshake`.

    Args:
        secret: Secret of the job.
        purpose: Name of the connection's use, equal to the listener's.
        listener: Number that the listener has announced.

    Attributes:
        greeting: Bytes to send first.
        needed: Number of bytes of the listener's next message.
        proved: Whether both ends have proved themselves.
    """

    def __init__(self, secret: bytes, purpose: str, listener: bytes) -> None:
        self._secret, self._purpose, self._listener = secret, purpose, listener
        self._nonce = os.urandom(_NONCE_BYTES)
        self.greeting = _VERSION_WORD + self._nonce
        self.needed, self.proved = len(_VERSION_WORD), False
        self._steps = [self._take_version, self._take_answer, self._take_welcome]

    def take(self, data: bytes) -> bytes:
        """Return the bytes to send after a message of the listener; they may be empty.

        Raises:
            SecretMismatchError: If the listener has another secret.
            OtherVersionError: If the listener runs another version.
            OtherListenerError: If another process listens at the address now.
        """
        return self._steps.pop(0)(data)

    def _take_version(self, data: bytes) -> bytes:
        if data != _VERSION_WORD:
            if data.startswith(_MAGIC):
                raise OtherVersionError(
                    f'it runs another version of MapSage: its handshake has version {data[-1]}, '
                    f'expected {VERSION}. Install the same version on all machines'
                )
            raise OtherListenerError('another program listens at its address now')
        self.needed = _ANSWER_BYTES
        return b''

    def _take_answer(self, data: bytes) -> bytes:
        listener, server = data[:LISTENER_BYTES], data[LISTENER_BYTES:-_PROOF_BYTES]
        if listener != self._listener:
            raise OtherListenerError('another process listens at its address now')
        facts = self._secret, self._purpose, self._listener, self._nonce, server
        if not hmac.compare_digest(data[-_PROOF_BYTES:], _proof('listener', *facts)):
            raise SecretMismatchError(
                'the two hold different secrets. All machines of a job need the same one: set '
                'MAPSAGE_SECRET_FILE to a file with the same content on each of them, or '
                'MAPSAGE_SECRET to the same value'
            )
        self.needed = len(_WELCOME)
        return _proof('client', *facts)

    def _take_welcome(self, data: bytes) -> bytes:
        if data != _WELCOME:
            raise OtherListenerError('another program listens at its address now')
        self.needed, self.proved = 0, True
        return b''


def connect(address: Tuple[str, int], handshake: ClientHandshake, seconds: float) -> socket.socket:
    """Return a connection on which both ends have proved themselves.

    Args:
        address: Host and port.
        handshake: New handshake.
        seconds: Time for connecting and the whole handshake.

    Raises:
        ConnectionRefusedError: If no process listens there: the expected process has ended.
        GreetingDroppedError: If the listener closed the connection. Retry: the listener may have
            been full. If it has ended, the next attempt is refused.
        HandshakeError: If the other end is not the expected process.
        OSError: If the host cannot be reached, or does not answer in time.
    """
    deadline = time.monotonic() + seconds
    connection = socket.create_connection(address, seconds)
    _connections.add(connection)
    try:
        _prove(connection, handshake, deadline)
    # Also for KeyboardInterrupt: the caller has no connection yet that it could close.
    except BaseException:
        connection.close()
        raise
    return connection


def _prove(connection: socket.socket, handshake: ClientHandshake, deadline: float) -> None:
    answer = handshake.greeting
    try:
        while True:
            _set_timeout(connection, deadline)
            connection.sendall(answer)
            if handshake.proved:
                return
            answer = handshake.take(_receive(connection, handshake.needed, deadline))
    except (ConnectionError, EOFError) as error:
        raise GreetingDroppedError('it closed the connection before it had answered') from error


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b''
    while len(data) < size:
        _set_timeout(connection, deadline)
        received = connection.recv(size - len(data))
        if not received:
            raise EOFError
        data += received
    return data


def _set_timeout(connection: socket.socket, deadline: float) -> None:
    """Limit the next call of the socket to the time until the deadline."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise socket.timeout('it did not answer in time')
    connection.settimeout(seconds)


def _proof(
    role: str, secret: bytes, purpose: str, listener: bytes, client: bytes, server: bytes
) -> bytes:
    """Return the proof of one end: an HMAC over its role and all facts of the connection."""
    message = b'\0'.join((_VERSION_WORD, role.encode(), purpose.encode(), b''))
    return hmac.new(secret, message + listener + client + server, hashlib.sha256).digest()


# Closed in forked children, which would keep them open for a rank that has died.
_connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    for connection in list(_connections):
        # Not close(): it waits until the files made from the socket are closed too.
        descriptor = connection.detach()
        if descriptor >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_close_in_child)
