"""What a handshake proves, and that nothing a stranger has seen or made up lets him in."""

import os
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage_launcher.trust import handshake as module
from mapsage_launcher.trust.handshake import (
    ClientHandshake,
    GreetingDroppedError,
    HandshakeError,
    ListenerHandshake,
    OtherListenerError,
    OtherVersionError,
    SecretMismatchError,
    connect,
    new_listener,
)

SECRET, OTHER_SECRET = b's' * 64, b't' * 64
LISTENER = new_listener()


def client(secret: bytes = SECRET, purpose: str = 'mesh', listener: bytes = LISTENER):
    return ClientHandshake(secret, purpose, listener)


def listening(secret: bytes = SECRET, purpose: str = 'mesh', listener: bytes = LISTENER):
    return ListenerHandshake(secret, purpose, listener)


def talk(one: ClientHandshake, other: ListenerHandshake):
    """Carry the messages of both ends; return those of the client and those of the listener."""
    to_listener, to_client = [one.greeting], []
    message = one.greeting
    while message:
        assert len(message) == other.needed
        answer = other.take(message)
        to_client.append(answer)
        message = b''
        while answer:
            part, answer = answer[: one.needed], answer[one.needed :]
            message += one.take(part)
        if message:
            to_listener.append(message)
    return to_listener, to_client


def test_both_ends_prove_themselves_and_the_secret_does_not_travel():
    one, other = client(), listening()
    sent, received = talk(one, other)
    assert one.proved and other.proved and (one.needed, other.needed) == (0, 0)
    assert [len(each) for each in sent] == [40, 32] and [len(each) for each in received] == [88, 1]
    assert SECRET not in b''.join(sent + received)
    assert LISTENER not in b''.join(sent)  # the client says nothing of the job


def test_no_two_handshakes_share_a_challenge_or_a_proof():
    pieces = []
    for _ in range(50):
        sent, received = talk(client(), listening())
        pieces += [sent[0][8:], sent[1], received[0][24:56], received[0][56:]]
    assert len(set(pieces)) == len(pieces) == 200


@pytest.mark.parametrize(
    'theirs', [dict(secret=OTHER_SECRET), dict(purpose='copies'), dict(secret=SECRET + b'0')]
)
def test_a_client_refuses_another_secret_or_purpose_and_sends_no_proof(theirs):
    one = client()
    with pytest.raises(SecretMismatchError, match='MAPSAGE_SECRET_FILE'):
        talk(one, listening(**theirs))
    assert not one.proved


def test_another_process_at_the_address_is_no_mismatch():
    with pytest.raises(OtherListenerError, match='another process'):
        talk(client(), listening(listener=new_listener()))


def test_another_version_is_named(monkeypatch):
    one = client()
    monkeypatch.setattr(module, '_VERSION_WORD', b'MapSage\x07')
    answer = listening().take(one.greeting)
    monkeypatch.undo()
    with pytest.raises(OtherVersionError, match='version 7, expected 1. Install the same'):
        one.take(answer[: one.needed])


def test_a_recorded_handshake_is_of_no_use():
    sent, _ = talk(client(), listening())
    again = listening()
    again.take(sent[0])
    with pytest.raises(HandshakeError):
        again.take(sent[1])
    assert not again.proved


def test_a_recorded_listener_is_not_believed():
    _, received = talk(client(), listening())
    one = client()
    one.take(received[0][:8])
    with pytest.raises(SecretMismatchError):
        one.take(received[0][8:])


@pytest.mark.parametrize('same_listener', [True, False])
def test_our_own_challenge_sent_back_proves_nothing(same_listener):
    """The attacker lets the listener itself answer the challenge that it was sent."""
    first = listening()
    challenge = first.take(module._VERSION_WORD + os.urandom(32))[24:56]
    second = first if same_listener else listening()
    if not same_listener:
        reflected = second.take(module._VERSION_WORD + challenge)[56:]
        with pytest.raises(HandshakeError):
            first.take(reflected)
    with pytest.raises(HandshakeError):
        first.take(challenge)


def test_a_client_cannot_be_led_to_another_listener_of_the_job():
    """Who writes his own address into the open store relays to a listener of another rank."""
    one, relayed_to = client(), listening(listener=new_listener())
    with pytest.raises(OtherListenerError):
        talk(one, relayed_to)
    # Also not if the number is changed on its way.
    one = client()
    answer = listening(listener=new_listener()).take(one.greeting)
    one.take(answer[:8])
    with pytest.raises(SecretMismatchError):
        one.take(LISTENER + answer[24:])


def test_a_proof_for_another_purpose_is_refused():
    one, other = client(purpose='features'), listening(purpose='mesh')
    answer = other.take(one.greeting)
    facts = (SECRET, 'features', LISTENER, one.greeting[8:], answer[24:56])
    with pytest.raises(HandshakeError):
        other.take(module._proof('client', *facts))


@given(
    st.binary(min_size=40, max_size=40)
    | st.binary(min_size=33, max_size=33).map(lambda data: b'MapSage' + data),
    st.binary(min_size=32, max_size=32),
)
def test_any_bytes_are_refused_by_a_listener(greeting, proof):
    other = listening()
    try:
        assert len(other.take(greeting)) in (8, 88)
        if other.needed:
            other.take(proof)
    except HandshakeError:
        pass
    assert not other.proved


@given(
    st.binary(min_size=8, max_size=8) | st.just(module._VERSION_WORD),
    st.binary(min_size=80, max_size=80),
    st.binary(min_size=1, max_size=1),
)
def test_any_bytes_are_refused_by_a_client(word, answer, welcome):
    one = client()
    with pytest.raises(HandshakeError):
        one.take(word)
        one.take(answer)
        one.take(welcome)
    assert not one.proved


class Server:
    """A listener whose one connection a function serves."""

    def __init__(self, serve) -> None:
        self.listener = socket.create_server(('127.0.0.1', 0))
        self.address = self.listener.getsockname()
        self.thread = threading.Thread(target=self._run, args=(serve,))
        self.thread.start()

    def _run(self, serve) -> None:
        connection, _ = self.listener.accept()
        with connection:
            serve(connection)

    def __enter__(self):
        return self

    def __exit__(self, *_) -> None:
        self.thread.join(60)
        self.listener.close()


def serve_well(connection: socket.socket) -> None:
    other = listening()
    while not other.proved:
        connection.sendall(other.take(connection.recv(other.needed, socket.MSG_WAITALL)))
    connection.sendall(b'data')


def test_a_connection_carries_data_after_the_handshake():
    with Server(serve_well) as server, connect(server.address, client(), 60) as connection:
        assert connection.recv(4, socket.MSG_WAITALL) == b'data'


def test_a_listener_byte_by_byte_is_understood():
    def serve_slowly(connection: socket.socket) -> None:
        other = listening()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        while not other.proved:
            for byte in other.take(connection.recv(other.needed, socket.MSG_WAITALL)):
                connection.sendall(bytes([byte]))

    with Server(serve_slowly) as server:
        connect(server.address, client(), 60).close()


def test_who_hangs_up_was_full_and_who_refuses_has_ended():
    for received in (0, 40):
        with Server(lambda connection, size=received: connection.recv(size)) as server:
            with pytest.raises(GreetingDroppedError, match='closed the connection'):
                connect(server.address, client(), 60)
    with pytest.raises(ConnectionRefusedError):
        connect(server.address, client(), 60)


def test_the_time_is_that_of_the_whole_handshake():
    """One byte now and then does not begin the time again."""
    enough = threading.Event()

    def serve_for_ever(connection: socket.socket) -> None:
        try:
            for byte in (module._VERSION_WORD + LISTENER + bytes(63)) * 100:
                if enough.wait(0.05):
                    return
                connection.sendall(bytes([byte]))
        except OSError:
            enough.set()

    with Server(serve_for_ever) as server:
        with pytest.raises(socket.timeout):
            connect(server.address, client(), 0.5)
        enough.set()


@pytest.mark.parametrize(
    'answer',
    [
        b'HTTP/1.1 400 Bad Request\r\n\r\n',
        b'SSH-2.0-OpenSSH_9.6\r\n',
        bytes(200),
        b'MapSage\x01' + bytes(80),
    ],
)
def test_another_program_at_the_address_is_named(answer):
    def serve(connection: socket.socket) -> None:
        connection.recv(40, socket.MSG_WAITALL)
        connection.sendall(answer)

    with Server(serve) as server, pytest.raises(OtherListenerError, match='listens at its address'):
        connect(server.address, client(), 60)
