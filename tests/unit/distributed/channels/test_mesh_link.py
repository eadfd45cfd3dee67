"""What a connection makes of any bytes that a peer may send after its handshake."""

from __future__ import annotations

import json
import os
import socket
import zlib
from typing import Any, Iterator, List, Optional, Tuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mapsage.distributed.channels import mesh_link
from mapsage.distributed.channels.mesh import Mesh
from mapsage.distributed.channels.mesh_link import CONTROL, HEADER, MeshLink
from mapsage_launcher.trust.handshake import ClientHandshake, connect
from mapsage_launcher.trust.job_secret import job_secret

FIXTURES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
NUMBERS = st.integers(0, 2**64 - 1)
FRAMES = st.builds(
    lambda lane, number, part, size, body: HEADER.pack(lane, number, part, size) + body,
    st.just(CONTROL) | NUMBERS,
    NUMBERS,
    st.integers(0, 2**32 - 1),
    st.integers(0, 40) | NUMBERS,
    st.binary(max_size=40),
)


def tcp_pair() -> Tuple[socket.socket, socket.socket]:
    with socket.create_server(('127.0.0.1', 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return listener.accept()[0], client


@given(st.sampled_from([None, 1]), st.lists(FRAMES | st.binary(max_size=90), max_size=4))
def test_any_bytes_are_frames_or_the_end_and_take_no_memory_before_they_come(
    rank: Optional[int], pieces: List[bytes]
) -> None:
    ours, theirs = tcp_pair()
    with ours, theirs:
        link = MeshLink(ours, rank, 'host')
        theirs.sendall(b''.join(pieces))
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            while True:
                frame = link.read()
                assert len(link._data) <= mesh_link._AT_ONCE_BYTES
                if frame is not None:
                    head, data = frame
                    assert len(data) == head[3] <= 90 * 4
                    assert rank is not None or head[0] == CONTROL


@pytest.mark.parametrize(
    'rank, lane, size, is_taken',
    [
        (None, CONTROL, 4096, True),
        (None, CONTROL, 4097, False),
        (None, 7, 1, False),
        (1, CONTROL, 2**20, True),
        (1, CONTROL, 2**20 + 1, False),
        (1, 7, 2**40, True),
        (1, 7, 2**40 + 1, False),
        (1, 7, 2**64 - 1, False),
    ],
)
def test_what_may_be_announced(rank: Optional[int], lane: int, size: int, is_taken: bool) -> None:
    ours, theirs = tcp_pair()
    with ours, theirs:
        link = MeshLink(ours, rank, 'host')
        theirs.sendall(HEADER.pack(lane, 0, 0, size))
        if is_taken:
            assert link.read() is None
        else:
            with pytest.raises(EOFError, match=f'announced a message of {size} bytes'):
                link.read()


def test_a_message_longer_than_what_is_taken_at_once_arrives_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mesh_link, '_AT_ONCE_BYTES', 1000)
    for size in (999, 1000, 1001, 2000, 2001, 123_457):
        ours, theirs = tcp_pair()
        with ours, theirs:
            link, sent = MeshLink(ours, 1, 'host'), os.urandom(size)
            theirs.sendall(HEADER.pack(7, 1, 2, size) + sent + HEADER.pack(7, 1, 3, 1) + b'x')
            frames: List[Any] = []
            while len(frames) < 2:
                frame = link.read()
                frames += [] if frame is None else [frame]
            assert frames == [((7, 1, 2, size), sent), ((7, 1, 3, 1), b'x')]


class Texts(dict):
    """A store of this process."""

    find = dict.get
    set = dict.__setitem__


@pytest.fixture(scope='module')
def meshes() -> Iterator[Tuple[Mesh, Mesh]]:
    store: Any = Texts()
    told: List[Any] = []
    pair = Mesh(store, 'fuzzed', 0, 4, told.append), Mesh(store, 'fuzzed', 1, 4, told.append)
    yield pair
    for mesh in pair:
        mesh.close()


def come_in(mesh: Mesh) -> socket.socket:
    """Connect with a mesh as a process of the job."""
    host, port, number, _ = mesh._address(mesh._rank)
    return connect(
        (host, port), ClientHandshake(job_secret(os.environ), 'mesh', bytes.fromhex(number)), 60
    )


def is_well(meshes: Tuple[Mesh, Mesh], number: int) -> bool:
    """Return whether two meshes talk over their own connection."""
    one, other = meshes
    one.send(1, 7, number, 0, b'hello', lambda: None)
    return (
        bytes(other.receive(0, 7, number, 0, lambda: None)) == b'hello'
        and not one.lost
        and 0 not in other.lost
        and set(other._links) <= {0}
    )


@pytest.mark.parametrize(
    'hello',
    [
        b'',
        b'7',
        b'[]',
        b'{}',
        b'{"rank": 1}',
        b'{"rank": 4, "host": "h"}',
        b'[' * 4000,
        b'{"rank": -1, "host": "h"}',
        b'{"rank": true, "host": "h"}',
        b'{"rank": "2", "host": "h"}',
        b'{"rank": 1, "host": "h"}',
        b'\xff\xfe',
    ],
)
def test_who_says_no_rank_of_this_job_is_closed(meshes: Tuple[Mesh, Mesh], hello: bytes) -> None:
    """Rank 1 itself does not connect with itself."""
    with come_in(meshes[1]) as peer:
        peer.sendall(HEADER.pack(CONTROL, 0, 0, len(hello)) + hello)
        peer.settimeout(60)
        try:
            assert peer.recv(1) == b''
        except ConnectionResetError:
            pass
    assert is_well(meshes, 2**62 + zlib.crc32(hello))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=5,
)


@FIXTURES
@given(st.data())
def test_any_messages_of_a_peer_end_at_most_its_own_connection(
    meshes: Tuple[Mesh, Mesh], data: Any
) -> None:
    messages = data.draw(
        st.lists(
            st.dictionaries(
                st.sampled_from(['kind', 'rank', 'host', 'text', 'lane']),
                st.sampled_from(['last words', 'failed']) | VALUES,
            ),
            max_size=3,
        )
    )
    with come_in(meshes[1]) as peer:
        sent = b''
        for message in [dict(rank=0, host='h'), *messages]:
            text = json.dumps(message).encode()
            sent += HEADER.pack(CONTROL, 0, 0, len(text)) + text
        peer.sendall(sent + data.draw(st.binary(max_size=40)))
    number = data.draw(st.integers(1, 2**62), label='number')
    assert is_well(meshes, number)
