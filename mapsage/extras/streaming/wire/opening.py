"""Connects encoders and heads at the start of a run.

Encoders listen and publish their addresses in the rendezvous store; heads read them and connect.
Every connection begins with a handshake that proves the secret of the job, then with the rank of
the head. The caller keeps one :class:`~.link.Link` per peer, which reopens the connection when it
breaks.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import struct
import time
from typing import Dict, List, Optional, Sequence, Union

import torch
from torch.distributed import Store

from mapsage.distributed.host_address import reachable_host
from mapsage.distributed.store import store_lock
from mapsage_launcher.trust.guard import Guard, bind_listener
from mapsage_launcher.trust.handshake import ListenerHandshake, new_listener
from mapsage_launcher.trust.job_secret import job_secret

from .hub import Hub
from .link import Dial, Link, LinkError

# The rank of the head.
_HELLO = struct.Struct('<q')
# Purpose of the handshake.
_PURPOSE = 'features'
# Longest time between two reads of the store, in seconds.
_MAX_PAUSE = 0.5
# Host, port and the listener's number in hexadecimal digits; a list, since it travels as JSON.
Address = List[Union[str, int]]


def open_links(
    store: Store,
    rank: int,
    encoders: Sequence[int],
    heads: Sequence[int],
    timeout: float,
    peer_timeout: float,
) -> Dict[int, Link]:
    """Connect a head with all encoders, or an encoder with all heads. Collective over all of them.

    No process group is needed. When a connection breaks, the head opens it again.

    Args:
        store: Store of torch that all these ranks reach. Only this thread may use it during the
        call.
        rank: Rank of this process, in ``encoders`` or in ``heads``.
        encoders: Ranks that encode.
        heads: Ranks that receive features: one rank of each head replica.
        timeout: Seconds to wait for the other ranks.
        peer_timeout: Seconds without any message after which a peer counts as lost; equal on all
            ranks. A separate thread sends heartbeats, so encoding an item may take longer.

    Returns:
        Links by the rank of the peer.

    Raises:
        ValueError: If this rank is in both lists or in neither, or a time is not positive.
        SecretError: If this process has no secret of the job, see :func:`job_secret`.
        LinkError: If ranks did not come, with their numbers.
    """
    encoders, heads = sorted(encoders), sorted(heads)
    if (rank in encoders) == (rank in heads):
        raise ValueError(
            f'rank {rank} is in both or neither of encoders {encoders} and heads '
            f'{heads}: expected one of the two.'
        )
    if not (timeout > 0 and peer_timeout > 0):
        raise ValueError(
            f'timeout={timeout!r}, peer_timeout={peer_timeout!r}, expected positive '
            f'numbers of seconds.'
        )
    secret = job_secret(os.environ)
    hub = Hub(peer_timeout)
    deadline = time.monotonic() + timeout
    listener: Optional[_Listener] = None
    if rank in encoders:
        peers, kind = heads, 'head'
        links = {peer: Link(hub, f'head rank {peer}') for peer in peers}
        listener = _Listener(hub, links, secret)
        _publish(store, rank, listener)
        hub.start()
        _await_peers(store, hub, rank, peers, timeout)
    else:
        peers, kind = encoders, 'encoder'
        _publish(store, rank, None)
        _await_peers(store, hub, rank, peers, timeout)
        links = {
            peer: Link(hub, f'encoder rank {peer}', _make_dial(store, rank, peer, secret))
            for peer in peers
        }
        hub.start()
        for link in links.values():
            hub.call(link.dial)
    for peer, link in links.items():
        reason = link.await_open(max(0.0, deadline - time.monotonic()))
        if reason is not None:
            hub.stop()
            if listener is not None and listener.guard.refused:
                reason += (
                    f'; {listener.guard.refused} connection(s) ended at the proof of the '
                    f'secret, which must be the same on all machines: see MAPSAGE_SECRET_FILE'
                )
            raise LinkError(
                f'no connection to {kind} rank {peer} within {timeout:g} s ({reason}). '
                f'Look at the first error in its log. With several machines, name the '
                f'network interface between them in GLOO_SOCKET_IFNAME.'
            )
    return links


class _Listener:
    """Accepts the connections of heads and passes each one to the link of its head."""

    def __init__(self, hub: Hub, links: Dict[int, Link], secret: bytes) -> None:
        self._hub, self._links = hub, links
        host, number = reachable_host(), new_listener()
        listener = bind_listener(host)
        self.address: Address = [host, listener.getsockname()[1], number.hex()]
        self.guard = Guard(
            listener,
            lambda: ListenerHandshake(secret, _PURPOSE, number),
            lambda sock: hub.call(lambda: self._await_hello(sock)),
        )
        hub.at_end(self.guard.close)

    def _await_hello(self, sock: socket.socket) -> None:
        hello = bytearray()
        self._hub.watch(sock, selectors.EVENT_READ, lambda events: self._read_hello(sock, hello))
        self._hub.later(
            self._hub.peer_timeout,
            lambda: self._hub.drop(sock) if len(hello) < _HELLO.size else None,
        )

    def _read_hello(self, sock: socket.socket, hello: bytearray) -> None:
        try:
            received = sock.recv(_HELLO.size - len(hello))
        except OSError:
            received = b''
        hello += received
        if not received:
            self._hub.drop(sock)
        elif len(hello) == _HELLO.size:
            (rank,) = _HELLO.unpack(hello)
            if rank in self._links:
                self._links[rank].adopt(sock)
            else:
                self._hub.drop(sock)


def _publish(store: Store, rank: int, listener: Optional[_Listener]) -> None:
    with store_lock:
        if listener is not None:
            store.set(f'mapsage/extras/streaming/at/{rank}', json.dumps(listener.address))
        store.add(f'mapsage/extras/streaming/here/{rank}', 1)


def _make_dial(store: Store, rank: int, peer: int, secret: bytes) -> Dial:
    with store_lock:
        host, port, number = json.loads(
            bytes(store.get(f'mapsage/extras/streaming/at/{peer}')).decode()
        )
    return Dial(
        (host, port),
        secret,
        _PURPOSE,
        bytes.fromhex(number),
        torch.tensor(list(_HELLO.pack(rank)), dtype=torch.uint8),
    )


def _await_peers(store: Store, hub: Hub, rank: int, peers: Sequence[int], timeout: float) -> None:
    deadline, pause = time.monotonic() + timeout, 0.01
    absent = list(peers)
    while True:
        with store_lock:
            absent = [
                peer for peer in absent if not store.add(f'mapsage/extras/streaming/here/{peer}', 0)
            ]
        if not absent:
            return
        if time.monotonic() > deadline:
            hub.stop()
            raise LinkError(
                f'rank {rank} waited {timeout:g} s to open its links, and rank(s) '
                f'{absent} did not come: look at the first error in their log.'
            )
        time.sleep(min(pause, max(0.0, deadline - time.monotonic()) + 0.001))
        pause = min(2 * pause, _MAX_PAUSE)
