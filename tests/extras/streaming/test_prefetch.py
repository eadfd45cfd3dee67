"""The bounded queue that encodes ahead, alone."""

from __future__ import annotations

import threading
from typing import Any, List, Tuple

import pytest
import torch

from mapsage.extras.streaming import Item, Prefetched, StreamingError


def item(number: int) -> Item:
    return Item(number, (), torch.full((2, 3, 4, 4), float(number)))


def double(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    return images * 2, images.sum((1, 2, 3), keepdim=True)


def queues() -> List[Any]:
    return [dict(), dict(flush=lambda: None)]  # an eager device, a lazy one


@pytest.mark.parametrize('settings', queues(), ids=['eager', 'lazy'])
def test_features_come_in_order_and_are_those_of_the_encoder(settings: Any) -> None:
    source = Prefetched(double, depth=3, **settings)
    for number in range(3):
        source.request(item(number))
    for number in range(20):
        source.request(item(number + 3))
        features = source.features(item(number))
        assert all(
            torch.equal(got, right) for got, right in zip(features, double(item(number).images))
        )
    source.close()
    source.close()


def test_it_encodes_while_the_head_computes() -> None:
    began = threading.Event()

    def encode(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        began.set()
        return double(images)

    source = Prefetched(encode)
    source.request(item(0))
    assert began.wait(60)  # nobody asked for the features yet
    source.features(item(0))
    source.close()


def test_a_lazy_device_runs_each_item_when_it_is_requested() -> None:
    recorded: List[torch.Tensor] = []
    recorded_when_run: List[int] = []

    def encode(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        recorded.append(images)
        return double(images)

    source = Prefetched(encode, flush=lambda: recorded_when_run.append(len(recorded)))
    source.request(item(0))
    source.request(item(1))
    assert recorded_when_run == [1, 2]
    source.close()


def test_autograd_stays_out_of_the_thread() -> None:
    weight = torch.ones(1, requires_grad=True)
    source = Prefetched(lambda images: (images * weight,))
    source.request(item(1))
    assert not source.features(item(1))[0].requires_grad
    source.close()


def test_an_encoder_that_raises_raises_where_its_item_is_needed_and_goes_on() -> None:
    def encode(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        if images[0, 0, 0, 0] == 1:
            raise ValueError('item 1 is odd')
        return double(images)

    source = Prefetched(encode)
    for number in range(3):
        source.request(item(number))
    source.features(item(0))
    with pytest.raises(ValueError, match='item 1 is odd'):
        source.features(item(1))
    assert torch.equal(source.features(item(2))[0], item(2).images * 2)
    source.close()


def test_a_hanging_encoder_is_an_error_that_says_which_item() -> None:
    release = threading.Event()

    def encode(images: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        release.wait(60)
        return double(images)

    source = Prefetched(encode, timeout=0.3)
    source.request(item(7))
    with pytest.raises(StreamingError, match='item 7 were not ready within 0.3 s'):
        source.features(item(7))
    release.set()
    source.close()


def test_items_out_of_order_are_an_error() -> None:
    source = Prefetched(double)
    source.request(item(0))
    source.request(item(1))
    with pytest.raises(StreamingError, match='item 1 was asked for and item 0 is next'):
        source.features(item(1))
    source.close()


@pytest.mark.parametrize(
    'settings',
    [dict(depth=0), dict(depth=1.5), dict(depth=True), dict(timeout=0), dict(timeout=-1)],
)
def test_settings_out_of_range(settings: Any) -> None:
    with pytest.raises(ValueError, match='expected'):
        Prefetched(double, **settings)
