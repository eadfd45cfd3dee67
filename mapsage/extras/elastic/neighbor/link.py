"""Sends checkpoints to the machine that keeps a copy, while the training continues.

Every copy has its own connection, from a thread of the rank that wrote the checkpoint to a thread
of a rank on the other machine. No collective is involved, and no failure here ends the training: a
failed copy is a warning in the log, and the previous copy stays.

A conversation, one JSON object per line; the file's bytes follow ``ready`` without a frame, because
the first line has announced their number:

    sender    {"name": "iter_500.pth", "size": 9437184}
    receiver  {"ready": true}
    sender    <9437184 bytes> {"checksum": 2839450938}
    receiver  {"kept": true, "remark": ""}          or at any time {"error": "..."}

A sender whose copy is whole tells the other receivers ``{"obsolete": true}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import zlib
from io import BufferedRWPair, FileIO
from typing import Dict, List, Optional, Sequence, Tuple, Union

from mmengine.logging import MMLogger

from mapsage.base.process import BackgroundWorker
from mapsage.distributed import error_text
from mapsage.distributed.host_address import reachable_host
from mapsage_launcher.trust.guard import Guard, bind_listener
from mapsage_launcher.trust.handshake import (
    ClientHandshake,
    GreetingDroppedError,
    ListenerHandshake,
    connect,
    new_listener,
)
from mapsage_launcher.trust.job_secret import job_secret

from .store import CHUNK_BYTES, CopyStore, megabytes

# Host, port and the listener's number in hexadecimal digits; a list, since it travels as JSON.
Address = List[Union[str, int]]
Message = Dict[str, object]

# Within this time a connection must carry something.
_STALL_SECONDS = 60.0
# For a connection with its handshake.
_CONNECT_SECONDS = 10.0
_MAX_LINE_BYTES, _MAX_COUNT = 2**16, 2**63
# Until the next attempt if a receiver has no room for another connection.
_RETRY_SECONDS = 0.1
# Purpose of the handshake.
_PURPOSE = 'copies'


class CopyReceiver:
    """Receives copies and keeps the newest one that arrived whole.

    Args:
        store: Store of the copies.

    Attributes:
        address: Address of the listener, for :class:`CopySender`.

    Raises:
        OSError: If this process may not listen.
        SecretError: If it has no secret of the job, see :func:`job_secret`.
    """

    def __init__(self, store: CopyStore) -> None:
        self._store = store
        secret = job_secret(os.environ)
        host, number = reachable_host(), new_listener()
        listener = bind_listener(host)
        self.address: Address = [host, listener.getsockname()[1], number.hex()]
        self._guard = Guard(
            listener, lambda: ListenerHandshake(secret, _PURPOSE, number), self._start
        )

    def close(self) -> None:
        """Accept no more copies."""
        self._guard.close()

    def _start(self, connection: socket.socket) -> None:
        # One thread per connection, because a sender that stalls must not delay the next one.
        threading.Thread(
            target=self._serve, args=(connection,), name='mapsage neighbor copy', daemon=True
        ).start()

    def _serve(self, connection: socket.socket) -> None:
        # These errors end only this connection: the sender is gone, or violates the protocol. It
        # logs them itself; a copy that was arriving is removed.
        with connection, contextlib.suppress(OSError, EOFError, ValueError):
            self._answer(connection)

    def _answer(self, connection: socket.socket) -> None:
        connection.settimeout(_STALL_SECONDS)
        with connection.makefile('rwb') as stream:
            request = _read_line(stream)
            if request.get('obsolete'):
                self._store.drop()
                return
            try:
                reply = self._receive(stream, _read_name(request), _read_count(request, 'size'))
            except Exception as error:
                # The sender learns the reason, and logs it.
                _write_line(stream, error=error_text(error))
                raise
            _write_line(stream, **reply)

    def _receive(self, stream: BufferedRWPair, name: str, size: int) -> Message:
        arrival = self._store.arrive(name, size)
        try:
            _write_line(stream, ready=True)
            buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
            while size:
                chunk = buffer[: min(size, CHUNK_BYTES)]
                if stream.readinto(chunk) != len(chunk):
                    raise EOFError('the connection ended inside the copy')
                arrival.write(chunk)
                size -= len(chunk)
            arrival.keep(_read_count(_read_line(stream), 'checksum'))
        finally:
            arrival.drop()
        return dict(kept=True, remark=arrival.remark)


class CopySender:
    """Sends checkpoints in a thread, one at a time. A newer checkpoint replaces one that waits.

    Args:
        host: Name of the machine that keeps the copy.
        address: Address of its receiver.
        logger: Logger of the run.
        outdated: Addresses of other receivers, whose copies are dropped once a copy is whole at
            ``address``.
    """

    def __init__(
        self, host: str, address: Address, logger: MMLogger, outdated: Sequence[Address] = ()
    ) -> None:
        self._host, self._address, self._logger = host, address, logger
        self._outdated = list(outdated)
        self._worker = BackgroundWorker('neighbor copy')
        self._lock = threading.Lock()
        # The next checkpoint to send: its path and the open file.
        self._next: Optional[Tuple[str, FileIO]] = None
        self._closed = False
        # Identifies the last message in the log, so that it is not repeated for every checkpoint.
        self._last_message = ''

    def send(self, path: str) -> None:
        """Send a checkpoint soon. Its file is opened now, so it may be removed meanwhile."""
        try:
            file = open(path, 'rb', buffering=0)
        except OSError as error:
            self._log_failure(path, error)
            return
        with self._lock:
            waiting, self._next = self._next, (path, file)
        if waiting is None:
            self._worker.submit(self._send_next)
        else:
            waiting[1].close()

    def close(self) -> None:
        """Stop sending. A copy that is being sent is abandoned."""
        self._closed = True
        self._worker.close(timeout=0)

    def _send_next(self) -> None:
        with self._lock:
            waiting, self._next = self._next, None
        if waiting is None:
            return
        path, file = waiting
        try:
            with file:
                result = self._transfer(file, os.path.basename(path))
        except Exception as error:
            # The error is handed from this thread to the log of the run, whatever it is: nobody
            # reads the worker's future, and a failed copy must not end the training.
            self._log_failure(path, error)
            return
        if result is None:
            return
        size, remark = result
        while self._outdated:
            _drop_copy(self._outdated.pop())
        if remark:
            self._log(f'neighbor copy: {remark}.', warning=True)
        else:
            self._log(
                f'neighbor copy: {os.path.basename(path)} ({megabytes(size)}), and each '
                f'later one in its place, is in the memory of {self._host} as well',
                key='in memory',
            )

    def _transfer(self, file: FileIO, name: str) -> Optional[Tuple[int, str]]:
        """Return the size and the receiver's remark; None after :meth:`close`."""
        size, crc = os.fstat(file.fileno()).st_size, 0
        with _connect(self._address) as connection, connection.makefile('rwb') as stream:
            _write_line(stream, name=name, size=size)
            self._expect(stream, 'ready')
            left = size
            while left:
                if self._closed:
                    return None
                data = file.read(min(left, CHUNK_BYTES))
                if not data:
                    raise OSError(f'{name} became shorter while it was read')
                crc, left = zlib.crc32(data, crc), left - len(data)
                connection.sendall(data)
            _write_line(stream, checksum=crc)
            return size, str(self._expect(stream, 'kept')['remark'])

    def _expect(self, stream: BufferedRWPair, key: str) -> Message:
        reply = _read_line(stream)
        if key not in reply:
            raise OSError(f'{self._host} says: {reply.get("error", reply)}')
        return reply

    def _log_failure(self, path: str, error: Exception) -> None:
        if not self._closed:
            reason = error_text(error)
            self._log(
                f'neighbor copy: {os.path.basename(path)} is not copied to {self._host}: '
                f'{reason}. The training continues, and the previous copy, if there is '
                f'one, is kept. The next checkpoint will be tried again.',
                warning=True,
                # Numbers, such as the free bytes, do not make it another message.
                key=re.sub(r'\d+', '', reason),
            )

    def _log(self, text: str, warning: bool = False, key: str = '') -> None:
        """Log a text, unless the last message had the same key."""
        if (key or text) != self._last_message:
            self._last_message = key or text
            (self._logger.warning if warning else self._logger.info)(text)


def _drop_copy(address: Address) -> None:
    # A receiver that is gone has no copy, or one that does no harm.
    with contextlib.suppress(OSError):
        with _connect(address) as connection, connection.makefile('rwb') as stream:
            _write_line(stream, obsolete=True)
            # The receiver closes the connection once the copy is removed.
            stream.read()


def _connect(address: Address) -> socket.socket:
    """Return a connection to a receiver. Both ends have proved that they belong to this job."""
    host, port, number = str(address[0]), int(address[1]), str(address[2])
    secret, deadline = job_secret(os.environ), time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            connection = connect(
                (host, port),
                ClientHandshake(secret, _PURPOSE, bytes.fromhex(number)),
                max(0.01, deadline - time.monotonic()),
            )
        except GreetingDroppedError:
            # The receiver has no room for another connection now.
            if time.monotonic() > deadline - _RETRY_SECONDS:
                raise
            time.sleep(_RETRY_SECONDS)
        else:
            connection.settimeout(_STALL_SECONDS)
            return connection


def _read_name(request: Message) -> str:
    name = request.get('name')
    if not isinstance(name, str) or os.path.basename(name) != name or '\0' in name:
        raise ValueError(f'name={name!r}, expected the name of a checkpoint file.')
    return name


def _read_count(message: Message, key: str) -> int:
    count = message.get(key)
    if not isinstance(count, int) or isinstance(count, bool) or not 0 <= count < _MAX_COUNT:
        raise ValueError(f'{key}={count!r}, expected a whole number from 0 to 2**63 - 1.')
    return count


def _write_line(stream: BufferedRWPair, **message: object) -> None:
    stream.write(json.dumps(message).encode() + b'\n')
    stream.flush()


def _read_line(stream: BufferedRWPair) -> Message:
    """Return the object on the next line.

    Raises:
        EOFError: If the connection ended, or the line is not a whole JSON object.
        ValueError: If the line is not JSON.
    """
    line = stream.readline(_MAX_LINE_BYTES)
    try:
        message = json.loads(line) if line.endswith(b'\n') else None
    except RecursionError as error:
        raise ValueError('a message is nested too deeply') from error
    if not isinstance(message, dict):
        raise EOFError('the connection has ended')
    return message
