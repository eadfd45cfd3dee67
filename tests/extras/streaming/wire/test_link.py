"""Messages come over a link in order and whole; what ends a link is said to both ends."""

from __future__ import annotations

import gc
import os
import re
import socket
import threading
import time
from typing import Any, List, Optional, Tuple

import pytest
import torch
from link_pairs import TIMEOUT, Kept, PeerTime, both, cut, damage_sent, open_job, open_pair

from mapsage.extras.streaming.wire.header import Header, Kind
from mapsage.extras.streaming.wire.link import Link


def started(*receivers: Any) -> Tuple[Link, Link]:
    pair = open_pair()
    for link, receiver in zip(pair, receivers):
        link.start(receiver)
    return pair


def close_both(*links: Link) -> None:
    assert both(*(lambda link=link: link.close(TIMEOUT) for link in links)) == [True] * len(links)


def test_messages_arrive_in_order_with_their_payloads() -> None:
    kept = Kept(), Kept()
    head, encoder = started(*kept)
    assert (head.peer, encoder.peer) == ('encoder rank 1', 'head rank 0')
    payloads = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in (1, 0, 70000, 3)]
    for number, payload in enumerate(payloads):
        head.send(Header(Kind.DATA, item=number, offset=7), payload)
        encoder.send(Header(Kind.FAILED, item=number))
    kept[0].wait_for(lambda: len(kept[0].messages) == 4)
    kept[1].wait_for(lambda: len(kept[1].messages) == 4)
    for number, (header, payload, damage) in enumerate(kept[1].messages):
        assert (header.kind, header.item, header.offset, damage) == (Kind.DATA, number, 7, None)
        assert torch.equal(payload, payloads[number])
    assert [header.item for header, _, _ in kept[0].messages] == [0, 1, 2, 3]
    close_both(head, encoder)
    assert kept[0].ended == kept[1].ended == [None]


def test_nothing_is_sent_after_close() -> None:
    kept = Kept(), Kept()
    head, encoder = started(*kept)
    assert head.alive
    head.send(Header(Kind.CLOSE))
    assert not head.alive
    head.send(Header(Kind.FAILED))
    close_both(head, encoder)
    assert kept[1].messages == [] and kept[1].ended == [None]


def test_a_payload_goes_where_the_receiver_says_and_damage_is_reported() -> None:
    memory = torch.zeros(8, dtype=torch.uint8)

    class Placed(Kept):
        def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
            return memory[: header.nbytes]

    kept = Kept(), Placed()
    head, encoder = started(*kept)
    payload = torch.full((8,), 5, dtype=torch.uint8)
    damage_sent(head, lambda part: part + 1 if part.dtype == torch.uint8 else part)
    head.send(Header(Kind.DATA), payload)
    kept[1].wait_for(lambda: bool(kept[1].messages))
    assert torch.equal(memory, payload + 1)
    assert 'damaged on their way' in str(kept[1].messages[0][2])
    close_both(head, encoder)


def test_a_receiver_that_raises_ends_the_link_at_both_ends() -> None:
    class Raising(Kept):
        def received(self, *message: Any) -> None:
            raise ZeroDivisionError('no such tile')

    kept = Kept(), Raising()
    head, encoder = started(*kept)
    head.send(Header(Kind.FAILED))
    kept[1].wait_for(lambda: bool(kept[1].ended))
    kept[0].wait_for(lambda: bool(kept[0].ended))
    assert kept[1].ended == ['reading failed: ZeroDivisionError: no such tile']
    assert 'it went away' in str(kept[0].ended[0])
    close_both(head, encoder)


@pytest.mark.parametrize('words', ['begins with', 'checksum of a header'])
def test_a_header_that_cannot_be_read_ends_the_link(words: str) -> None:
    kept = Kept(), Kept()
    head, encoder = started(*kept)
    at = 0 if words == 'begins with' else 5

    def damaged(part: torch.Tensor) -> torch.Tensor:
        if part.numel():  # not the empty payload
            part[at] += 1
        return part

    damage_sent(head, damaged)
    head.send(Header(Kind.FAILED))
    kept[1].wait_for(lambda: bool(kept[1].ended))
    assert words in str(kept[1].ended[0])
    close_both(head, encoder)


class CutAtFirst(Kept):
    """Payloads arrive in memory of its own; the link is cut when the first one begins to come."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self._came = 0

    def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
        self._came += 1
        if self._came == 1:
            cut(link)
        return self.memory[: header.nbytes]


def test_a_link_that_is_cut_in_a_payload_is_opened_again() -> None:
    size = 64 * 2**20
    kept = Kept(), CutAtFirst(size)
    head, encoder = started(*kept)
    payload = torch.arange(size, dtype=torch.uint8)
    head.send(Header(Kind.DATA, item=1), payload)
    kept[0].wait_for(lambda: bool(kept[0].reopened))
    kept[1].wait_for(lambda: bool(kept[1].reopened))
    assert len(kept[0].ended) == len(kept[1].ended) == 1
    ((header, _, damage),) = kept[1].messages
    assert header.item == 1 and 'it went away' in str(damage)
    kept[1].memory.zero_()
    head.send(Header(Kind.DATA, item=2), payload)
    encoder.send(Header(Kind.DATA, item=3), payload[:9])
    kept[1].wait_for(lambda: len(kept[1].messages) == 2)
    assert (kept[1].messages[1][0].item, kept[1].messages[1][2]) == (2, None)
    assert torch.equal(kept[1].memory, payload)
    close_both(head, encoder)
    assert kept[0].ended[1:] == kept[1].ended[1:] == [None]


@pytest.mark.parametrize('end', [0, 1], ids=['head', 'encoder'])
def test_a_head_that_has_finished_says_so_over_a_link_that_was_cut(end: int) -> None:
    kept = Kept(), Kept()
    pair = started(*kept)
    cut(pair[end])
    close_both(*pair[:1])  # at once, whether or not the loss was noticed
    kept[1].wait_for(lambda: None in kept[1].ended)
    close_both(pair[1])


def test_a_peer_that_has_ended_is_not_awaited() -> None:
    kept = Kept(), Kept()
    head, encoder = started(*kept)
    encoder._hub.stop()  # what the end of its process does to its sockets
    kept[0].wait_for(lambda: not head.reopens)
    assert 'it went away' in str(kept[0].ended[0])
    close_both(head)


def test_a_silent_peer_is_lost_and_a_busy_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    PeerTime.often(monkeypatch)
    kept = Kept(), Kept()
    head, encoder = started(*kept)
    clock = PeerTime(head, encoder)
    clock.go_on(3 * TIMEOUT)  # nobody sends a message meanwhile
    assert not kept[0].ended and not kept[1].ended and head.alive
    encoder._hub.liveness.close()  # a frozen process
    own = head._hub.liveness
    for _ in range(6):
        clock.step(lambda each: each is not own or own._last >= clock.now)
    kept[0].wait_for(lambda: bool(kept[0].ended))
    assert re.search(r'said and took nothing for 3\d s', str(kept[0].ended[0]))
    close_both(head, encoder)


def test_a_stray_connection_or_a_fault_costs_no_link(capfd: Any) -> None:
    kept = Kept(), Kept()
    head, encoder = open_pair(peer_timeout=0.5)
    for link, receiver in zip((head, encoder), kept):
        link._hub.liveness.close()  # so that a busy machine costs no link
        link.start(receiver)
    dial: Any = head._dial
    for sent in (b'', b'GET /'):
        with socket.create_connection(dial.address) as stray:
            stray.sendall(sent)
    hub, later = encoder._hub, threading.Event()
    hub.call(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    hub.call(lambda: hub.later(1.0, later.set))  # after the time that a hello may take
    assert later.wait(TIMEOUT / 3)
    assert 'ZeroDivisionError' in capfd.readouterr().err
    close_both(head, encoder)


def test_a_link_that_is_cut_again_and_again_is_opened_before_its_peer_gives_up() -> None:
    kept = Kept(), Kept()
    head, encoder = open_pair(peer_timeout=4.0)
    for link, receiver in zip((head, encoder), kept):
        link._hub.liveness.close()  # so that a busy machine costs no link
        link.start(receiver)
    for number in range(1, 3):
        head._pause = 30.0  # after many losses it would wait so long
        cut(head)
        for each in kept:
            each.wait_for(lambda: each.reopened == number)  # noqa: B023
    assert len(kept[1].ended) == 2  # a third one would say that the head is not awaited any more
    close_both(head, encoder)


def test_a_link_costs_one_descriptor_and_no_thread() -> None:
    def count() -> List[int]:
        # Sockets and threads of earlier tests may still be closing.
        counts: List[List[int]] = []
        gc.collect()
        while len(counts) < 5 or counts[-5:] != counts[-1:] * 5:
            counts.append([threading.active_count(), len(os.listdir('/proc/self/fd'))])
            time.sleep(0.05)
        return counts[-1]

    few = open_job(1, 1)
    before = count()
    many = open_job(4, 3)
    now = count()
    # 12 links have 24 ends here; the seven processes have two threads and four descriptors each
    # next to them, encoders one more of each to listen.
    assert now[0] - before[0] == 7 * 2 + 3
    assert now[1] - before[1] == 24 + 7 * 3 + 3
    for links in [*few, *many]:
        for link in links:
            link.start(Kept())
    both(*(lambda link=link: link.close(TIMEOUT) for links in [*few, *many] for link in links))
    assert not [each.name for each in threading.enumerate() if each.name == 'feature-links']
