"""Batch normalizations are folded into convolutions where the output stays the same."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support import ROOT
from torch import nn

from mapsage.commands import cli
from mapsage.commands.configs import build_model
from mapsage.maps.folding import fold_batch_norms
from mapsage.maps.predictor import WindowPredictor

IMAGE = torch.from_numpy(np.random.RandomState(1).randn(2, 3, 16, 16).astype(np.float32))


def trained_norm(channels: int, **options: Any) -> nn.BatchNorm2d:
    """Return a normalization with statistics and weights as after a training."""
    norm = nn.BatchNorm2d(channels, **options)
    random = np.random.RandomState(channels)
    for tensor, low, high in ((norm.running_mean, -1, 1), (norm.running_var, 0.2, 3),
                              (norm.weight, 0.5, 2), (norm.bias, -1, 1)):
        if tensor is not None:
            tensor.data = torch.from_numpy(
                random.uniform(low, high, channels).astype(np.float32))
    return norm


def fold(model: nn.Module) -> bool:
    """Fold a model's normalizations, and check that its output stays the same within rounding."""
    model.eval()
    with torch.no_grad():
        before = model(IMAGE)
        changed = fold_batch_norms(model, lambda: model(IMAGE))
        torch.testing.assert_close(model(IMAGE), before, rtol=1e-4, atol=1e-5)
    return changed


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize('conv, options', [
    (nn.Conv2d(3, 8, 3, padding=1), {}),
    (nn.Conv2d(3, 8, 3, bias=False), {}),
    (nn.Conv2d(3, 9, 3, groups=3, stride=2), {}),
    (nn.Conv2d(3, 8, 1), dict(affine=False)),
], ids=['bias', 'no bias', 'groups', 'not affine'])
def test_a_pair_becomes_a_convolution(conv: nn.Conv2d, options: Any) -> None:
    model = nn.Sequential(conv, trained_norm(conv.out_channels, **options), nn.ReLU())
    assert fold(model) and norms(model) == 0
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)


class Twice(nn.Module):
    """One convolution with a normalization, and the same without."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.block = nn.Sequential(self.conv, trained_norm(8))

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.block(image) + self.conv(image)


def test_a_convolution_that_is_also_used_without_a_normalization() -> None:
    model = Twice()
    assert fold(model) and norms(model) == 0


class Between(nn.Module):
    """Neighbors that do not follow each other: an activation is between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), trained_norm(8))
        self.conv = nn.Conv2d(8, 8, 3)
        self.norm = trained_norm(8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.first(image)).relu())


class Infinite(Between):
    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image) * float('nan')


def test_a_model_with_another_order_is_left_as_it_was() -> None:
    model = Between()
    before = dict(model.named_modules())
    assert not fold(model)
    assert dict(model.named_modules()) == before


def test_nan_is_no_proof() -> None:
    model = Infinite().eval()
    assert not fold_batch_norms(model, lambda: model(IMAGE)) and norms(model) == 2


@pytest.mark.parametrize('model', [
    nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)),
    nn.Sequential(nn.ConvTranspose2d(3, 8, 3), trained_norm(8)),
    nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)),
], ids=['group norm', 'transposed', 'statistics of the batch'])
def test_other_layers_are_not_folded(model: nn.Module) -> None:
    assert not fold(model)


def test_windows_of_the_demo_have_the_same_scores() -> None:
    config = ROOT / 'configs' / 'demo' / 'efficientnet_lite0_fpn_demo.py'
    torch.manual_seed(0)
    model = build_model(cli.load_config(cli.build_parser('').parse_args([str(config)]))).eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.load_state_dict(trained_norm(module.num_features).state_dict())
    predictor = WindowPredictor(model, torch.device('cpu'), (64, 64), 16, 2)
    windows = torch.from_numpy(
        np.random.RandomState(3).randint(0, 256, (3, 3, 64, 64)).astype(np.uint8))
    before = predictor(windows)
    assert predictor.fold_batch_norms(bands=3) and norms(model) == 0
    np.testing.assert_allclose(predictor(windows), before, atol=1e-4)
