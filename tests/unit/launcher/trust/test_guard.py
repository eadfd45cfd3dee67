"""A guard under attack: what strangers cost, and that those of the job come in next to them."""

import os
import queue
import resource
import socket
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from mapsage_launcher.trust import guard as module
from mapsage_launcher.trust.guard import MAX_UNPROVED, Guard, bind_listener
from mapsage_launcher.trust.handshake import (
    ClientHandshake,
    GreetingDroppedError,
    ListenerHandshake,
    connect,
    new_listener,
)

SECRET, LISTENER = b's' * 64, new_listener()
SECONDS = 60.0  # a deadline for a test that hangs, nothing waits so long


class Door:
    """A guard and the connections that it admitted."""

    def __init__(self, **options) -> None:
        self.admitted: 'queue.Queue[socket.socket]' = queue.Queue()
        listener = bind_listener('127.0.0.1')
        self.address = listener.getsockname()
        self.guard = Guard(
            listener,
            lambda: ListenerHandshake(SECRET, 'mesh', LISTENER),
            self.admitted.put,
            **options,
        )

    def come_in(self) -> None:
        """Connect as one of the job, again where the connection is dropped, and be admitted."""
        deadline = time.monotonic() + SECONDS
        while True:
            try:
                with connect(
                    self.address,
                    ClientHandshake(SECRET, 'mesh', LISTENER),
                    deadline - time.monotonic(),
                ) as ours, self.admitted.get(timeout=SECONDS) as theirs:
                    theirs.setblocking(True)
                    ours.sendall(b'hello')
                    assert theirs.recv(5, socket.MSG_WAITALL) == b'hello'
                    return
            except GreetingDroppedError:
                assert time.monotonic() < deadline

    def strangers(self, count: int, sent: bytes = b''):
        """Return connections that have sent these bytes."""
        connections = []
        for _ in range(count):
            connections.append(socket.create_connection(self.address, SECONDS))
            connections[-1].sendall(sent)
        return connections


@pytest.fixture
def door():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, '_ROUND_TRIP_SECONDS', 0.02)  # for the sake of the test's time
        opened = Door(seconds=3 * SECONDS)  # so that no time helps, where none is named
        yield opened
        opened.guard.close()


def closed(connection: socket.socket) -> bool:
    """Wait until the other end has closed a connection; return True."""
    connection.settimeout(SECONDS)
    try:
        return connection.recv(1) == b''
    except ConnectionResetError:
        return True


def test_600_silent_ones_keep_nobody_out_and_32_of_them_are_open(door):
    silent = door.strangers(600)
    door.come_in()
    assert len(door.guard.sockets()) <= 1 + MAX_UNPROVED
    assert all(closed(each) for each in silent[: 600 - MAX_UNPROVED])
    door.come_in()
    for each in silent:
        each.close()


@pytest.mark.parametrize(
    'sent',
    [
        b'\0',
        b'GET / HTTP/1.1\r\nHost: example.org\r\n\r\n',
        b'\x16\x03\x01' * 30,
        bytes(range(256)) * 16,
        (2**20).to_bytes(8, 'little') * 5,
        b'MapSage',
        b'MapSage\x01' + bytes(31),
        b'MapSage\x01' + bytes(32),
        b'MapSage\x01' + bytes(64),
        b'MapSage\x02' + bytes(32),
    ],
)
def test_whatever_a_stranger_sends_those_of_the_job_come_in(door, sent):
    strangers = door.strangers(5, sent)
    door.come_in()
    for each in door.strangers(5, sent):
        each.close()  # half a greeting, and gone
    door.come_in()
    assert door.admitted.empty()
    for each in strangers:
        each.close()


def test_300_greetings_that_announce_a_mebibyte_cost_no_memory(door):
    door.come_in()
    before = memory()
    strangers = [
        connection
        for _ in range(10)
        for connection in door.strangers(
            30, b'MapSage\x01' + (2**20).to_bytes(8, 'big') * 4 + bytes(2**16)
        )
    ]
    door.come_in()
    assert memory() - before < 2 * 2**20
    for each in strangers:
        each.close()


def memory() -> int:
    """Return the resident memory of this process in bytes."""
    return int(Path('/proc/self/statm').read_text().split()[1]) * resource.getpagesize()


def test_the_time_is_that_of_the_whole_greeting():
    door = Door(seconds=0.3)
    (slow,) = door.strangers(1)
    slow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with pytest.raises(OSError):
        for byte in (b'MapSage\x01' + bytes(32)) * 100:  # each byte is within the time
            slow.sendall(bytes([byte]))
            slow.settimeout(0.05)
            try:
                assert slow.recv(200) == b''
                raise BrokenPipeError
            except socket.timeout:
                pass
    door.guard.close()


def test_slow_ones_delay_nobody(door):
    slow = door.strangers(MAX_UNPROVED - 1, b'M')
    for _ in range(3):
        for each in slow:
            each.sendall(b'a')
        door.come_in()
        slow = [*door.strangers(MAX_UNPROVED - 1, b'M')]


def test_many_of_the_job_at_once_are_all_admitted(door):
    errors = []

    def come() -> None:
        try:
            connect(door.address, ClientHandshake(SECRET, 'mesh', LISTENER), SECONDS)
        except GreetingDroppedError:
            come()
        except OSError as error:
            errors.append(error)

    threads = [threading.Thread(target=come) for _ in range(4 * MAX_UNPROVED)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert not errors
    assert [door.admitted.get(timeout=SECONDS) for _ in threads]


@contextmanager
def no_descriptors():
    """Let this process open nothing."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = []
    try:
        resource.setrlimit(
            resource.RLIMIT_NOFILE,
            (max(int(name) for name in os.listdir('/proc/self/fd')) + 2, hard),
        )
        with pytest.raises(OSError):
            while True:
                held.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in held:
            os.close(descriptor)


def test_where_no_descriptor_is_left_a_stranger_makes_room(door):
    strangers = door.strangers(MAX_UNPROVED // 2)
    door.come_in()
    with socket.socket() as client:
        with no_descriptors():
            client.settimeout(SECONDS)
            client.connect(door.address)
            client.sendall(ClientHandshake(SECRET, 'mesh', LISTENER).greeting)
            assert len(client.recv(88, socket.MSG_WAITALL)) == 88
    door.come_in()
    for each in strangers:
        each.close()


def test_without_any_descriptor_it_does_not_spin(door, monkeypatch):
    door.come_in()
    turns = []
    accept = door.guard._accept
    monkeypatch.setattr(door.guard, '_accept', lambda: (turns.append(1), accept()))
    with socket.socket() as client:
        with no_descriptors():
            client.connect(door.address)
            time.sleep(1.2)
        assert 2 <= len(turns) <= 4  # the first time, and twice a second
        door.come_in()


def test_a_connection_that_cannot_be_taken_is_closed_and_the_next_one_admitted():
    taken: 'queue.Queue[socket.socket]' = queue.Queue()
    refused = []

    def admit(connection: socket.socket) -> None:
        if not refused:
            refused.append(connection)
            raise ValueError('not now')
        taken.put(connection)

    listener = bind_listener('127.0.0.1')
    guard = Guard(listener, lambda: ListenerHandshake(SECRET, 'mesh', LISTENER), admit)
    for is_closed in (True, False):
        with connect(
            listener.getsockname(), ClientHandshake(SECRET, 'mesh', LISTENER), SECONDS
        ) as connection:
            if is_closed:
                assert closed(connection)
            else:
                taken.get(timeout=SECONDS).close()
    guard.close()


def test_a_forked_child_holds_none_of_its_descriptors(door):
    ours = connect(door.address, ClientHandshake(SECRET, 'mesh', LISTENER), SECONDS)
    theirs = door.admitted.get(timeout=SECONDS)
    (stranger,) = door.strangers(1)
    while len(door.guard.sockets()) < 2:
        time.sleep(0.001)
    numbers = [each.fileno() for each in (ours, theirs, *door.guard.sockets())]
    child = os.fork()
    if not child:
        open_in_child = 0
        for number in numbers:
            try:
                os.fstat(number)
                open_in_child += 1
            except OSError:
                pass
        os._exit(open_in_child)
    assert os.waitpid(child, 0)[1] == 0
    theirs.sendall(b'x')
    assert ours.recv(1) == b'x'  # and the parent has kept them
    door.come_in()
    for each in (ours, theirs, stranger):
        each.close()


def test_its_end_refuses_and_ends_the_thread(door):
    (stranger,) = door.strangers(1)
    door.come_in()
    door.guard.close()
    assert closed(stranger) and not door.guard._thread.is_alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(door.address)
    door.guard.close()
