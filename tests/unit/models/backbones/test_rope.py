"""Rotary positions and attention of DINOv3."""

from __future__ import annotations

import math

import pytest
import torch

from mapsage.models.backbones import rope
from mapsage.models.backbones.dinov3_weights import Arch


def test_positions_are_those_of_the_formula() -> None:
    sine, cosine = rope.RotaryPositions(8, 2)(3, 5)
    assert sine.dtype == torch.float32 and sine.shape == cosine.shape == (17, 8)
    assert not sine[:2].any() and (cosine[:2] == 1).all()
    for row, column, patch in ((0, 0, 0), (1, 3, 8), (2, 4, 14)):
        y, x = 2 * (row + 0.5) / 3 - 1, 2 * (column + 0.5) / 5 - 1
        angles = [2 * math.pi * place / 100 ** (k / 2) for place in (y, x) for k in (0, 1)] * 2
        expected = torch.tensor(angles)
        torch.testing.assert_allclose(sine[2 + patch], expected.sin())
        torch.testing.assert_allclose(cosine[2 + patch], expected.cos())


def test_rotation_leaves_the_prefix_and_lengths() -> None:
    x = torch.randn(1, 2, 5 + 6, 8)
    turned = rope.rotate(x, *rope.RotaryPositions(8, 5)(2, 3))
    assert torch.equal(turned[:, :, :5], x[:, :, :5])
    assert not torch.isclose(turned[:, :, 5:], x[:, :, 5:]).all(-1).any()
    torch.testing.assert_allclose(turned.norm(dim=-1), x.norm(dim=-1))
    half = rope.rotate(x.bfloat16(), *rope.RotaryPositions(8, 5)(2, 3))
    assert half.dtype == torch.bfloat16


def test_half_precision_keeps_positions_in_float32() -> None:
    assert rope.RotaryPositions(8, 5).half()(2, 3)[0].dtype == torch.float32


@pytest.mark.skipif(rope._fused_attention is None, reason='this torch has no fused attention')
def test_explicit_attention_equals_the_fused() -> None:
    query, key, value = torch.randn(3, 2, 4, 11, 8).unbind(0)
    assert rope._fused_attention is not None
    torch.testing.assert_allclose(
        rope.explicit_attention(query, key, value), rope._fused_attention(query, key, value)
    )


def test_explicit_attention_by_hand() -> None:
    query, key = torch.tensor([[[[2.0, 0.0, 0.0, 0.0]]]]), torch.eye(4)[None, None, :2]
    value = torch.tensor([[[[1.0], [0.0]]]])
    share = math.exp(2 / 2) / (math.exp(2 / 2) + 1)
    assert rope.explicit_attention(query, key, value).item() == pytest.approx(share)


@pytest.mark.parametrize('fused', [True, False])
def test_a_mask_of_the_first_tokens(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal to a mask of all tokens by all, whose other rows allow everything."""
    if not fused:
        monkeypatch.setattr(rope, '_fused_attention', None)
    torch.manual_seed(0)
    attention = rope.RotaryAttention(Arch(16, 1, 2, 16))
    x, allowed = torch.randn(2, 9, 16), torch.rand(2, 3, 9) > 0.5
    allowed[..., 0] = True
    sine, cosine = rope.RotaryPositions(8, 3)(2, 3)
    whole = torch.ones(2, 9, 9, dtype=torch.bool)
    whole[:, :3] = allowed
    qkv = torch.nn.functional.linear(x, attention.qkv.weight).view(2, 9, 3, 2, 8)
    query, key, value = qkv.permute(2, 0, 3, 1, 4)
    query, key = (rope.rotate(each, sine, cosine) for each in (query, key))
    logits = (query @ key.transpose(-2, -1) / math.sqrt(8)).masked_fill(~whole[:, None], -1e9)
    expected = attention.proj((logits.softmax(-1) @ value).transpose(1, 2).reshape(2, 9, 16))
    torch.testing.assert_allclose(attention(x, sine, cosine, allowed), expected)
    assert not torch.allclose(attention(x, sine, cosine), expected, atol=1e-3)
