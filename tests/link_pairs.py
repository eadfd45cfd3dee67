"""Both ends of real links in one process: over TCP, each end with threads of its own."""

from __future__ import annotations

import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, List, Optional, Tuple

import torch
import torch.distributed as dist

from mapsage.extras.streaming.wire.header import Header
from mapsage.extras.streaming.wire.link import Link, Receiver
from mapsage.extras.streaming.wire.opening import open_links
from mapsage_launcher import liveness

TIMEOUT = 30.0  # seconds; a deadline for a test that hangs, nothing waits so long


def both(*calls: Callable[[], Any]) -> List[Any]:
    """Return what calls return that must run at the same time."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(TIMEOUT) for future in [pool.submit(call) for call in calls]]


def open_job(heads: int, encoders: int, peer_timeout: float = TIMEOUT) -> List[List[Link]]:
    """Return the links of each head, then those of each encoder; none of them is started."""
    store = dist.HashStore()
    ranks = range(heads), range(heads, heads + encoders)
    found = both(
        *(
            lambda rank=rank: open_links(store, rank, ranks[1], ranks[0], TIMEOUT, peer_timeout)
            for each in ranks
            for rank in each
        )
    )
    return [[links[peer] for peer in sorted(links)] for links in found]


def open_pair(peer_timeout: float = TIMEOUT) -> Tuple[Link, Link]:
    """Return the head's link to an encoder, and the encoder's to the head; neither is started."""
    (head,), (encoder,) = open_job(1, 1, peer_timeout)
    return head, encoder


def damage_sent(link: Link, damage: Callable[[torch.Tensor], Any]) -> None:
    """Let ``damage`` see each part, header or payload, and return what is sent instead of it."""
    connection: Any = link._connection
    put = connection.put_bytes
    connection.put_bytes = lambda *parts: put(*map(damage, parts))


def cut(link: Link) -> None:
    """Shut the connection of a link down, as a firewall or a pulled cable does in the end."""
    connection: Any = link._connection
    connection.sock.shutdown(socket.SHUT_RDWR)


class PeerTime:
    """The time by which links judge their peers: it passes only when a test says so.

    Args:
        links: Links that were opened since :meth:`often`.
    """

    @staticmethod
    def often(monkeypatch: Any) -> None:
        """Let the links that are opened from now on beat a hundred times a second."""
        monkeypatch.setattr(liveness, '_MAX_INTERVAL_SECONDS', 0.01)

    def __init__(self, *links: Link) -> None:
        self._hubs = {id(link._hub): link._hub.liveness for link in links}.values()
        self.now = time.monotonic()
        for each in self._hubs:
            each._clock = lambda: self.now

    def go_on(self, seconds: float) -> None:
        """Let time pass by as much as a link may be silent for, and wait until all were heard."""
        end = self.now + seconds
        while self.now < end:
            self.step(
                lambda each: all(peer.heard >= self.now for peer in list(each._peers.values()))
            )

    def step(self, happened: Callable[[liveness.Liveness], bool]) -> None:
        """Let a quarter of the time pass after which a peer counts as silent, until all see it."""
        self.now += min(each.timeout for each in self._hubs) / 4
        deadline = time.monotonic() + TIMEOUT
        while not all(happened(each) for each in self._hubs):
            assert time.monotonic() < deadline, 'a peer was not heard'
            time.sleep(0.001)


class Kept(Receiver):
    """Keeps the messages that arrive, and why the link ended."""

    def __init__(self) -> None:
        self.messages: List[Tuple[Header, torch.Tensor, Optional[str]]] = []
        self.ended: List[Optional[str]] = []
        self.reopened = 0
        self._changed = threading.Condition()

    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
        return None

    def received(
        self, link: Link, header: Header, payload: torch.Tensor, damage: Optional[str]
    ) -> None:
        with self._changed:
            self.messages.append((header, payload, damage))
            self._changed.notify_all()

    def lost(self, link: Link, reason: Optional[str]) -> None:
        with self._changed:
            self.ended.append(reason)
            self._changed.notify_all()

    def opened(self, link: Link) -> None:
        with self._changed:
            self.reopened += 1
            self._changed.notify_all()

    def wait_for(self, happened: Callable[[], bool]) -> None:
        """Return once something happened, such as ``lambda: kept.ended``."""
        with self._changed:
            assert self._changed.wait_for(happened, TIMEOUT), (
                [header.kind.name for header, _, _ in self.messages][:50],
                self.ended,
            )
