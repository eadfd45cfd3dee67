"""The source that every other source is compared with."""

from __future__ import annotations

import pytest
import torch

from mapsage.extras.streaming import Item, Local


def item(number: int) -> Item:
    return Item(number, ((number, (1, 2)),), torch.full((1, 3, 2, 2), float(number)))


def test_local_features_are_those_of_the_encoder_without_autograd() -> None:
    weight = torch.ones(1, requires_grad=True)
    calls = []

    def encode(images: torch.Tensor) -> list:
        calls.append(float(images[0, 0, 0, 0]))
        return [images * weight, images.sum(1, keepdim=True)]

    source = Local(encode)  # type: ignore[arg-type]
    assert source.ahead == 0 and source.needs_images
    for number in range(3):
        source.request(item(number))
        assert calls == list(range(number))  # nothing is encoded before it is needed
        first, second = source.features(item(number))
        assert not first.requires_grad and torch.equal(first, item(number).images)
        assert torch.equal(second, torch.full((1, 1, 2, 2), 3.0 * number))
    assert source.report() == {}
    source.close()
    source.close()


def test_features_that_were_not_requested_are_an_error() -> None:
    source = Local(lambda images: (images,))
    source.request(item(0))
    with pytest.raises(ValueError):
        source.features(item(1))
    source.features(item(0))
    with pytest.raises(ValueError):
        source.features(item(0))
