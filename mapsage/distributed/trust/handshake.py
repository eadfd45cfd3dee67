"""The handshake at the beginning of every connection between ranks: both ends know the secret.

The secret of the job never travels. Each end sends a random challenge, and answers that of the
other end with an HMAC over the purpose, its role, the listener and both challenges. So an answer is
of no use on another connection, at another listener, or sent back to where it came from. All
messages have a fixed size, and the client says nothing of the job before the listener has proved
itself.

What is sent after the handshake is neither encrypted nor authenticated.

This file imports only the standard library, since the watch of a node loads it by its path.
"""
from __future__ import annotations

import hashlib
import hmac
import os
import socket
import time
import weakref
from typing import Any, Tuple

VERSION = 1
LISTENER_BYTES = 16
_MAGIC = b'MapSage'
_VERSION_WORD = _MAGIC + bytes([VERSION])
_NONCE_BYTES, _PROOF_BYTES = 32, hashlib.sha256().digest_size
_GREETING_BYTES = len(_VERSION_WORD) + _NONCE_BYTES
_ANSWER_BYTES = LISTENER_BYTES + _NONCE_BYTES + _PROOF_BYTES  # behind the version word
_WELCOME = b'\x01'


class HandshakeError(OSError):
    """The other end of a connection cannot prove that it is of this job; a new attempt is useless.
    """


class SecretMismatchError(HandshakeError):
    """The other end is the expected process, and holds another secret."""


class OtherVersionError(HandshakeError):
    """The other end runs a version of MapSage with another handshake."""


class OtherListenerError(HandshakeError):
    """Something else listens at the address: the process that announced it has ended."""


class GreetingDroppedError(OSError):
    """The connection was closed during the handshake: the listener was full, or is ending."""


def new_listener() -> bytes:
    """Return the number of a new listener. It is public: announce it with the address.

    Ports are reused, and several jobs of a user may share a secret. The number is in the
    proofs, so that no connection leads to another process than the one that announced it.
    """
    return os.urandom(LISTENER_BYTES)


class ListenerHandshake:
    """The listener's side of one connection, for whoever reads and writes the socket.

    Read exactly :attr:`needed` bytes, give them to :meth:`take` and send what it returns, until
    :attr:`proved`.

    Args:
        secret: Secret of the job.
        purpose: What the connection is for, such as ``'mesh'``.
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
            HandshakeError: If it is not a greeting of MapSage, or its proof is wrong.
        """
        if self._expected:
            if not hmac.compare_digest(data, self._expected):
                raise HandshakeError('the proof of the client is wrong')
            self.needed, self.proved = 0, True
            return _WELCOME
        if data[:len(_MAGIC)] != _MAGIC:
            raise HandshakeError('what was sent is no greeting of MapSage')
        if data[:len(_VERSION_WORD)] != _VERSION_WORD:
            self.needed = 0
            return _VERSION_WORD  # the client says what is wrong
        client, server = data[len(_VERSION_WORD):], os.urandom(_NONCE_BYTES)
        facts = self._secret, self._purpose, self._listener, client, server
        self._expected = _proof('client', *facts)
        self.needed = _PROOF_BYTES
        return _VERSION_WORD + self._listener + server + _proof('listener', *facts)


class ClientHandshake:
    """The side of the end that connects; used like :class:`ListenerHandshake`.

    Args:
        secret: Secret of the job.
        purpose: What the connection is for, as at the listener.
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
        """Return what to send after a message of the listener; it may be empty.

        Raises:
            SecretMismatchError: If the listener holds another secret.
            OtherVersionError: If it runs another version.
            OtherListenerError: If it is not the one that was meant.
        """
        return self._steps.pop(0)(data)

    def _take_version(self, data: bytes) -> bytes:
        if data != _VERSION_WORD:
            if data.startswith(_MAGIC):
                raise OtherVersionError(
                    f'it runs another version of MapSage: its handshake has version {data[-1]}, '
                    f'expected {VERSION}. Install the same version on all machines')
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
                'MAPSAGE_SECRET to the same value')
        self.needed = len(_WELCOME)
        return _proof('client', *facts)

    def _take_welcome(self, data: bytes) -> bytes:
        if data != _WELCOME:
            raise OtherListenerError('what listens at its address does not speak as MapSage does')
        self.needed, self.proved = 0, True
        return b''


def connect(address: Tuple[str, int], handshake: ClientHandshake, seconds: float) -> socket.socket:
    """Return a connection whose both ends have proved themselves.

    Args:
        address: Host and port.
        handshake: A new one.
        seconds: Time for all of it.

    Raises:
        ConnectionRefusedError: If nobody listens there: the process has ended.
        GreetingDroppedError: If the listener closed the connection. Try it again: it may have been
            full; if it has ended, the next attempt is refused.
        HandshakeError: If the other end is not who was meant.
        OSError: If it cannot be reached, or does not answer in time.
    """
    deadline = time.monotonic() + seconds
    connection = socket.create_connection(address, seconds)
    close_in_children(connection)
    try:
        _prove(connection, handshake, deadline)
    except BaseException:
        connection.close()
        raise
    return connection


def _prove(connection: socket.socket, handshake: ClientHandshake, deadline: float) -> None:
    answer = handshake.greeting
    try:
        while True:
            _limit(connection, deadline)
            connection.sendall(answer)
            if handshake.proved:
                return
            answer = handshake.take(_receive(connection, handshake.needed, deadline))
    except (ConnectionError, EOFError) as error:
        raise GreetingDroppedError(
            'it closed the connection before it had answered') from error


def _receive(connection: socket.socket, size: int, deadline: float) -> bytes:
    data = b''
    while len(data) < size:
        _limit(connection, deadline)
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _limit(connection: socket.socket, deadline: float) -> None:
    left = deadline - time.monotonic()
    if left <= 0:
        raise socket.timeout('it did not answer in time')
    connection.settimeout(left)


def _proof(role: str, secret: bytes, purpose: str, listener: bytes, client: bytes,
           server: bytes) -> Any:
    message = b'\0'.join((_VERSION_WORD, role.encode(), purpose.encode(), b''))
    return hmac.new(secret, message + listener + client + server, hashlib.sha256).digest()


def close_in_children(connection: socket.socket) -> None:
    """Let forked children close a connection: they must not keep it open for a rank that has died.
    """
    _connections.add(connection)


_connections: Any = weakref.WeakSet()


def _forget_all() -> None:
    for connection in list(_connections):
        descriptor = connection.detach()  # close() would leave it to the files made from it
        if descriptor >= 0:
            os.close(descriptor)


os.register_at_fork(after_in_child=_forget_all)
