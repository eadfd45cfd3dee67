"""Messages come over a link in order and whole; what ends a link is said to both ends."""
from __future__ import annotations

from typing import Any, Optional, Tuple

import pytest
import torch
from link_pairs import TIMEOUT, Kept, both, open_pair

from mapsage.features.wire.header import Header, Kind
from mapsage.features.wire.link import Link


def started(*receivers: Any) -> Tuple[Link, Link]:
    pair = open_pair()
    for link, receiver in zip(pair, receivers):
        link.start(receiver)
    return pair


def close_both(*links: Link) -> None:
    assert both(*(lambda link=link: link.close(TIMEOUT) for link in links)) == [True, True]


def test_messages_arrive_in_order_with_their_payloads() -> None:
    kept = Kept(), Kept()
    head, encoder = started(*kept)
    assert (head.peer, encoder.peer) == ('encoder rank 1', 'head rank 0')
    payloads = [torch.arange(size, dtype=torch.int64).to(torch.uint8) for size in (1, 0, 70000, 3)]
    for number, payload in enumerate(payloads):
        head.send(Header(Kind.DATA, item=number, offset=7), payload)
        encoder.send(Header(Kind.HEARTBEAT, item=number))
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
    head.send(Header(Kind.HEARTBEAT))
    close_both(head, encoder)
    assert kept[1].messages == [] and kept[1].ended == [None]


def test_a_payload_goes_where_the_receiver_says_and_damage_is_reported() -> None:
    memory = torch.zeros(8, dtype=torch.uint8)

    class Placed(Kept):
        def place(self, link: Link, header: Header) -> Optional[torch.Tensor]:
            return memory[:header.nbytes]

    kept = Kept(), Placed()
    head, encoder = started(*kept)
    payload = torch.full((8,), 5, dtype=torch.uint8)
    send = head._group.send

    def damaged(tensors: Any, other: int, tag: int) -> Any:
        return send([tensors[0] + 1] if tensors[0].dtype == torch.uint8 else tensors, other, tag)

    head._group = type('Damaging', (), dict(send=staticmethod(damaged), recv=head._group.recv))()
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
    head.send(Header(Kind.HEARTBEAT))
    kept[1].wait_for(lambda: bool(kept[1].ended))
    kept[0].wait_for(lambda: bool(kept[0].ended))
    assert kept[1].ended == ['reading failed: ZeroDivisionError: no such tile']
    assert 'it went away' in str(kept[0].ended[0])
    assert not head.alive and not encoder.alive
    close_both(head, encoder)


@pytest.mark.parametrize('words', ['begins with', 'checksum of a header'])
def test_a_header_that_cannot_be_read_ends_the_link(words: str) -> None:
    kept = Kept(), Kept()
    head, encoder = started(*kept)
    send, at = head._group.send, 0 if words == 'begins with' else 5

    def damaged(tensors: Any, other: int, tag: int) -> Any:
        tensors[0][at] += 1
        return send(tensors, other, tag)

    head._group = type('Damaging', (), dict(send=staticmethod(damaged), recv=head._group.recv))()
    head.send(Header(Kind.HEARTBEAT))
    kept[1].wait_for(lambda: bool(kept[1].ended))
    assert words in str(kept[1].ended[0])
    close_both(head, encoder)
