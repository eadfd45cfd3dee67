"""Connects encoders and heads, which find each other through the rendezvous store."""
from __future__ import annotations

import fcntl
import json
import os
import secrets
import selectors
import socket
import struct
import time
from typing import Any, Dict, List, Sequence

import torch

from mapsage.distributed.store import store_lock

from .dial import Dial
from .hub import Hub
from .link import Link, LinkError

_TOKEN_BYTES = 16
_HELLO_BYTES = _TOKEN_BYTES + 8  # the token, and the rank of the head
_SIOCGIFADDR = 0x8915  # linux/sockios.h
_MAX_PAUSE = 0.5  # seconds between two looks at the store


def open_links(store: Any, rank: int, encoders: Sequence[int], heads: Sequence[int],
               timeout: float, peer_timeout: float) -> Dict[int, Link]:
    """Connect a head with all encoders, or an encoder with all heads. Collective over all of them.

    Encoders listen, and heads connect to what the encoders wrote into the store; no process group
    is needed. A head opens a connection again when it breaks.

    Args:
        store: Store of torch that all these ranks reach, used by this thread alone meanwhile.
        rank: Rank of this process, in ``encoders`` or in ``heads``.
        encoders: Ranks that encode.
        heads: Ranks that receive features: one rank of each head replica.
        timeout: Seconds to wait for the other ranks.
        peer_timeout: Seconds without any message after which a peer counts as lost; equal on all
            ranks. Heartbeats come from a thread of their own, so an item may take longer.

    Returns:
        Links by the rank of the peer.

    Raises:
        ValueError: If this rank is in both lists or in neither, or a time is not positive.
        LinkError: Naming the ranks that did not come.
    """
    encoders, heads = sorted(encoders), sorted(heads)
    if (rank in encoders) == (rank in heads):
        raise ValueError(f'rank {rank} is none or both of encoders {encoders} and heads {heads}: '
                         f'expected one.')
    if not (timeout > 0 and peer_timeout > 0):
        raise ValueError(f'timeout={timeout!r}, peer_timeout={peer_timeout!r}, expected positive '
                         f'numbers of seconds.')
    hub = Hub(peer_timeout)
    deadline = time.monotonic() + timeout
    if rank in encoders:
        peers, kind = heads, 'head'
        links = {peer: Link(hub, f'head rank {peer}') for peer in peers}
        _publish(store, rank, _Listener(hub, links))
        hub.start()
        _await_peers(store, hub, rank, peers, timeout)
    else:
        peers, kind = encoders, 'encoder'
        _publish(store, rank, None)
        _await_peers(store, hub, rank, peers, timeout)
        links = {peer: Link(hub, f'encoder rank {peer}', _dial(store, rank, peer))
                 for peer in peers}
        hub.start()
        for link in links.values():
            hub.call(link.dial)
    for peer, link in links.items():
        why = link.await_open(max(0.0, deadline - time.monotonic()))
        if why is not None:
            hub.stop()
            raise LinkError(f'no connection to {kind} rank {peer} within {timeout:g} s ({why}). '
                            f'Look at the first error in its log. With several machines, name the '
                            f'network interface between them in GLOO_SOCKET_IFNAME.')
    return links


class _Listener:
    """Takes the connections of heads, and gives each to its link."""

    def __init__(self, hub: Hub, links: Dict[int, Link]) -> None:
        self._hub, self._links = hub, links
        self.token = secrets.token_bytes(_TOKEN_BYTES)
        self.hosts = own_addresses()
        family = socket.AF_INET6 if any(':' in host for host in self.hosts) else socket.AF_INET
        self._socket = socket.create_server(
            ('', 0), family=family, backlog=len(links) + 8,
            dualstack_ipv6=family == socket.AF_INET6 and socket.has_dualstack_ipv6())
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        hub.watch(self._socket, selectors.EVENT_READ, self._on_connection)

    def _on_connection(self, events: int) -> None:
        try:
            sock, _ = self._socket.accept()
        except OSError:  # whoever connected has gone again
            return
        sock.setblocking(False)
        hello = bytearray()
        self._hub.watch(sock, selectors.EVENT_READ, lambda events: self._read_hello(sock, hello))
        self._hub.later(self._hub.peer_timeout,
                        lambda: self._hub.drop(sock) if len(hello) < _HELLO_BYTES else None)

    def _read_hello(self, sock: socket.socket, hello: bytearray) -> None:
        try:
            more = sock.recv(_HELLO_BYTES - len(hello))
        except OSError:
            more = b''
        hello += more
        if not more:
            self._hub.drop(sock)
        elif len(hello) == _HELLO_BYTES:
            rank, = struct.unpack('<q', hello[_TOKEN_BYTES:])
            if hello[:_TOKEN_BYTES] == self.token and rank in self._links:
                self._links[rank].adopt(sock)
            else:
                self._hub.drop(sock)


def own_addresses() -> List[str]:
    """Return addresses by which other processes may reach this one, the likeliest first.

    As gloo does, ``GLOO_SOCKET_IFNAME`` names the interface. Without it, the address is that from
    which the rendezvous store is reached.
    """
    name = os.environ.get('GLOO_SOCKET_IFNAME', '').split(',')[0]
    if name:
        return [_address_of(name)]
    found = []
    target = os.environ.get('MASTER_ADDR')
    for find in (lambda: _route_to(target) if target else '',
                 lambda: socket.gethostbyname(socket.gethostname()), lambda: '127.0.0.1'):
        try:
            found.append(find())
        except OSError:  # no such route, or a host name that nothing resolves
            continue
    return list(dict.fromkeys(each for each in found if each))


def _address_of(interface: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR,
                                 struct.pack('256s', interface.encode()[:15]))
        except OSError as error:
            raise LinkError(f'GLOO_SOCKET_IFNAME={interface!r} has no IPv4 address ({error}): name '
                            f'an interface that "ip -4 address" lists.') from error
    return socket.inet_ntoa(answer[20:24])


def _route_to(host: str) -> str:
    family, kind, protocol, _, address = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)  # sends nothing
        return str(probe.getsockname()[0])


def _publish(store: Any, rank: int, listener: Any) -> None:
    with store_lock:
        if listener is not None:
            store.set(f'mapsage/features/at/{rank}', json.dumps(dict(
                host=socket.gethostname(), hosts=listener.hosts, port=listener.port,
                token=listener.token.hex())))
        store.add(f'mapsage/features/here/{rank}', 1)


def _dial(store: Any, rank: int, peer: int) -> Dial:
    with store_lock:
        found = json.loads(bytes(store.get(f'mapsage/features/at/{peer}')).decode())
    hosts = [host for host in found['hosts']
             if found['host'] == socket.gethostname()
             or not (host == '::1' or host.startswith('127.'))]
    hello = bytes.fromhex(found['token']) + struct.pack('<q', rank)
    return Dial([(host, found['port']) for host in hosts or found['hosts']],
                torch.tensor(list(hello), dtype=torch.uint8))


def _await_peers(store: Any, hub: Hub, rank: int, peers: Sequence[int], timeout: float) -> None:
    deadline, pause = time.monotonic() + timeout, 0.01
    absent = list(peers)
    while True:
        with store_lock:
            absent = [peer for peer in absent
                      if not store.add(f'mapsage/features/here/{peer}', 0)]
        if not absent:
            return
        if time.monotonic() > deadline:
            hub.stop()
            raise LinkError(f'rank {rank} waited {timeout:g} s to open its links, and rank(s) '
                            f'{absent} did not come: look at the first error in their log.')
        time.sleep(min(pause, max(0.0, deadline - time.monotonic()) + 0.001))
        pause = min(2 * pause, _MAX_PAUSE)
