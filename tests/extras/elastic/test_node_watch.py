"""What a node's watch does with lines from strangers, and what it sees of a process."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from typing import Any, Dict, Iterator, List

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mapsage_launcher.nodes.node_watch import (
    _ENDED,
    _MAX_UNKNOWN,
    _NOT_RUNNING,
    Line,
    Watch,
    _state,
)
from mapsage_launcher.trust.guard import bind_listener
from mapsage_launcher.trust.handshake import (
    ClientHandshake,
    SecretMismatchError,
    connect,
    new_listener,
)

SECRET = b's' * 64
RANK, NODE, OTHER = 70_001, 70_002, 70_003
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)
FINDINGS = st.dictionaries(st.sampled_from(['ranks', 'text', 'grace']), VALUES)
LINES = st.lists(
    st.binary(max_size=60)
    | st.dictionaries(
        st.sampled_from(['node', 'rank', 'ready', 'found', 'lost', 'bye', 'beat']),
        VALUES | FINDINGS,
    ).map(lambda message: json.dumps(message).encode() + b'\n'),
    max_size=4,
)


class Watched:
    """A watch in a thread of this process, over one rank of this node; the other node has one too.

    Their numbers are such that no example comes upon them by chance.
    """

    def __init__(self) -> None:
        self.local, listener = socket.socket(socket.AF_UNIX), bind_listener('127.0.0.1')
        self.name = f'\0mapsage-watch-test-{os.urandom(8).hex()}'
        self.local.bind(self.name)
        self.local.listen(1024)
        self.address, self.number = listener.getsockname(), new_listener()
        self.watch = Watch(
            NODE,
            {NODE: 'a', OTHER: 'b'},
            {NODE: [RANK], OTHER: [1]},
            [*self.address, self.number.hex()],
            SECRET.hex(),
            60.0,
            60.0,
            os.getppid(),
            self.local,
            listener,
        )
        self.thread = threading.Thread(target=self.watch.run)
        self.thread.start()

    def rank(self) -> Line:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self.name)
        connection.settimeout(60)
        return Line(connection)

    def node(self) -> socket.socket:
        return connect(self.address, ClientHandshake(SECRET, 'watch', self.number), 60)

    def close(self) -> None:
        """End as its rank says goodbye, which needs the watch to be well."""
        line = self.rank()
        line.send(rank=RANK)
        line.send(bye=RANK)
        self.thread.join(60)
        assert not self.thread.is_alive()
        line.close()


@pytest.fixture
def watched() -> Iterator[Watched]:
    watch = Watched()
    yield watch
    watch.close()


def is_closed(connection: socket.socket) -> bool:
    connection.settimeout(60)
    try:
        while connection.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


@given(LINES)
def test_any_bytes_are_objects_or_the_end(pieces: List[bytes]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours)
        theirs.sendall(b''.join(pieces))
        theirs.close()
        with pytest.raises(EOFError):
            while True:
                assert all(isinstance(each, dict) for each in line.read())


@given(LINES)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_any_lines_of_ranks_and_nodes_leave_the_watch_well(
    watched: Watched, pieces: List[bytes]
) -> None:
    with watched.node() as node, watched.rank().socket as rank:
        for connection in (node, rank):
            with contextlib.suppress(OSError):  # it is closed already
                connection.sendall(b''.join(pieces))
                connection.shutdown(socket.SHUT_WR)
            assert is_closed(connection)
    assert watched.thread.is_alive()


@pytest.mark.parametrize(
    'hello',
    [
        dict(node=NODE),
        dict(node=2),
        dict(node=str(OTHER)),
        dict(node=True),
        dict(beat=1),
        dict(node=None),
    ],
)
def test_who_says_no_node_of_this_job_is_closed(watched: Watched, hello: Dict[str, Any]) -> None:
    with watched.node() as node:
        node.sendall(json.dumps(hello).encode() + b'\n')
        assert is_closed(node)


def test_a_beat_fills_packets_of_jumbo_frames(watched: Watched) -> None:
    """Otherwise beats pass where only small packets do, and gradients wait without a word."""
    with watched.node() as node:
        line = Line(node)
        node.settimeout(60)
        line.send(node=OTHER)
        data = b''
        while b'"beat"' not in data or not data.endswith(b'\n'):
            data += node.recv(4096)
    assert max(map(len, data.split(b'\n'))) >= 9000


@pytest.mark.parametrize('rank', [1, -1, True, str(RANK), None])
def test_who_says_no_rank_of_this_node_is_closed(watched: Watched, rank: Any) -> None:
    line = watched.rank()
    line.send(rank=rank)
    assert is_closed(line.socket)


def test_600_processes_of_this_user_leave_room_for_the_rank(watched: Watched) -> None:
    silent = [watched.rank() for _ in range(600)]
    assert all(is_closed(line.socket) for line in silent[: 600 - _MAX_UNKNOWN])
    for line in silent:
        line.close()


@pytest.mark.parametrize('secret, purpose', [(b't' * 64, 'watch'), (SECRET, 'mesh')])
def test_without_the_proof_nobody_joins(watched: Watched, secret: bytes, purpose: str) -> None:
    with pytest.raises(SecretMismatchError):
        connect(watched.address, ClientHandshake(secret, purpose, watched.number), 60)
    assert not watched.watch._met


@pytest.mark.parametrize(
    'sent, limit',
    [(b'[' * 50_000 + b'\n', 1 << 16), (b'{' * 600, 256), (b'7\n', 256), (b'GET /\n', 256)],
)
def test_what_is_none_of_ours_ends_the_connection(sent: bytes, limit: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours)
        line.limit = limit
        theirs.sendall(sent)
        with pytest.raises(EOFError):
            for _ in range(3):
                line.read()


def test_a_greeting_is_within_its_limit() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        line = Line(ours)
        line.limit = 256
        Line(theirs).send(node=99_999)
        assert line.read() == [{'node': 99_999}]


def test_a_process_that_was_waited_for_has_ended() -> None:
    assert _state(os.getpid()) not in _NOT_RUNNING
    child = subprocess.Popen([sys.executable, '-c', ''])
    child.wait()
    assert _state(child.pid) in _ENDED
