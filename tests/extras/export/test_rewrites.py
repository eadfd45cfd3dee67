"""Replacements during an export compute the same as the original operations."""

from __future__ import annotations

import pytest
import torch
from mask_models import ARCH, build, eomt_config
from torch.nn import functional

pytest.importorskip('onnxruntime')

from mapsage.extras.export.rewrites import attend, pool, rewritten  # noqa: E402
from mapsage.models.backbones import (
    attention,  # noqa: E402
    rope,  # noqa: E402
)


@pytest.mark.parametrize(
    'sides, size',
    [
        ((16, 16), 6),
        ((5, 7), (3, 2)),
        ((4, 9), (4, 1)),
        ((2, 2), 6),
        ((6, 6), (None, 2)),
        ((7, 3), 1),
    ],
)
def test_pooling_by_matrices_equals_adaptive_pooling(sides, size) -> None:
    x = torch.rand(2, 3, *sides, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(pool(x, size), functional.adaptive_avg_pool2d(x, size), atol=1e-6)


@pytest.mark.skipif(
    not hasattr(functional, 'scaled_dot_product_attention'),
    reason='this PyTorch has no fused attention to compare with',
)
@pytest.mark.parametrize('mask', [None, 'bool', 'float'])
def test_explicit_attention_equals_fused_attention(mask) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, count, 8) for count in (5, 7, 7))
    attn_mask = torch.rand(2, 1, 5, 7) if mask else None
    attn_mask = attn_mask > 0.3 if mask == 'bool' else attn_mask
    expected = functional.scaled_dot_product_attention(query, key, value, attn_mask)
    assert torch.allclose(attend(query, key, value, attn_mask), expected, atol=1e-6)


def test_replacements_are_undone_after_an_error(mmseg_scope) -> None:
    model = build(eomt_config(ARCH)).eval().backbone
    originals = (
        rope._fused_attention,
        functional.adaptive_avg_pool2d,
        torch.Tensor.amax,
        torch.Tensor.any,
    )
    image = torch.full((2, 3, 32, 32), 100.0)
    shapes = []
    with pytest.raises(KeyError):
        with rewritten(model, (image,), any_batch=True):
            shapes.append(image.shape)
            assert rope._fused_attention is None and attention._fused_attention is None
            raise KeyError
    assert (
        rope._fused_attention,
        functional.adaptive_avg_pool2d,
        torch.Tensor.amax,
        torch.Tensor.any,
    ) == originals
    assert 'forward' not in vars(model.rope)
    assert shapes == [(2, 3, 32, 32)] and isinstance(image.shape, torch.Size)
    assert image.size(1) == 3
    # The positions are not constant any more: another size works.
    with torch.no_grad():
        assert model(image[:, :, :16])[0].shape[2:] == (1, 2)
