"""A connection of two processes for messages of a header and the payload that it describes."""
from __future__ import annotations

import abc
import threading
import time
from collections import deque
from dataclasses import replace
from datetime import timedelta
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple

import torch
import torch.distributed as dist

from mapsage.distributed.store import store_lock
from mapsage.features.source import StreamingError

from .header import WORDS, Header, Kind, decode_header, encode_header
from .payload import checksum, host_bytes

_HEADER, _PAYLOAD = 0, 1  # tags of gloo: the next header is awaited before the payload of this one
_NOTHING = 2  # tag that no message has
# Number of messages that gloo gets before the first of them must have been sent: enough to keep
# gloo busy.
_IN_FLIGHT = 3


class LinkError(StreamingError):
    """The peer of a link did not come, fell silent, went away or sent something unreadable."""


class Receiver(abc.ABC):
    """Takes the messages that arrive on a link; called by the link's reading thread alone."""

    @abc.abstractmethod
    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
        """Return memory for a payload, uint8 (header.nbytes,); None if the link shall allocate it.

        A call of :meth:`received` follows, whatever happens.
        """

    @abc.abstractmethod
    def received(self, link: Link, header: Header, payload: torch.Tensor,
                 damage: Optional[str]) -> None:
        """Take a message. ``damage`` says why the payload differs from what was sent, else None."""

    @abc.abstractmethod
    def lost(self, link: Link, reason: Optional[str]) -> None:
        """Note that the link is closed; no more messages will arrive, and no memory is written.

        Args:
            link: Link that is closed.
            reason: Reason why the connection broke; None after CLOSE.
        """


class Link:
    """One end of a connection between an encoder and a head, over gloo and host memory.

    Each link uses a separate process group, so that a peer that dies breaks only the links to
    itself. One thread reads and one writes, so that neither side ever waits until the other takes
    a message.

    Args:
        group: Gloo group of two ranks.
        end: Rank of this process in the group.
        peer: Name of the other process in errors, for example ``'encoder 1'``.
        peer_timeout: Seconds without any message after which the peer counts as lost.
    """

    def __init__(self, group: Any, end: int, peer: str, peer_timeout: float) -> None:
        self.peer, self.peer_timeout = peer, peer_timeout
        self._group, self._other = group, 1 - end
        self._outbox: Deque[Tuple[Header, torch.Tensor]] = deque()
        self._changed = threading.Condition()
        self._closing = False  # CLOSE is the last message in the outbox
        self._broken: Optional[str] = None
        self._receiver: Optional[Receiver] = None
        self._threads: List[threading.Thread] = []

    @property
    def alive(self) -> bool:
        """Whether a message that is sent now can arrive."""
        return self._broken is None and not self._closing

    def start(self, receiver: Receiver) -> None:
        """Begin to read and write; messages that arrive go to ``receiver``."""
        self._receiver = receiver
        for work in (self._read, self._write):
            name = f'link{work.__name__.replace("_", "-")}-{self.peer.replace(" ", "-")}'
            thread = threading.Thread(target=work, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    def send(self, header: Header, payload: Optional[torch.Tensor] = None) -> None:
        """Send a message after the earlier ones. Returns at once; does nothing on a broken link.

        Args:
            header: Header of the message; its ``nbytes`` and ``checksum`` are filled in.
            payload: uint8 (n,), contiguous, in host memory; do not write to it until it was sent.
        """
        if payload is None:
            payload = torch.empty(0, dtype=torch.uint8)
        with self._changed:
            if self._closing or self._broken is not None:
                return
            self._closing = header.kind == Kind.CLOSE
            self._outbox.append((header, payload))
            self._changed.notify_all()

    def close(self, timeout: float) -> bool:
        """Send CLOSE, wait for the answer and end the threads; return whether they ended.

        Args:
            timeout: Seconds after which the connection is broken without an answer.
        """
        self.send(Header(Kind.CLOSE))
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self.abandon(f'no answer to CLOSE within {timeout:g} s')
            for thread in self._threads:
                thread.join(timeout)
        return not any(thread.is_alive() for thread in self._threads)

    def abandon(self, reason: str) -> None:
        """Break the connection: both ends notice it, and the threads end."""
        self._break(reason)
        try:
            # Gloo cannot cancel anything, but when an operation times out it closes the connection.
            self._group.recv([torch.empty(1, dtype=torch.int64)], self._other, _NOTHING).wait(
                timedelta(milliseconds=1))
        except RuntimeError:
            pass  # the time-out that was provoked

    def _gone(self, error: RuntimeError) -> str:
        return self._break(f'it went away, or said and took nothing for {self.peer_timeout:g} s '
                           f'({_first_line(error)})')

    def _break(self, reason: str) -> str:
        """Stop sending; return the first reason for it."""
        with self._changed:
            if self._broken is None:
                self._broken = reason
            self._outbox.clear()
            self._changed.notify_all()
            return self._broken

    def _read(self) -> None:
        assert self._receiver is not None
        reason: Optional[str] = None
        try:
            self._read_messages(self._receiver)
        except StreamingError as error:  # an unreadable header, or an error of the receiver
            reason = str(error)
            self.abandon(reason)
        except RuntimeError as error:  # raised by gloo
            reason = self._gone(error)
        except BaseException as error:  # a fault of this program, reported to the receiver
            reason = f'reading failed: {type(error).__name__}: {error}'
            self.abandon(reason)
        self._receiver.lost(self, reason)

    def _read_messages(self, receiver: Receiver) -> None:
        awaited = self._await_header()
        while True:
            words, work = awaited
            work.wait(timedelta(seconds=self.peer_timeout))
            header = decode_header(words)
            awaited = self._await_header()  # posted now, so that the peer can send it at any time
            if header.kind == Kind.CLOSE:
                self.send(Header(Kind.CLOSE))
                return
            self._read_payload(receiver, header)

    def _await_header(self) -> Tuple[torch.Tensor, Any]:
        words = torch.zeros(WORDS, dtype=torch.int64)
        return words, self._group.recv([words], self._other, _HEADER)

    def _read_payload(self, receiver: Receiver, header: Header) -> None:
        if not header.nbytes:
            receiver.received(self, header, torch.empty(0, dtype=torch.uint8), None)
            return
        place = receiver.place(self, header)
        payload = host_bytes(header.nbytes) if place is None else place
        try:
            self._group.recv([payload], self._other, _PAYLOAD).wait(
                timedelta(seconds=self.peer_timeout))
        except RuntimeError as error:
            receiver.received(self, header, payload, self._gone(error))
            raise
        receiver.received(self, header, payload, _damage(header, payload))

    def _write(self) -> None:
        in_flight: Deque[Tuple[Any, Any]] = deque()  # keeps the tensors until they were sent
        try:
            while True:
                message = self._next_message(wait=not in_flight)
                if message is not None:
                    in_flight.append(self._post(*message))
                while in_flight and (message is None or len(in_flight) > _IN_FLIGHT):
                    for work in in_flight[0][0]:
                        work.wait(timedelta(seconds=self.peer_timeout))
                    in_flight.popleft()
                if message is None and (self._broken is not None or self._is_done()):
                    return
        except RuntimeError as error:  # the reading thread gets it too, and reports it
            self._gone(error)
        except BaseException as error:  # a fault of this program; the reading thread reports it
            self.abandon(f'writing failed: {type(error).__name__}: {error}')

    def _next_message(self, wait: bool) -> Optional[Tuple[Header, torch.Tensor]]:
        """Return the next message or None; if ``wait``, once there is one or the link ends."""
        with self._changed:
            while wait and not self._outbox and self._broken is None and not self._closing:
                self._changed.wait()
            return self._outbox.popleft() if self._outbox else None

    def _is_done(self) -> bool:
        with self._changed:
            return self._closing and not self._outbox

    def _post(self, header: Header, payload: torch.Tensor) -> Tuple[List[Any], Any]:
        """Hand a message to gloo; return the works to wait for, and the tensors that they use."""
        header = replace(header, nbytes=len(payload), checksum=checksum(payload))
        words = encode_header(header)
        works = [self._group.send([words], self._other, _HEADER)]
        if len(payload):
            works.append(self._group.send([payload], self._other, _PAYLOAD))
        return works, (words, payload)


def open_links(store: Any, rank: int, encoders: Sequence[int], heads: Sequence[int],
               timeout: float, peer_timeout: float) -> Dict[int, Link]:
    """Connect a head with all encoders, or an encoder with all heads. Collective over all of them.

    Each pair gets a separate group through the store; no default process group is needed.
    Afterward encoders must serve, and heads listen, within ``peer_timeout`` seconds.

    Args:
        store: Store of torch that all these ranks reach, used by this thread alone meanwhile.
        rank: Rank of this process, in ``encoders`` or in ``heads``.
        encoders: Ranks that encode.
        heads: Ranks that receive features: one rank of each head replica.
        timeout: Seconds to wait for the other ranks.
        peer_timeout: Seconds without any message after which a peer counts as lost; equal on all
            ranks. An encoder sends nothing while it encodes, so it must be longer than one item
            takes.

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
    peers = heads if rank in encoders else encoders
    _await_peers(store, rank, peers, timeout)
    links = {}
    for encoder in encoders:  # in the same order on all ranks, so that they cannot deadlock
        for head in heads:
            if rank in (encoder, head):
                peer, name = (head, 'head') if rank == encoder else (encoder, 'encoder')
                prefix = f'mapsage/features/{encoder}-{head}'
                links[peer] = Link(_make_group(store, prefix, int(rank == head), timeout, peer),
                                   int(rank == head), f'{name} rank {peer}', peer_timeout)
    return links


def _await_peers(store: Any, rank: int, peers: Sequence[int], timeout: float) -> None:
    deadline = time.monotonic() + timeout
    with store_lock:
        store.add(f'mapsage/features/here/{rank}', 1)
    while True:
        with store_lock:
            absent = [peer for peer in peers
                      if not store.add(f'mapsage/features/here/{peer}', 0)]
        if not absent:
            return
        if time.monotonic() > deadline:
            raise LinkError(f'rank {rank} waited {timeout:g} s to open its links, and rank(s) '
                            f'{absent} did not come: look at the first error in their log.')
        time.sleep(0.01)


def _make_group(store: Any, prefix: str, end: int, timeout: float, peer: int) -> Any:
    try:
        with store_lock:
            return dist.ProcessGroupGloo(dist.PrefixStore(prefix, store), end, 2,
                                         timedelta(seconds=timeout))
    except RuntimeError as error:
        raise LinkError(f'no connection to rank {peer} within {timeout:g} s '
                        f'({_first_line(error)}). Look at the first error in its log.') from error


def _damage(header: Header, payload: torch.Tensor) -> Optional[str]:
    found = checksum(payload)
    if found == header.checksum:
        return None
    return (f'the checksum of {header.nbytes} bytes is {found:08x}, expected '
            f'{header.checksum:08x}: they were damaged on their way')


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [''])[0]
