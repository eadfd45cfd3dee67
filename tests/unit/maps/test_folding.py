"""Batch normalizations are folded into convolutions where the output stays the same."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest
import torch
from mmcv.cnn import ConvModule
from support import ROOT
from torch import nn

from mapsage.commands import cli
from mapsage.commands.cli import build_model
from mapsage.datasets.band_preprocessor import BandDataPreProcessor
from mapsage.maps.folding import choose_folds, fold_batch_norms
from mapsage.maps.predictor import WindowPredictor

IMAGE = torch.from_numpy(np.random.RandomState(1).randn(2, 3, 16, 16).astype(np.float32))


def trained_norm(channels: int, **options: Any) -> nn.BatchNorm2d:
    """Return a normalization with statistics and weights as after a training."""
    norm = nn.BatchNorm2d(channels, **options)
    random = np.random.RandomState(channels)
    for tensor, low, high in (
        (norm.running_mean, -1, 1),
        (norm.running_var, 0.2, 3),
        (norm.weight, 0.5, 2),
        (norm.bias, -1, 1),
    ):
        if tensor is not None:
            tensor.data = torch.from_numpy(random.uniform(low, high, channels).astype(np.float32))
    return norm


def fold(model: nn.Module) -> bool:
    """Fold a model's normalizations, and check that its output stays the same within rounding."""
    model.eval()
    with torch.no_grad():
        before, modules = model(IMAGE), dict(model.named_modules())
        folding = choose_folds(model, lambda: model(IMAGE))
        assert dict(model.named_modules()) == modules
        fold_batch_norms(model, folding.folded)
        torch.testing.assert_close(model(IMAGE), before, rtol=1e-4, atol=1e-5)
    return bool(folding.folded)


def norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize(
    'conv, options',
    [
        (nn.Conv2d(3, 8, 3, padding=1), {}),
        (nn.Conv2d(3, 8, 3, bias=False), {}),
        (nn.Conv2d(3, 9, 3, groups=3, stride=2), {}),
        (nn.Conv2d(3, 8, 1), dict(affine=False)),
    ],
    ids=['bias', 'no bias', 'groups', 'not affine'],
)
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


class Block(nn.Module):
    """A pair that is folded, and neighbors that a subclass calls in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), trained_norm(8))
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.norm = trained_norm(8)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(image))

    def second(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(features))


class Between(Block):
    def second(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(features).relu())


class BetweenInPlace(Block):
    def second(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(features).relu_())


class HardlyBetween(Block):
    """A function that changes nothing on the trial window, but may on an image."""

    def second(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(features).clamp(max=1e4))


class ConvTwice(Block):
    def second(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.conv(self.conv(features)))


class NormTwice(Block):
    def second(self, features: torch.Tensor) -> torch.Tensor:
        return self.norm(self.norm(self.conv(features)))


class Reversed(Block):
    def second(self, features: torch.Tensor) -> torch.Tensor:
        return self.conv(self.norm(features))


class Hooked(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv.register_forward_hook(lambda conv, inputs, output: output.clamp(max=1e4))


class Trained(Block):
    """A normalization that uses the statistics of the batch, also in evaluation."""

    def train(self, mode: bool = True) -> Block:
        super().train(mode)
        self.norm.train()
        return self


class Standardized(nn.Conv2d):
    """Uses its weights in a form of its own, as mmcv's ConvAWS does."""

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        weight = self.weight / self.weight.std((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(image, weight, self.bias, padding=1)


class OwnWeights(Block):
    def __init__(self) -> None:
        super().__init__()
        self.conv = Standardized(8, 8, 3)


class WeightNorm(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.weight_norm(self.conv)


@pytest.mark.parametrize(
    'kind',
    [
        Between,
        BetweenInPlace,
        HardlyBetween,
        ConvTwice,
        NormTwice,
        Reversed,
        Hooked,
        Trained,
        OwnWeights,
        WeightNorm,
    ],
)
def test_only_neighbors_that_follow_each_other_are_folded(kind: Any) -> None:
    model = kind()
    assert fold(model) and norms(model.first) == 0 and isinstance(model.norm, nn.BatchNorm2d)


class AlsoAdded(Block):
    """Another layer uses the output of the convolution, too little for a bound to show."""

    def second(self, features: torch.Tensor) -> torch.Tensor:
        output = self.conv(features)
        return self.norm(output) + 1e-9 * output


class AlsoCounted(Block):
    def second(self, features: torch.Tensor) -> torch.Tensor:
        output = self.conv(features)
        return self.norm(output) + (output > 0).float()


class Infinite(Block):
    def second(self, features: torch.Tensor) -> torch.Tensor:
        return super().second(features) * float('nan')


@pytest.mark.parametrize('kind', [AlsoAdded, AlsoCounted, Infinite])
def test_without_a_proof_the_whole_model_is_left_as_it_was(kind: Any) -> None:
    model = kind().eval()
    with torch.no_grad():
        folding = choose_folds(model, lambda: model(IMAGE))
    assert folding == ([], ['norm', 'first.1']) or folding == ([], ['first.1', 'norm'])


@pytest.mark.parametrize('mean, std', [(0.2, 0.1), (0.1, 0.05), (110, 50), (1500, 900)])
def test_the_trial_window_has_the_units_of_the_model(mean: float, std: float) -> None:
    """mmcv registers convolution and norm side by side, whatever the order in which they run."""

    class Model(nn.Module):
        num_classes = 3

        def __init__(self) -> None:
            super().__init__()
            self.data_preprocessor = BandDataPreProcessor([mean] * 3, [std] * 3)
            self.blocks = nn.Sequential(
                *(
                    ConvModule(
                        3, 3, 3, padding=1, norm_cfg=dict(type='BN'), order=('conv', 'act', 'norm')
                    )
                    for _ in range(4)
                )
            )
            for module in self.modules():
                if isinstance(module, nn.BatchNorm2d):
                    module.load_state_dict(trained_norm(3).state_dict())

        def encode_decode(self, inputs: torch.Tensor, metas: List[dict]) -> torch.Tensor:
            self.seen = inputs
            return self.blocks(inputs)

    model = Model()
    predictor = WindowPredictor(model, torch.device('cpu'), (32, 32), 0, 1)
    assert predictor.choose_folds(bands=3).folded == []
    assert abs(model.seen.mean()) < 0.1 and abs(model.seen.std() - 1) < 0.1


@pytest.mark.parametrize(
    'model',
    [
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8)),
        nn.Sequential(nn.ConvTranspose2d(3, 8, 3), trained_norm(8)),
        nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, track_running_stats=False)),
    ],
    ids=['group norm', 'transposed', 'statistics of the batch'],
)
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
        np.random.RandomState(3).randint(0, 256, (3, 3, 64, 64)).astype(np.uint8)
    )
    before = predictor(windows)
    predictor.fold_batch_norms(predictor.choose_folds(bands=3).folded)
    assert norms(model) == 0
    np.testing.assert_allclose(predictor(windows), before, atol=1e-4)
