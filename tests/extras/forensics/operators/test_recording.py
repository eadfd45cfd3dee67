"""Recording a step without its products lists the operators of the computed step."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from mapsage.extras.forensics.operators.recording import OperatorRecorder, WithoutDraws, record


class Segmentor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU6())
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        features = self.stem(image)
        tokens = features.flatten(2).transpose(1, 2)
        tokens, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        logits = self.head(features + tokens.transpose(1, 2).reshape_as(features))
        return functional.interpolate(logits, scale_factor=2, mode='bilinear')


def training_step() -> None:
    torch.manual_seed(0)
    model, image = Segmentor(), torch.randn(2, 3, 16, 16)
    labels = torch.randint(0, 4, (2, 16, 16))
    loss = functional.cross_entropy(model(image), labels, reduction='none')
    (loss.sum() / max((labels != 3).sum().item(), 1)).backward()


def test_products_that_return_zeros_change_no_operator() -> None:
    computed = OperatorRecorder(skip_products=False)
    with computed:
        training_step()
    skipped = record(training_step)
    assert skipped == computed.recording
    assert skipped.uses['convolution_backward'].calls == 2 and skipped.flops > 0


def test_products_are_not_computed() -> None:
    results = []
    record(lambda: results.append(torch.ones(3, 4) @ torch.ones(4, 5)))
    assert results[0].shape == (3, 5) and not results[0].any()


def test_views_and_reads_move_nothing() -> None:
    uses = record(lambda: torch.ones(4, 4).transpose(0, 1).sum().item()).uses
    assert not uses['transpose.int'].computes and not uses['transpose.int'].moved_bytes
    assert not uses['_local_scalar_dense'].computes
    assert uses['sum'].moved_bytes == 4 * 16 + 4


def test_weights_are_not_drawn() -> None:
    with WithoutDraws():
        layer = nn.Linear(3, 3)
        nn.init.trunc_normal_(layer.weight)
    assert not layer.weight.any()
