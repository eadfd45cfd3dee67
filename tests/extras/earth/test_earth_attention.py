"""Chunks of queries, masks, and the explicit form of old versions of PyTorch."""

from __future__ import annotations

import pytest
import torch
from earth_states import waves

from mapsage.models.backbones import attention


@pytest.mark.parametrize('fused', [True, False])
def test_chunks_change_neither_output_nor_gradients(
    monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    if not fused:
        monkeypatch.setattr(attention, '_fused_attention', None)
    valid = waves((2, 50)) > -0.3

    def run(limit: int) -> list:
        monkeypatch.setattr(attention, 'SCORE_BYTES', limit)
        inputs = [waves((2, 3, 50, 8), seed).requires_grad_() for seed in range(3)]
        output = attention.attend(*inputs, valid)
        (output * waves(output.shape, 5)).sum().backward()
        return [output.detach(), *(tensor.grad for tensor in inputs)]

    # 4 bytes * 2 images * 3 heads * 50 keys = 1200 bytes for each query: chunks of 7.
    whole, chunked = run(1 << 30), run(7 * 1200)
    for one, other in zip(whole, chunked):
        assert float((one - other).abs().max()) < 1e-6
    assert float(whole[2].abs().max()) > 0.01


def test_chunks_bound_the_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, 'SCORE_BYTES', 7 * 1200)
    sizes = []
    run = attention._attend
    monkeypatch.setattr(
        attention,
        '_attend',
        lambda query, *rest: (sizes.append(query.shape[2]), run(query, *rest))[1],
    )
    with torch.no_grad():
        attention.attend(*(waves((2, 3, 50, 8), seed) for seed in range(3)))
    assert sizes == [7] * 7 + [1]


def test_masked_tokens_have_no_influence(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (waves((1, 2, 9, 8), seed) for seed in range(3))
    valid = torch.arange(9)[None] < 6
    alone = attention.attend(query[:, :, :6], key[:, :, :6], value[:, :, :6])
    masked = attention.attend(query, key, value, valid)
    assert float((masked[:, :, :6] - alone).abs().max()) < 1e-6
    monkeypatch.setattr(attention, '_fused_attention', None)
    assert float((attention.attend(query, key, value, valid) - masked).abs().max()) < 1e-6


def test_a_sample_without_valid_tokens_is_finite() -> None:
    valid = attention.attend_to_any(torch.tensor([[False, False], [False, True]]))
    assert valid.tolist() == [[True, True], [False, True]]
