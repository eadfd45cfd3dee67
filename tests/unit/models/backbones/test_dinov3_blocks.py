"""The transformer block of DINOv3."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mapsage.models.backbones.dinov3_blocks import Block, GatedMlp, Mlp
from mapsage.models.backbones.dinov3_weights import Arch
from mapsage.models.backbones.rope import RotaryPositions

ARCH = Arch(embed_dims=8, num_layers=1, num_heads=2, feedforward_channels=12)


def test_the_first_layer_of_a_gated_mlp_gates_the_second() -> None:
    x, gated = torch.randn(2, 3, 8), GatedMlp(ARCH)
    torch.testing.assert_allclose(gated(x), gated.w3(F.silu(gated.w1(x)) * gated.w2(x)))
    assert isinstance(Block(ARCH).mlp, Mlp)
    assert isinstance(Block(ARCH._replace(gated_mlp=True)).mlp, GatedMlp)


def test_branches_are_drawn_in_training_only_and_keep_their_mean() -> None:
    torch.manual_seed(0)
    block, x = Block(ARCH, drop_path=0.25), torch.randn(4000, 1, 8)
    factors = block.draw_drop_path(x)
    assert factors is not None and factors.shape == (2, 4000, 1, 1)
    torch.testing.assert_allclose(factors.unique(), torch.tensor([0.0, 4 / 3]))
    assert abs(float(factors.mean()) - 1) < 0.05
    assert block.eval().draw_drop_path(x) is None and Block(ARCH).draw_drop_path(x) is None


def test_a_sample_without_its_branches_passes_unchanged() -> None:
    x, block = torch.randn(2, 5 + 6, 8), Block(ARCH)
    torch.nn.init.ones_(block.gamma_1)
    kept = torch.tensor([0.0, 1.0]).view(1, 2, 1, 1).expand(2, 2, 1, 1)
    out = block(x, *RotaryPositions(4, 5)(2, 3), kept)
    assert torch.equal(out[0], x[0]) and not torch.isclose(out[1], x[1]).any(-1).all()
