"""An encoder that serves a real link, whose head is the test."""

from __future__ import annotations

import re
import threading
from typing import Any, Dict, List, Tuple

import pytest
import torch
from link_pairs import TIMEOUT, Kept, open_pair

from mapsage.extras.streaming.remote.sender import serve
from mapsage.extras.streaming.wire.header import Header, Kind
from mapsage.extras.streaming.wire.link import Link
from mapsage.extras.streaming.wire.payload import pack_images

CPU = torch.device('cpu')


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError('no text')


def encode(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    if images.flatten()[0] == 7:
        raise ZeroDivisionError('no such tile \udcb5.png')  # its name is in GBK
    if images.flatten()[0] == 8:
        raise UnprintableError
    if images.flatten()[0] == 9:
        return images * float('nan'), images.sum(1, keepdim=True)
    return images * 2, images.sum(1, keepdim=True)


class Head(Kept):
    """A head that asks, and an encoder that serves it in a thread."""

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self.link, theirs = open_pair()
        self.log: List[str] = []
        self.served: List[Any] = []
        self._thread = threading.Thread(target=self._serve, args=(theirs, settings), daemon=True)

    def _serve(self, link: Link, settings: Dict[str, Any]) -> None:
        self.served.append(serve([link], encode, CPU, log=self._log, **settings))

    def _log(self, level: int, text: str) -> None:
        self.log.append(text)

    def start(self) -> Head:
        self.link.start(self)
        self._thread.start()
        return self

    def ask(self, number: int, images: torch.Tensor, attempt: int = 0) -> None:
        layout, data = pack_images(images)
        self.link.send(Header(Kind.REQUEST, number, attempt, layout=layout), data)

    def grant(
        self, number: int, offset: int, span: int, *blocks: Tuple[int, int], block_bytes: int = 16
    ) -> None:
        payload = torch.tensor(blocks, dtype=torch.int64).numpy().reshape(-1).view('u1')
        self.link.send(
            Header(
                Kind.CREDIT,
                number,
                offset=offset,
                span=span,
                blocks=len(blocks),
                block_bytes=block_bytes,
            ),
            torch.from_numpy(payload),
        )

    def of(self, kind: Kind) -> List[Tuple[Header, torch.Tensor]]:
        return [(header, data) for header, data, _ in self.messages if header.kind == kind]

    def await_all(self, kind: Kind, count: int) -> List[Tuple[Header, torch.Tensor]]:
        self.wait_for(lambda: len(self.of(kind)) >= count or bool(self.ended))
        assert len(self.of(kind)) == count
        return self.of(kind)

    def close(self) -> Any:
        self.link.close(TIMEOUT)
        self._thread.join(TIMEOUT)
        return self.served[0]


def images_of(value: float) -> torch.Tensor:
    return torch.full((1, 3, 2, 2), value)


def test_features_are_offered_and_sent_into_the_blocks_of_the_credits() -> None:
    head = Head(digest=5).start()
    head.ask(4, images_of(1.0))
    ((offer, _),) = head.await_all(Kind.OFFER, 1)
    assert (offer.item, offer.attempt, offer.total, offer.digest) == (4, 0, 64, 5)
    head.grant(4, 0, 32, (2, 9), (0, 1))
    head.await_all(Kind.DATA, 2)
    head.grant(4, 32, 32, (1, 0), block_bytes=40)
    data = head.await_all(Kind.DATA, 3)
    assert [
        (header.block, header.generation, header.offset, header.nbytes) for header, _ in data
    ] == [(2, 9, 0, 16), (0, 1, 16, 16), (1, 0, 32, 32)]
    levels = offer.layout.unpack(torch.cat([payload for _, payload in data]), CPU)
    assert all(torch.equal(got, right) for got, right in zip(levels, encode(images_of(1.0))))
    served = head.close()
    assert (served['items'], served['failed'], served['bytes'], served['lost']) == (1, 0, 64, 0)


def test_an_exception_is_sent_to_the_head_and_the_next_item_is_encoded() -> None:
    head = Head().start()
    head.ask(0, images_of(7.0), attempt=2)
    head.ask(1, images_of(1.0))
    assert head.await_all(Kind.OFFER, 1)[0][0].item == 1
    ((failed, text),) = head.of(Kind.FAILED)
    assert (failed.item, failed.attempt) == (0, 2)
    assert bytes(text.tolist()).decode() == (
        'encoding raised ZeroDivisionError: no such tile \\udcb5.png'
    )
    served = head.close()
    assert (served['items'], served['failed']) == (1, 1)


@pytest.mark.parametrize('value', [9.0, float('inf')], ids=['of the encoder', 'of the images'])
def test_features_that_are_not_finite_are_refused_unless_the_images_are_not(value: float) -> None:
    head = Head().start()
    head.ask(0, images_of(value))
    head.ask(1, images_of(1.0))
    refused = value == 9
    offers = head.await_all(Kind.OFFER, 2 - refused)
    assert [offer.item for offer, _ in offers] == ([1] if refused else [0, 1])
    texts = [bytes(text.tolist()).decode() for _, text in head.of(Kind.FAILED)]
    assert len(texts) == refused
    assert all('level 0 of the features has 12 of 12 values that are NaN' in text for text in texts)
    assert head.close()['failed'] == refused


def test_an_exception_without_a_readable_message_ends_no_encoder() -> None:
    head = Head().start()
    head.ask(0, images_of(8.0))
    head.ask(1, images_of(1.0))
    head.await_all(Kind.OFFER, 1)
    ((_, text),) = head.of(Kind.FAILED)
    assert bytes(text.tolist()).decode().endswith('UnprintableError without a readable message')
    assert head.close()['failed'] == 1


def test_items_wait_for_blocks_and_earlier_ones_go_before_them() -> None:
    head = Head().start()
    for number in (5, 6, 7):
        head.ask(number, images_of(1.0))
    head.await_all(Kind.OFFER, 2)
    head.ask(3, images_of(2.0))  # it came back from another encoder
    assert [offer.item for offer, _ in head.await_all(Kind.OFFER, 3)] == [5, 6, 3]
    for number in (3, 5):
        head.link.send(Header(Kind.FAILED, number))  # canceled: there is room for another
    assert head.await_all(Kind.OFFER, 4)[-1][0].item == 7
    head.grant(5, 0, 16, (0, 0))  # for an item that is forgotten
    head.grant(6, 0, 16, (1, 0))
    assert head.await_all(Kind.DATA, 1)[0][0].item == 6
    head.close()


@pytest.mark.parametrize('span, words', [(80, 'bytes 0 to 80'), (32, r'in 1 block\(s\) of 16')])
def test_a_credit_that_cannot_be_ends_the_link(span: int, words: str) -> None:
    head = Head().start()
    head.ask(0, images_of(1.0))
    head.await_all(Kind.OFFER, 1)
    head.grant(0, 0, span, (0, 0))
    head.wait_for(lambda: bool(head.ended) and bool(head.reopened))
    assert any(
        re.search(f'the connection to head rank 0 is lost: .*{words}', line) for line in head.log
    )
    assert head.close()['lost'] == 0


def test_every_request_is_answered_and_an_exception_is_logged_once() -> None:
    head = Head().start()
    for number in range(3):
        head.ask(number, images_of(7.0))
    head.ask(3, images_of(1.0))
    head.link.send(Header(Kind.FAILED, 3))  # given up, perhaps before it was encoded
    head.wait_for(lambda: len(head.of(Kind.FAILED)) + len(head.of(Kind.OFFER)) == 4)
    texts = [line for line in head.log if 'encoding an item raised' in line]
    assert len(texts) == 1 and 'ZeroDivisionError: no such tile' in texts[0]
    assert 'Traceback' in texts[0]
    assert head.close()['failed'] == 3
