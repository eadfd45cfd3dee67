"""Sends checkpoints to the machine that keeps the copy, while the training goes on.

A connection of its own carries each copy, from a thread of the rank that has written the checkpoint
to a thread of a rank on the other machine. No collective is part of it, and nothing that happens
here ends the training: a copy that fails is a warning, and the one before it stays.
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
from typing import Any, Dict, List, Optional, Sequence, Tuple

from mapsage.background_worker import BackgroundWorker
from mapsage.distributed import error_text
from mapsage.distributed.host_address import reachable_host
from mapsage.distributed.trust.guard import Guard, bind_listener
from mapsage.distributed.trust.handshake import (
    ClientHandshake,
    GreetingDroppedError,
    ListenerHandshake,
    connect,
    new_listener,
)
from mapsage.distributed.trust.job_secret import job_secret

from .store import CHUNK_BYTES, CopyStore, megabytes

_STALL_SECONDS = 60.0  # in which a connection must carry something
_CONNECT_SECONDS = 10.0  # with the handshake
_MAX_LINE = 1 << 16
_AGAIN_SECONDS = 0.1  # until the next attempt where a receiver is full
_PURPOSE = 'copies'  # of the handshake


class CopyReceiver:
    """Takes copies in and keeps the last one that arrived whole.

    Args:
        store: Where they are kept.

    Attributes:
        address: Host, port and number of the listener, for :class:`CopySender`.

    Raises:
        OSError: If this process may not listen.
        SecretError: If it has no secret of the job, see :func:`job_secret`.
    """

    def __init__(self, store: CopyStore) -> None:
        self._store = store
        secret = job_secret(os.environ)
        host, number = reachable_host(), new_listener()
        listener = bind_listener(host)
        self.address: List[Any] = [host, listener.getsockname()[1], number.hex()]
        self._guard = Guard(listener, lambda: ListenerHandshake(secret, _PURPOSE, number),
                            self._start)

    def close(self) -> None:
        """Take no more copies."""
        self._guard.close()

    def _start(self, connection: socket.socket) -> None:
        # One thread for each: a sender that stops must not keep the next one waiting.
        threading.Thread(target=self._serve, args=(connection,), name='mapsage neighbor copy',
                         daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                self._take(connection)
            except Exception:  # the sender is gone, and has its own words for it
                pass

    def _take(self, connection: socket.socket) -> None:
        connection.settimeout(_STALL_SECONDS)
        with connection.makefile('rwb') as stream:
            asked = _read_line(stream)
            if asked.get('obsolete'):
                self._store.drop()
                return
            try:
                kept = self._receive(stream, _name_in(asked), _count_in(asked, 'size'))
            except Exception as error:
                _write_line(stream, error=error_text(error))
                raise
            _write_line(stream, **kept)

    def _receive(self, stream: Any, name: str, size: int) -> Dict[str, Any]:
        arrival = self._store.arrive(name, size)
        try:
            _write_line(stream, ready=True)
            buffer = memoryview(bytearray(min(size, CHUNK_BYTES)))
            while size:
                part = buffer[:min(size, CHUNK_BYTES)]
                if stream.readinto(part) != len(part):
                    raise EOFError('the connection ended inside the copy')
                arrival.write(part)
                size -= len(part)
            arrival.keep(_count_in(_read_line(stream), 'checksum'))
        finally:
            arrival.drop()
        return dict(kept=True, remark=arrival.remark)


class CopySender:
    """Sends checkpoints in a thread, one at a time. A newer one replaces one that waits.

    Args:
        host: Name of the machine that keeps the copy.
        address: The receiver's there.
        logger: Logger of the run.
        others: Addresses of other receivers, whose copies are given up once one is whole here.
    """

    def __init__(self, host: str, address: List[Any], logger: Any,
                 others: Sequence[List[Any]] = ()) -> None:
        self._host, self._address, self._logger = host, address, logger
        self._others = list(others)
        self._worker = BackgroundWorker('neighbor copy')
        self._lock = threading.Lock()
        self._next: Optional[Tuple[str, Any]] = None  # path and open file
        self._closed = False
        self._told = ''  # how the last copy ended, in the log's words

    def send(self, path: str) -> None:
        """Send a checkpoint soon. It is opened at once, so that it may be removed meanwhile."""
        try:
            file = open(path, 'rb', buffering=0)
        except OSError as error:
            self._failed(path, error)
            return
        with self._lock:
            waiting, self._next = self._next, (path, file)
        if waiting is None:
            self._worker.submit(self._send_next)
        else:
            waiting[1].close()

    def close(self) -> None:
        """Send no more; a copy that is under way is given up."""
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
                answer = self._transfer(file, os.path.basename(path))
        except Exception as error:  # a copy that fails must not end the training
            self._failed(path, error)
            return
        if answer is None:
            return
        size, remark = answer
        while self._others:
            _give_up_copy(self._others.pop())
        if remark:
            self._tell(f'neighbor copy: {remark}.', warning=True)
        else:
            self._tell(f'neighbor copy: {os.path.basename(path)} ({megabytes(size)}), and each '
                       f'later one in its place, is in the memory of {self._host} as well',
                       key='in memory')

    def _transfer(self, file: Any, name: str) -> Optional[Tuple[int, str]]:
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
            return size, self._expect(stream, 'kept')['remark']

    def _expect(self, stream: Any, word: str) -> Dict[str, Any]:
        answer = _read_line(stream)
        if word not in answer:
            raise OSError(f"{self._host} says: {answer.get('error', answer)}")
        return answer

    def _failed(self, path: str, error: Exception) -> None:
        if not self._closed:
            error_here = error_text(error)
            self._tell(
                f'neighbor copy: {os.path.basename(path)} is not copied to {self._host}: '
                f'{error_here}. The training goes on, and the copy before it, if there is '
                f'one, is kept. The next checkpoint is tried again.', warning=True,
                key=re.sub(r'\d+', '', error_here))  # such as how much room there is now

    def _tell(self, text: str, warning: bool = False, key: str = '') -> None:
        """Log a text unless it says what the last one said."""
        if (key or text) != self._told:
            self._told = key or text
            (self._logger.warning if warning else self._logger.info)(text)


def _give_up_copy(address: List[Any]) -> None:
    with contextlib.suppress(OSError):  # it is gone; its copy does no harm
        with _connect(address) as connection, connection.makefile('rwb') as stream:
            _write_line(stream, obsolete=True)
            stream.read()  # until it is done


def _connect(address: List[Any]) -> socket.socket:
    """Return a connection to a receiver, which both ends have proved to be of this job."""
    host, port, number = address
    secret, deadline = job_secret(os.environ), time.monotonic() + _CONNECT_SECONDS
    while True:
        try:
            connection = connect((host, port), ClientHandshake(
                secret, _PURPOSE, bytes.fromhex(number)), max(0.01, deadline - time.monotonic()))
        except GreetingDroppedError:  # it is full
            if time.monotonic() > deadline - _AGAIN_SECONDS:
                raise
            time.sleep(_AGAIN_SECONDS)
        else:
            connection.settimeout(_STALL_SECONDS)
            return connection


def _name_in(asked: Dict[str, Any]) -> str:
    name = asked.get('name')
    if not isinstance(name, str) or os.path.basename(name) != name or '\0' in name:
        raise ValueError(f'name={name!r}, expected the name of a checkpoint file.')
    return name


def _count_in(message: Dict[str, Any], key: str) -> int:
    count = message.get(key)
    if type(count) is not int or count < 0:
        raise ValueError(f'{key}={count!r}, expected a number from 0 on.')
    return count


def _write_line(stream: Any, **message: Any) -> None:
    stream.write(json.dumps(message).encode() + b'\n')
    stream.flush()


def _read_line(stream: Any) -> Dict[str, Any]:
    """Return the object of the next line; EOFError at the end of the connection."""
    line = stream.readline(_MAX_LINE)
    message = json.loads(line) if line.endswith(b'\n') else None
    if not isinstance(message, dict):
        raise EOFError('the connection has ended')
    return message
