"""Two meshes in one process: what threads, second connections and forks do to a connection."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from typing import Any, Dict, Iterator, List, Tuple

import pytest

from mapsage.distributed.channels.mesh import LinkLostError, Mesh
from mapsage.distributed.channels.mesh_link import HEADER
from mapsage_launcher.trust.handshake import ClientHandshake, connect
from mapsage_launcher.trust.job_secret import job_secret


class _Texts(Dict[str, str]):
    """A store of this process."""

    def find(self, key: str) -> Any:
        return self.get(key)

    def set(self, key: str, text: str) -> None:
        self[key] = text


def _go_on() -> None:
    """Never gives up."""


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tuple[Mesh, Mesh, List[Any]]]:
    monkeypatch.setenv('MASTER_ADDR', '127.0.0.1')
    store: Any = _Texts()
    told: List[Any] = []
    meshes = Mesh(store, 'pair', 0, 2, told.append), Mesh(store, 'pair', 1, 2, told.append)
    meshes[0].send(1, 7, 0, 0, b'hello', _go_on)
    assert bytes(meshes[1].receive(0, 7, 0, 0, _go_on)) == b'hello'
    yield (*meshes, told)
    for mesh in meshes:
        mesh.close()


def test_who_finds_a_connection_busy_does_not_close_it(pair: Tuple[Mesh, Mesh, List[Any]]) -> None:
    one, other, told = pair
    errors: List[Exception] = []

    def send_much() -> None:
        try:
            one.send(1, 7, 1, 0, bytes(2**26), _go_on)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=send_much)
    with other.news:  # its reading thread takes nothing
        one.send(1, 7, 9, 0, b'poke', _go_on)
        thread.start()
        while not one._links[1]._lock.locked():
            assert thread.is_alive()
            time.sleep(0.001)
        one.tell(1, dict(kind='text'))  # gives up
    thread.join(120)
    assert len(other.receive(0, 7, 1, 0, _go_on)) == 2**26 and not errors
    assert (one.lost, other.lost, told) == ({}, {}, [])
    one.tell(1, dict(kind='text'))
    one.send(1, 7, 2, 0, b'', _go_on)
    other.receive(0, 7, 2, 0, _go_on)
    assert told == [dict(kind='text')]


def test_half_a_frame_ends_the_connection(pair: Tuple[Mesh, Mesh, List[Any]]) -> None:
    one, other, _ = pair

    def give_up() -> None:
        raise ValueError('no longer')

    with other.news:
        one.send(1, 7, 9, 0, b'poke', _go_on)
        with pytest.raises(ValueError, match='no longer'):
            one.send(1, 7, 1, 0, bytes(2**26), give_up)
        with pytest.raises(LinkLostError, match='it took no messages'):
            one.send(1, 7, 2, 0, b'next', _go_on)


def _second_connection(one: Mesh) -> socket.socket:
    host, port, number, _ = json.loads(one._store.find('pair/address/0'))  # type: ignore[arg-type]
    connection = connect(
        (host, port), ClientHandshake(job_secret(os.environ), 'mesh', bytes.fromhex(number)), 60
    )
    hello = json.dumps(dict(rank=1, host='h')).encode()
    connection.sendall(HEADER.pack(0, 0, 0, len(hello)) + hello)
    return connection


def test_the_second_connection_of_a_pair_is_closed_as_well(
    pair: Tuple[Mesh, Mesh, List[Any]],
) -> None:
    second = _second_connection(pair[0])
    second.sendall(HEADER.pack(7, 5, 0, 0))
    pair[0].receive(1, 7, 5, 0, _go_on)
    child = os.fork()
    if not child:
        held = [
            each
            for mesh in pair[:2]
            for each in (*mesh._sockets, *mesh._guard.sockets(), second)
            if each.fileno() >= 0
        ]
        os._exit(len(held))
    assert os.waitpid(child, 0)[1] == 0
    pair[0].close()
    second.settimeout(60)
    assert second.recv(1) == b''


def test_a_last_frame_counts_though_the_other_connection_ended_first(
    pair: Tuple[Mesh, Mesh, List[Any]],
) -> None:
    one, other, _ = pair
    with one.news:
        other.send(0, 7, 6, 0, b'', _go_on)  # the reading thread of the first stops here
        time.sleep(0.2)
        second = _second_connection(one)
        second.sendall(HEADER.pack(7, 8, 0, 5) + b'reply')
        other.close()
        time.sleep(0.1)
    assert bytes(one.receive(1, 7, 8, 0, _go_on)) == b'reply' and not one.lost
    second.close()
    with pytest.raises(LinkLostError):
        one.receive(1, 7, 99, 0, _go_on)


def test_links_notice_a_host_without_power(pair: Tuple[Mesh, Mesh, List[Any]]) -> None:
    for link in (*pair[0]._links.values(), *pair[1]._links.values()):
        assert link.socket.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        if hasattr(socket, 'TCP_KEEPIDLE'):
            assert link.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == 60
