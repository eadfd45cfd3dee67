"""A copy travels over a real connection; whatever happens to it, the one before stays."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import threading
from pathlib import Path
from typing import Any, Iterator, List

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mapsage.extras.elastic.neighbor.link import CopyReceiver, CopySender, _connect
from mapsage.extras.elastic.neighbor.store import CopyStore
from mapsage_launcher.trust.handshake import ListenerHandshake
from mapsage_launcher.trust.job_secret import job_secret


class Log(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: List[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f'{record.levelname} {record.getMessage()}')


class Pair:
    """A receiver, and a sender on the same machine."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, Log()
        (folder / 'disk').mkdir()
        (folder / 'memory').mkdir()
        self.store = CopyStore(str(folder / 'disk'), folder / 'memory')
        self.receiver = CopyReceiver(self.store)
        self.logger = logging.Logger('run', logging.DEBUG)
        self.logger.addHandler(self.log)
        self.sender = CopySender('node1', self.receiver.address, self.logger)

    def file(self, name: str, data: bytes) -> str:
        path = self.folder / name
        path.write_bytes(data)
        return str(path)

    def held(self) -> List[bytes]:
        return [path.read_bytes() for path in self.store.copies()]

    def settle(self) -> None:
        """Wait until the sender has done what it was asked to."""
        self.sender._worker.submit(bool).result(60)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.sender.close()
    made.receiver.close()


def test_the_newest_checkpoint_is_on_the_other_side(pair: Pair) -> None:
    first, second = os.urandom(9 * 2**20), os.urandom(100)
    path = pair.file('iter_5.pth', first)
    pair.sender.send(path)
    os.remove(path)  # max_keep_ckpts
    pair.settle()
    assert pair.held() == [first]
    pair.sender.send(pair.file('iter_10.pth', second))
    pair.settle()
    assert pair.held() == [second]
    assert pair.log.lines == [
        'INFO neighbor copy: iter_5.pth (9.4 MB), and each later one in its '
        'place, is in the memory of node1 as well'
    ]


def test_one_that_waits_makes_way_for_a_newer_one(pair: Pair) -> None:
    go_on = threading.Event()
    pair.sender._worker.submit(go_on.wait)
    for number in range(3):
        pair.sender.send(pair.file(f'iter_{number}.pth', b'%d' % number))
    go_on.set()
    pair.settle()
    assert pair.held() == [b'2']
    assert ['iter_2.pth' in line for line in pair.log.lines] == [True]


def test_without_room_the_run_hears_of_it_once(pair: Pair) -> None:
    pair.sender.send(pair.file('iter_5.pth', b'fits'))
    pair.settle()
    huge = pair.file('iter_10.pth', b'')
    for size in (2**43, 2**43 - 1):  # sparse, and more than any disk here
        os.truncate(huge, size)
        pair.sender.send(huge)
        pair.settle()
    assert pair.held() == [b'fits']
    (told,) = pair.log.lines[1:]
    assert told.startswith(
        'WARNING neighbor copy: iter_10.pth is not copied to node1: OSError: '
        'node1 says: NoRoomError: a copy of 8,796,093.0 MB has no room'
    )
    assert 'The training continues' in told


def test_a_machine_that_is_gone_is_a_warning(pair: Pair) -> None:
    pair.sender.send(pair.file('iter_5.pth', b'fits'))
    pair.settle()
    pair.receiver.close()
    pair.sender.send(pair.file('iter_10.pth', b'more'))
    pair.settle()
    assert 'iter_10.pth is not copied to node1: ConnectionRefusedError' in pair.log.lines[1]
    pair.sender.send(str(pair.folder / 'never written'))
    assert 'FileNotFoundError' in pair.log.lines[2]
    assert pair.held() == [b'fits']


@pytest.mark.parametrize(
    'data, checksum', [(b'half', None), (b'whole', 1), (b'', None), (b'whole', -1), (b'whole', 'a')]
)
def test_what_does_not_arrive_whole_leaves_the_copy_before_it(
    data: bytes, checksum: Any, pair: Pair
) -> None:
    pair.sender.send(pair.file('iter_5.pth', b'fits'))
    pair.settle()
    with _connect(pair.receiver.address) as other, other.makefile('rwb') as stream:
        stream.write(json.dumps(dict(name='iter_10.pth', size=5)).encode() + b'\n')
        stream.flush()
        assert stream.readline() == b'{"ready": true}\n'
        stream.write(data)
        if checksum is not None:
            stream.write(json.dumps(dict(checksum=checksum)).encode() + b'\n')
            stream.flush()
            assert b'Error' in stream.readline()
        stream.flush()
        other.shutdown(socket.SHUT_WR)
        stream.read()  # until the receiver has given up
    assert pair.held() == [b'fits']
    pair.sender.send(pair.file('iter_15.pth', b'later'))
    pair.settle()
    assert pair.held() == [b'later']
    assert len(list(pair.folder.glob('memory/*/*'))) == 1


@given(
    st.binary(max_size=200)
    | st.builds(
        lambda message: json.dumps(message).encode() + b'\n',
        st.dictionaries(
            st.sampled_from(['name', 'size', 'checksum', 'other']),
            st.none()
            | st.integers(-(2**70), 2**70)
            | st.text(max_size=9)
            | st.lists(st.integers(), max_size=2),
        ),
    )
)
@example(b'[' * 60000 + b'\n')
@example(b'{"name": "iter_10.pth", "size": 1%s}\n' % (b'0' * 400))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100)
@pytest.mark.filterwarnings('error::pytest.PytestUnhandledThreadExceptionWarning')
def test_any_bytes_leave_the_copy_and_the_receiver(pair: Pair, sent: bytes) -> None:
    if not pair.held():
        pair.sender.send(pair.file('iter_5.pth', b'fits'))
        pair.settle()
    with _connect(pair.receiver.address) as other:
        other.sendall(sent)
        other.shutdown(socket.SHUT_WR)
        while other.recv(4096):
            pass
    assert pair.held() == [b'fits']


def test_what_a_stranger_read_in_the_store_does_not_let_him_send(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.sender.send(pair.file('iter_5.pth', b'fits'))
    pair.settle()
    with socket.create_connection(pair.receiver.address[:2]) as stranger:
        stranger.sendall(
            json.dumps(
                dict(token=pair.receiver.address[2], name='iter_10.pth', size=5, obsolete=True)
            ).encode()
            + b'\n'
        )
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b''
    monkeypatch.setenv('MAPSAGE_SECRET', 'f' * 64)
    pair.sender.send(pair.file('iter_10.pth', b'more'))
    pair.settle()
    assert 'SecretMismatchError' in pair.log.lines[1] and 'MAPSAGE_SECRET_FILE' in pair.log.lines[1]
    assert pair.held() == [b'fits']


def test_slow_ones_and_many_silent_ones_do_not_keep_a_copy_waiting(pair: Pair) -> None:
    """A stranger that sends a byte now and then, one of the job that stops, and 600 silent ones."""
    slow = socket.create_connection(pair.receiver.address[:2])
    slow.sendall(b'M')
    stopped = _connect(pair.receiver.address)
    stopped.sendall(b'{"name": "iter_1.pth", "size": 9}\n12')
    silent = [socket.create_connection(pair.receiver.address[:2]) for _ in range(600)]
    for number in range(3):
        with contextlib.suppress(ConnectionError):  # its time is over, or others came
            slow.sendall(b'a')
        pair.sender.send(pair.file(f'iter_{number}.pth', b'%d' % number))
        pair.settle()
        assert pair.held() == [b'%d' % number], pair.log.lines
    for each in (slow, stopped, *silent):
        each.close()


def test_copies_of_other_machines_make_way_for_a_newer_one(pair: Pair, tmp_path: Path) -> None:
    disk = tmp_path / 'other'
    disk.mkdir()
    store = CopyStore(str(disk), pair.folder / 'memory')
    other = CopyReceiver(store)
    first = CopySender('node2', other.address, pair.logger)
    first.send(pair.file('iter_5.pth', b'older'))
    first._worker.submit(bool).result(60)
    gone = ['127.0.0.1', pair.receiver.address[1] + 1, '00' * 16]
    sender = CopySender('node1', pair.receiver.address, pair.logger, [other.address, gone])
    huge = pair.file('iter_10.pth', b'')
    os.truncate(huge, 2**43)
    for path, left in ((huge, [b'older']), (pair.file('iter_15.pth', b'newer'), [])):
        sender.send(path)
        sender._worker.submit(bool).result(60)
        assert [each.read_bytes() for each in store.copies()] == left, pair.log.lines
    assert pair.held() == [b'newer']
    other.close()


def test_a_copy_that_is_under_way_does_not_hold_up_the_end(pair: Pair) -> None:
    with socket.create_server(('127.0.0.1', 0)) as listener:
        host, port = listener.getsockname()
        pair.sender._address[:2] = host, port
        huge = pair.file('iter_5.pth', b'')
        os.truncate(huge, 2**30)
        pair.sender.send(huge)
        connection = listener.accept()[0]
        handshake = ListenerHandshake(
            job_secret(os.environ), 'copies', bytes.fromhex(pair.receiver.address[2])
        )
        while not handshake.proved:
            connection.sendall(
                handshake.take(connection.recv(handshake.needed, socket.MSG_WAITALL))
            )
        with connection, connection.makefile('rwb') as stream:
            stream.readline()
            stream.write(b'{"ready": true}\n')
            stream.flush()
            stream.read(1)  # and no more
            thread = pair.sender._worker._thread
            pair.sender.close()
            assert thread is not None and thread.is_alive() and thread.daemon
        thread.join(60)
    assert not thread.is_alive() and pair.log.lines == []  # nobody needs to know any more
