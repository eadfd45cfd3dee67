"""What a node's watch does with lines from strangers, and what it sees of a process."""
from __future__ import annotations

import os
import socket
import subprocess
import sys

import pytest

from mapsage.distributed.nodes.node_watch import _ENDED, _NOT_RUNNING, Line, _state


@pytest.mark.parametrize('sent, limit', [
    (b'[' * 50_000 + b'\n', 1 << 16), (b'{' * 600, 256), (b'7\n', 256), (b'GET /\n', 256)])
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
