"""Strangers that hold connections or send long numbers, and an honest browser."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Iterator, List, Optional, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from view_maps import UTM, Folders, add_map, folders, serving

from mapsage.extras.viewer import ViewServer, ViewSession, find_maps
from mapsage.extras.viewer.connections import MOST_CONNECTIONS, requested_part

STRANGERS = 200
PATIENT = 60  # seconds after which a test would hang


@pytest.fixture
def viewer(tmp_path: Path) -> Iterator[Tuple[ViewServer, Folders]]:
    """Provide a viewer of a map, and the folders."""
    where = folders(tmp_path)
    add_map(where, 'a', polygons=False, confidence=False, **UTM)
    session = ViewSession(find_maps([where.maps]))
    session.prepare()
    with serving(ViewServer(session)) as server:
        yield server, where


def connect(server: ViewServer) -> socket.socket:
    return socket.create_connection(('127.0.0.1', server.server_port), timeout=PATIENT)


def get(server: ViewServer, path: str) -> bytes:
    """Return a request of an admitted browser."""
    port = server.server_port
    cookie = server.admission.cookie(str(port)).partition(';')[0]
    return f'GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nCookie: {cookie}\r\n\r\n'.encode()


def ask(connection: socket.socket, request: bytes) -> Tuple[int, bytes]:
    connection.sendall(request)
    answer = http.client.HTTPResponse(connection)
    answer.begin()
    return answer.status, answer.read()


def is_closed(connection: socket.socket) -> bool:
    """Return whether the other side closes the connection; wait for that."""
    try:
        return connection.recv(1 << 16) == b''
    except ConnectionResetError:
        return True


@pytest.mark.parametrize('sent', [b'', b'GET / HT', b'GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX: '])
def test_half_open_connections_hold_few_threads_and_no_browser(viewer: Any, sent: bytes) -> None:
    server, _ = viewer
    server.patience = PATIENT  # no deadline helps
    before = threading.active_count()
    most = 0
    with ExitStack() as stack:
        browser = stack.enter_context(connect(server))
        assert ask(browser, get(server, '/catalog.json'))[0] == 200
        for number in range(STRANGERS):
            stranger = stack.enter_context(connect(server))
            stranger.sendall(sent)
            most = max(most, threading.active_count() - before)
            if number % 20 == 0:  # on its connection, and on a new one
                assert ask(browser, get(server, '/catalog.json'))[0] == 200
                with connect(server) as other:
                    assert ask(other, get(server, '/viewer.css'))[0] == 200
        assert ask(browser, get(server, '/'))[0] == 200
        assert 16 < most <= MOST_CONNECTIONS + 2, most  # two that end at this moment
    with connect(server) as other:
        assert ask(other, get(server, '/'))[0] == 200


def test_a_byte_now_and_then_does_not_move_the_deadline(viewer: Any) -> None:
    server, _ = viewer
    server.patience = 1.0
    with connect(server) as stranger:
        sent = 0
        start = time.monotonic()
        try:
            while time.monotonic() - start < PATIENT:
                stranger.sendall(b'GET / HTTP/1.1\r\nHost: '[sent : sent + 1] or b'x')
                sent += 1
                stranger.settimeout(0.1)
                try:
                    if stranger.recv(1) == b'':
                        break
                except socket.timeout:
                    continue
        except (ConnectionResetError, BrokenPipeError):
            pass
        assert 3 < sent < 10 * PATIENT  # it was cut, and not at the first pause


def test_an_idle_connection_ends_and_one_in_use_does_not(viewer: Any) -> None:
    server, _ = viewer
    server.patience = 1.0
    with connect(server) as idle, connect(server) as used:
        for connection in (idle, used):
            assert ask(connection, get(server, '/'))[0] == 200
        for _ in range(6):
            time.sleep(0.3)
            assert ask(used, get(server, '/catalog.json'))[0] == 200
        idle.settimeout(PATIENT)
        assert is_closed(idle)


def test_a_slow_reader_gets_all_of_a_large_file(viewer: Any) -> None:
    server, where = viewer
    server.patience = 0.5
    path = where.maps / 'a.tif'
    with open(path, 'ab') as file:
        file.write(bytes(4 << 20))
    server.session._add(0, 'map', path)
    with socket.socket() as reader:
        reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
        reader.settimeout(PATIENT)
        reader.connect(('127.0.0.1', server.server_port))
        reader.sendall(get(server, f'/maps/0/map/{server.session.stamp(0, "map")}.tif'))
        taken = b''
        while len(taken) < 2 << 20:  # together longer than the deadline of one part
            taken += reader.recv(1 << 16)
            time.sleep(0.02)
        while not taken.endswith(bytes(4 << 20)):
            part = reader.recv(1 << 20)
            assert part, len(taken)
            taken += part
    assert taken.partition(b'\r\n\r\n')[2] == path.read_bytes()


def test_a_reader_that_stops_is_cut(viewer: Any) -> None:
    server, where = viewer
    server.patience = 0.5
    path = where.maps / 'a.tif'
    with open(path, 'ab') as file:
        file.write(bytes(32 << 20))  # more than the buffers of both sides
    server.session._add(0, 'map', path)
    before = threading.active_count()
    with connect(server) as reader:
        reader.sendall(get(server, f'/maps/0/map/{server.session.stamp(0, "map")}.tif'))
        reader.recv(1)
        deadline = time.monotonic() + PATIENT
        while threading.active_count() > before:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_answers_under_way_are_not_ended_for_a_new_connection(viewer: Any) -> None:
    server, where = viewer
    path = where.maps / 'a.tif'
    with open(path, 'ab') as file:
        file.write(bytes(16 << 20))
    server.session._add(0, 'map', path)
    request = get(server, f'/maps/0/map/{server.session.stamp(0, "map")}.tif')
    with ExitStack() as stack:
        readers: List[socket.socket] = []
        for _ in range(MOST_CONNECTIONS):
            reader = stack.enter_context(connect(server))
            reader.sendall(request)
            assert reader.recv(12) == b'HTTP/1.1 200'
            readers.append(reader)
        with connect(server) as other:
            status, body = ask(other, b'')
            assert status == 503 and b'All connections of the viewer are in use' in body
        for reader in readers:
            reader.close()
        while server._states:
            time.sleep(0.01)
    with connect(server) as other:
        assert json.loads(ask(other, get(server, '/catalog.json'))[1])


def test_a_request_without_an_end_is_not_kept(viewer: Any) -> None:
    server, _ = viewer
    with connect(server) as stranger:
        stranger.sendall(b'GET / HTTP/1.1\r\n')
        sent = 0
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            while sent < 64 << 20:
                sent += stranger.send(b'X: ' + bytes(1000).replace(b'\0', b'y') + b'\r\n')
                time.sleep(0.0005)
        assert sent < 8 << 20


@pytest.mark.parametrize(
    'header, part',
    [
        (None, None),
        ('bytes=0-9', (0, 10)),
        ('bytes=90-', (90, 100)),
        ('bytes=90-500', (90, 100)),
        ('bytes=-10', (90, 100)),
        ('bytes=-500', (0, 100)),
        ('bytes=100-', (100, 100)),
        ('bytes=-0', (100, 100)),
        ('bytes=5-4', None),
        ('bytes=-', None),
        ('bytes=1-2,4-5', None),
        ('lines=1-2', None),
        ('bytes=a-b', None),
        ('bytes=٣-٤', None),
        # Python refuses to read a number of more than 4,300 digits
        (f'bytes={"9" * 5000}-', (10**5000, 100)),
        (f'bytes=-{"9" * 5000}', (0, 100)),
        (f'bytes=0-{"9" * 5000}', (0, 100)),
        (f'bytes={"0" * 5000}7-{"0" * 4999}9', (7, 10)),
        (f'bytes={"9" * 5000}-{"9" * 4999}', None),
    ],
)
def test_parts_are_read_as_the_standard_says(header: Any, part: Any) -> None:
    asked = requested_part(header, 100)
    if part is not None and part[0] > 100:  # behind the end; how far, nobody reads
        assert asked is not None and asked[0] >= asked[1]
    else:
        assert asked == part


DIGITS = st.one_of(
    st.integers(0, 300).map(str),
    st.text('09', max_size=30),
    st.integers(4290, 5000).map(lambda size: '9' * size),
    st.integers(4290, 5000).map(lambda size: '0' * size + '7'),
)


@given(
    st.one_of(
        st.text(),
        st.none(),
        st.text('bytes=-0123456789, ').map('bytes={}'.format),
        st.tuples(DIGITS, DIGITS).map('bytes={0[0]}-{0[1]}'.format),
    ),
    st.integers(0, 200),
)
def test_any_range_is_a_part_of_the_file_or_none(header: Optional[str], size: int) -> None:
    part = requested_part(header, size)
    if part is not None and part[0] < part[1]:
        assert 0 <= part[0] and part[1] <= size


@given(
    st.text('0123456789', max_size=40), st.text('0123456789', max_size=40), st.integers(0, 10**12)
)
def test_parts_are_those_of_numbers(first: str, last: str, size: int) -> None:
    """An answer that is computed with Python's own numbers."""
    part = requested_part(f'bytes={first}-{last}', size)
    if not first and not last or first and last and int(last) < int(first):
        assert part is None
        return
    assert part is not None
    if first:
        expected = min(int(first), size), min(size, int(last) + 1) if last else size
    else:
        expected = max(0, size - int(last)), size
    assert part == expected or part[0] >= part[1] and expected[0] >= expected[1]
