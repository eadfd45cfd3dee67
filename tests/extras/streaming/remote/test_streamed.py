"""Streamed features with an encoder in the same process, over a real link."""

from __future__ import annotations

import threading
from typing import Any, Tuple

import pytest
import torch
from link_pairs import open_pair

from mapsage.extras.streaming.remote.sender import serve
from mapsage.extras.streaming.remote.state import State
from mapsage.extras.streaming.remote.streamed import Streamed
from mapsage.extras.streaming.source import Item, StreamingError

CPU = torch.device('cpu')


def encode(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    return images / 7, images.flip(-1).sqrt()[..., ::2].contiguous()


def refuse(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    raise ValueError('no such tile')


def item(number: int) -> Item:
    generator = torch.Generator().manual_seed(number)
    return Item(number, (), torch.randint(0, 256, (2, 3, 8, 9), generator=generator).float())


class Job:
    """A head, and an encoder that serves it until the head's source is closed."""

    def __init__(self, remote: Any = encode, **settings: Any) -> None:
        link, theirs = open_pair()
        self._encoder = threading.Thread(target=serve, args=([theirs], remote, CPU), daemon=True)
        self._encoder.start()
        self.source = Streamed([link], CPU, block_bytes=1000, **settings)

    def __enter__(self) -> Streamed:
        return self.source

    def __exit__(self, *error: Any) -> None:
        self.source.close()  # raises if a block was not given back
        self.source.close()
        self._encoder.join(30)
        assert not self._encoder.is_alive()


def check(source: Streamed, number: int) -> None:
    features = source.features(item(number))
    assert all(torch.equal(got, right) for got, right in zip(features, encode(item(number).images)))


def test_features_have_the_bits_of_the_encoder() -> None:
    with Job() as source:
        assert source.ahead == 2
        for number in (0, 1, 5):
            source.request(item(number))
        for number in (0, 1, 5):
            check(source, number)
        report = source.report()
        assert report['items from encoder rank 1'] == 3
        assert not {'failovers', 'local', 'lost', 'duplicates'} & set(report)
        assert set(source.report()) == {'waited'}


def test_an_item_that_no_encoder_can_encode_is_encoded_locally_or_fails() -> None:
    with Job(refuse, encode=encode) as source:
        source.request(item(0))
        check(source, 0)
        report = source.report()
        assert (report['local'], report['failovers']) == (1, 1)
    with Job(refuse) as source:
        source.request(item(0))
        with pytest.raises(
            StreamingError,
            match='no encoder is left; encoder rank 1: encoding raised ValueError: no such tile',
        ):
            source.features(item(0))
    with Job(refuse, encode=refuse) as source:
        source.request(item(0))
        with pytest.raises(StreamingError, match='encoding it locally raised ValueError: no such'):
            source.features(item(0))


def test_items_are_requested_once_and_taken_once() -> None:
    with Job() as source:
        source.request(item(1))
        with pytest.raises(ValueError, match='item 1 was requested after item 1'):
            source.request(item(1))
        with pytest.raises(StreamingError, match='item 0 was not requested, or its features were'):
            source.features(item(0))
        check(source, 1)
        with pytest.raises(StreamingError, match='item 1 was not requested, or its features were'):
            source.features(item(1))


def test_an_item_that_was_followed_is_released_and_one_on_its_way_is_not() -> None:
    with Job() as source:
        with source._inbox._changed:  # nothing can arrive meanwhile
            source.request(item(0))
            with pytest.raises(StreamingError, match='item 0 is NEW, expected READY or FAILED'):
                source.release(0)
        remote = source.arriving(0)
        while remote.state != State.READY:
            remote.wait(5)
        source.release(0)
        assert remote.state == State.CONSUMED
        source.request(item(1))
        source.drop(1)
        source.drop(1)
        source.request(item(2))
        check(source, 2)


@pytest.mark.parametrize(
    ('settings', 'message'),
    [
        (dict(timeout=0), 'timeout=0, expected a positive'),
        (dict(block_bytes=10, pool_bytes=9), 'pool_bytes=9, block_bytes=10'),
        (dict(wire=torch.int64), 'wire=torch.int64, expected None or'),
        (dict(ahead=-1), 'ahead=-1, expected'),
        (dict(ahead=True), 'ahead=True, expected'),
    ],
)
def test_settings_that_cannot_be_used(settings: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Streamed([None], CPU, **settings)  # type: ignore[list-item]
    with pytest.raises(ValueError, match='expected a link'):
        Streamed([], CPU)
