"""The 16-bit copies of frozen blocks, and what a step of DINOv3 dispatches, counted."""

from __future__ import annotations

import copy
import pickle
import sys
from typing import Any, Dict, Iterator, List, Tuple

import pytest
import torch
from support import ROOT
from torch import nn

from mapsage.distributed.wrappers.memory_layout import put_channels_last
from mapsage.models import DINOv3ViT
from mapsage.models.backbones import dinov3_blocks, rope
from mapsage.models.backbones.dinov3_blocks import autocast_dtype

if not hasattr(torch, 'get_autocast_dtype'):
    pytest.skip('the state of autocast cannot be read before torch 2.4', allow_module_level=True)

sys.path.append(str(ROOT / 'tools' / 'benchmarks'))
from step_counts import StepCount  # noqa: E402

ARCH = dict(embed_dims=64, num_layers=4, num_heads=2, feedforward_channels=96)
IMAGE = torch.rand(2, 3, 64, 96, generator=torch.Generator().manual_seed(1)) * 255


def build(**arguments: Any) -> DINOv3ViT:
    torch.manual_seed(0)
    model = DINOv3ViT(dict(ARCH), **arguments)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def in_16_bits(model: nn.Module) -> List[torch.Tensor]:
    with torch.autocast('cpu', torch.bfloat16):
        return list(model(IMAGE))


def equal(first: List[torch.Tensor], second: List[torch.Tensor]) -> bool:
    return all(torch.equal(*maps) for maps in zip(first, second))


def test_the_copies_give_the_bits_of_autocast() -> None:
    with torch.no_grad():
        expected = in_16_bits(build())
    frozen = build(frozen=True)
    assert equal(in_16_bits(frozen), expected) and frozen._copies
    assert equal(list(frozen(IMAGE)), list(build()(IMAGE))) and not frozen._copies


def test_only_frozen_blocks_are_copied() -> None:
    model = build(frozen_stages=2)
    in_16_bits(model)
    assert set(model._copies) == {'patch_embed', 'blocks.0', 'blocks.1', 'prefix'}
    assert all(value.dtype == torch.float32 for value in model.state_dict().values())
    assert set(model.state_dict()) == set(build().state_dict())


@pytest.mark.parametrize('change', ['load', 'write', 'move', 'replace'])
def test_the_copies_follow_the_weights(change: str) -> None:
    model, other = build(frozen=True), build(frozen=True)
    before = in_16_bits(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    state = {key: value.clone() for key, value in other.state_dict().items()}
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if change == 'write':
                parameter.copy_(state[key])
            elif change == 'replace':
                parameter.data = state[key]
    if change == 'load':
        model.load_state_dict(state)
    elif change == 'move':
        model._apply(lambda tensor: tensor.mul(0.5) if tensor.is_floating_point() else tensor)
    after = in_16_bits(model)
    assert not equal(before, after)
    if change != 'move':
        assert equal(after, in_16_bits(other))


def test_weights_that_are_trained_again_get_gradients() -> None:
    model = build(frozen=True)
    in_16_bits(model)
    model.requires_grad_(True)
    # Only the first block counts as frozen for the gradient now.
    model.frozen, model.frozen_stages = False, -1
    sum(output.float().sum() for output in in_16_bits(model)).backward()
    assert all(parameter.grad is not None for parameter in model.blocks.parameters())


def test_copies_and_files_of_a_model_do_not_hold_the_copies() -> None:
    model = build(frozen=True)
    expected = in_16_bits(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not twin._copies
        assert equal(in_16_bits(twin), expected)


@pytest.fixture
def as_on_a_card(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (rope, dinov3_blocks):
        monkeypatch.setattr(module, 'joins_kernels', lambda x: not torch.is_grad_enabled())
    yield


class Head(nn.Module):
    """Reads all maps as a decode head does: convolutions with trained weights."""

    def __init__(self, backbone: DINOv3ViT) -> None:
        super().__init__()
        self.backbone = backbone
        self.convs = nn.ModuleList(nn.Conv2d(64, 8, 3, padding=1) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(conv(level).float().mean() for conv, level in zip(self.convs, self.backbone(x)))


def count(model: nn.Module) -> StepCount:
    backbone: Any = model.backbone
    for _ in range(2):
        counts = StepCount(backbone.parameters() if backbone.frozen else ())
        with counts:
            with torch.autocast('cpu', torch.bfloat16):
                loss = model(IMAGE)
            loss.backward()
    return counts


def test_a_frozen_step_casts_no_frozen_weight_and_copies_no_layout(as_on_a_card: None) -> None:
    model = put_channels_last(Head(build(frozen=True, normalization=None)))
    counts = count(model)
    assert (counts.frozen_casts, counts.copies) == (0, 0)
    assert all(
        level.is_contiguous(memory_format=torch.channels_last) and level.dtype == torch.bfloat16
        for level in in_16_bits(model.backbone)
    )
    # Norm, cast, matrix, cosine, two halves, attention, matrix and sum; norm, cast, matrix, GELU,
    # matrix, sum. Before, a block had 37.
    deep = dict(ARCH, num_layers=8)
    longer = Head(DINOv3ViT(deep, frozen=True, normalization=None, out_indices=(1, 3, 5, 7)))
    added = sum(count(put_channels_last(longer)).calls.values()) - sum(counts.calls.values())
    assert added == 4 * 15


def test_the_joined_kernels_differ_in_rounding_alone(as_on_a_card: None) -> None:
    model = build(frozen=True)
    joined = model(IMAGE)
    for name, value in _plain(model).items():
        assert torch.allclose(joined[name], value, rtol=1e-3, atol=1e-3)
    attention: Tuple[torch.Tensor, ...] = rope.RotaryPositions(8, 1)(2, 3)
    x = torch.randn(2, 7, 8).bfloat16()
    with torch.no_grad():
        turned = rope.rotate(x, *attention)
    with torch.enable_grad():
        expected = rope.rotate(x, *attention)
    assert turned.dtype == x.dtype
    assert torch.allclose(turned.float(), expected.float(), rtol=2**-7, atol=1e-6)


def _plain(model: DINOv3ViT) -> Dict[int, torch.Tensor]:
    model.requires_grad_(True)
    model.frozen, model.frozen_stages = False, -1
    return dict(enumerate(model(IMAGE)))


def test_autocast_is_read_per_type_of_device() -> None:
    assert autocast_dtype('cpu') is None and autocast_dtype('meta') is None
    with torch.autocast('cpu', torch.bfloat16):
        assert autocast_dtype('cpu') == torch.bfloat16
