"""The gate before a frozen encoder: which encoders it takes, and what it answers with."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from torch import nn

from mapsage.extras.streaming import FeatureSourceError, Item, Prefetched, StreamingError
from mapsage.extras.streaming.encoder_gate import EncoderGate, check_frozen


@pytest.mark.parametrize(
    'layer, refused',
    [
        (nn.BatchNorm2d(3), True),
        (nn.Dropout(0.1), True),
        (nn.Dropout2d(0.1), True),
        (nn.MultiheadAttention(3, 1, dropout=0.1), True),
        (nn.MultiheadAttention(3, 1), False),
        (nn.Dropout(0.0), False),
        (nn.GroupNorm(1, 3), False),
    ],
)
def test_an_encoder_that_is_not_the_same_in_every_step_is_refused(
    layer: nn.Module, refused: bool
) -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 3, 1), layer).requires_grad_(False)
    if not refused:
        check_frozen(encoder)
        return
    with pytest.raises(FeatureSourceError, match=f'1 .{type(layer).__name__}. of model.backbone'):
        check_frozen(encoder)


class Levels(nn.Module):
    """An encoder whose ``train`` puts statistics into training mode for a moment, as ResNet's."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3).requires_grad_(False)

    def train(self, mode: bool = True) -> Levels:
        super().train(mode)
        time.sleep(0.001)  # long enough for another thread
        self.norm.eval()
        return self

    def forward(self, images: torch.Tensor) -> Any:
        return [self.norm(images)]


def test_a_model_that_is_put_into_training_leaves_the_encoder_alone() -> None:
    encoder = Levels().eval()
    model = nn.Sequential(encoder)
    gate = EncoderGate(encoder)
    images = torch.arange(24.0).view(2, 3, 2, 2)
    expected, before = encoder(images)[0], copy.deepcopy(encoder.state_dict())
    source = Prefetched(gate.encode, depth=8)
    for number in range(200):
        source.request(Item(number, (), images))
        model.train()
        assert torch.equal(source.features(Item(number, (), images))[0], expected)
    source.close()
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    gate.remove()
    assert not {'forward', 'train'} & set(encoder.__dict__)


def test_features_go_with_one_call_and_its_images() -> None:
    encoder = Levels()
    gate = EncoderGate(encoder)
    images = torch.ones(2, 3, 4, 4)
    gate.open(lambda: (images * 2,), images.shape)
    assert torch.equal(encoder(images)[0], images * 2) and encoder(images)
    with pytest.raises(StreamingError, match='a second time in a step, with other images'):
        encoder(torch.ones(2, 3, 8, 8))
    gate.open(lambda: (images * 2,), images.shape)
    with pytest.raises(StreamingError, match=r'images \(2, 3, 8, 8\)'):
        encoder(torch.ones(2, 3, 8, 8))
    gate.close()
    assert len(encoder(torch.ones(1, 3, 2, 2))[0]) == 1


@pytest.mark.parametrize(
    'answer', [dict(a=torch.ones(1, 1, 1, 1)), torch.ones(1, 1, 1, 1), (), None]
)
def test_a_backbone_that_gives_no_levels_is_refused(answer: Any) -> None:
    encoder = nn.Identity()
    encoder.forward = lambda images: answer  # type: ignore[method-assign]
    with pytest.raises(FeatureSourceError, match='returns a tuple of .N, C, H, W. tensors'):
        EncoderGate(encoder).encode(torch.ones(1, 3, 2, 2))


def test_features_are_fetched_once_a_step_and_only_when_needed() -> None:
    encoder = Levels()
    gate, images, fetched = EncoderGate(encoder), torch.ones(2, 3, 4, 4), []

    def fetch() -> Any:
        fetched.append(1)
        return (images * 2,)

    gate.open(fetch)
    assert not fetched
    assert encoder(images) is encoder(images) and len(fetched) == 1
    gate.open(fetch)
    encoder(images)
    assert len(fetched) == 2
    assert not torch.equal(gate.encode(images)[0], images * 2)  # the encoder itself
    gate.open(lambda: (images[:1],))
    with pytest.raises(StreamingError, match=r'those of \[1\] image\(s\)'):
        encoder(images)


def test_an_encoder_that_trains_is_refused_by_the_name_of_a_parameter() -> None:
    with pytest.raises(FeatureSourceError, match="2 parameter.s. of .* the first 'norm.weight'"):
        EncoderGate(Levels().requires_grad_(True))
