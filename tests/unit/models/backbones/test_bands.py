"""Pretrained backbones for images with other bands than red, green, blue."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict, Tuple

import pytest
import torch
from mmengine.registry import MODELS
from mmengine.runner.checkpoint import load_checkpoint
from torch import nn

from mapsage.models.backbones.bands import adapt_bands

PLAIN = dict(embed_dims=16, num_layers=2, num_heads=2, feedforward_channels=24)
STAGES = dict(hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 2, 1])


def vit(path: Path, **arguments: Any) -> nn.Module:
    """A DINOv3ViT with weights in the format of the hub, without the normalization."""
    path = path / 'vit_lvd1689m.pth'
    if not path.exists():
        torch.manual_seed(0)
        state = MODELS.build(dict(type='DINOv3ViT', arch=PLAIN)).state_dict()
        state = {
            key.replace('register_tokens', 'reg_token').replace(
                'patch_embed.', 'patch_embed.proj.'
            ): value
            for key, value in state.items()
            if not key.startswith(('pixel', 'rope'))
        }
        torch.save(state, str(path))
    return MODELS.build(
        dict(
            type='DINOv3ViT',
            arch=PLAIN,
            normalization=None,
            init_cfg=dict(type='Pretrained', checkpoint=str(path)),
            **arguments,
        )
    )


def convnext(path: Path, **arguments: Any) -> nn.Module:
    transformers = pytest.importorskip('transformers', reason='no transformers for this Python')
    if not (path / 'config.json').exists():
        torch.manual_seed(0)
        transformers.DINOv3ConvNextModel(
            transformers.DINOv3ConvNextConfig(**STAGES)
        ).save_pretrained(str(path))
    return MODELS.build(
        dict(
            type='DINOv3ConvNeXt',
            arch=STAGES,
            init_cfg=dict(type='Pretrained', checkpoint=str(path)),
            **arguments,
        )
    )


def lite(path: Path, **arguments: Any) -> nn.Module:
    return MODELS.build(
        dict(
            type='EfficientNetLite',
            out_indices=(0, 1),
            init_cfg=dict(type='Pretrained', checkpoint='efficientnet_lite0'),
            **arguments,
        )
    )


def features(model: nn.Module, normalized: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    if normalized.shape[1] == 3 and hasattr(model, 'model'):  # DINOv3ConvNeXt, RGB in 0..255
        normalized = normalized * model.pixel_std + model.pixel_mean
    with torch.no_grad():
        return model.eval()(normalized)


@pytest.mark.parametrize('build', [vit, convnext, lite])
@pytest.mark.parametrize(
    'channels, bands',
    [
        (4, None),
        (4, dict(rgb=(2, 1, 0))),
        (13, dict(rgb=(3, 2, 1))),
        (2, None),
        (1, None),
        (5, dict(rgb=(4, None, 0))),
    ],
)
def test_equal_bands_have_the_features_of_a_gray_image(
    build: Callable[..., nn.Module], channels: int, bands: Any, tmp_path: Path
) -> None:
    reference, model = build(tmp_path), build(tmp_path, in_channels=channels, bands=bands)
    reference.init_weights()
    model.init_weights()
    gray = torch.rand(2, 1, 32, 64, generator=torch.Generator().manual_seed(1))
    for one, other in zip(
        features(reference, gray.expand(-1, 3, -1, -1)),
        features(model, gray.expand(-1, channels, -1, -1)),
    ):
        if bands is None or None not in bands['rgb']:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        assert 0.5 < other.std() / one.std() < 2


@pytest.mark.parametrize('build', [vit, lite])
def test_other_order_of_red_green_blue(build: Callable[..., nn.Module], tmp_path: Path) -> None:
    reference, model = build(tmp_path), build(tmp_path, bands=dict(rgb=(2, 1, 0)))
    reference.init_weights()
    model.init_weights()
    x = torch.rand(2, 3, 32, 64)
    for one, other in zip(features(reference, x), features(model, x.flip(1))):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_kernels_go_where_red_green_blue_are() -> None:
    weight = torch.randn(7, 3, 2, 2)
    adapted = adapt_bands(weight, 6, (4, 0, 1))
    torch.testing.assert_close(adapted[:, [4, 0, 1]], weight / 2)
    torch.testing.assert_close(
        adapted[:, [2, 3, 5]], weight.mean(1, keepdim=True).expand(-1, 3, -1, -1) / 2
    )
    assert adapt_bands(weight, 3, (0, 1, 2)) is weight


@pytest.mark.parametrize('build', [vit, convnext, lite])
def test_a_trained_model_of_three_bands_starts_one_of_four(
    build: Callable[..., nn.Module], tmp_path: Path
) -> None:
    """``load_from`` of the Runner, which leaves out what has another shape."""
    trained, model = nn.ModuleDict(), nn.ModuleDict()
    trained['backbone'] = build(tmp_path)
    model['backbone'] = build(tmp_path, in_channels=4, bands=dict(rgb=(2, 1, 0)))
    trained['backbone'].init_weights()
    torch.save(dict(state_dict=trained.state_dict()), str(tmp_path / 'trained.pth'))
    load_checkpoint(model, str(tmp_path / 'trained.pth'), map_location='cpu')
    gray = torch.rand(2, 1, 32, 64)
    for one, other in zip(
        features(trained['backbone'], gray.expand(-1, 3, -1, -1)),
        features(model['backbone'], gray.expand(-1, 4, -1, -1)),
    ):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    state = model.state_dict()
    model.load_state_dict(state)  # its own checkpoint has four channels and stays as it is
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_every_kernel_learns(tmp_path: Path) -> None:
    model = lite(tmp_path, in_channels=4).train()
    sum(each.sum() for each in model(torch.rand(1, 4, 32, 32))).backward()
    gradient = model._conv_stem.weight.grad
    assert gradient.shape[1] == 4 and (gradient != 0).any(0).any(-1).any(-1).all()


@pytest.mark.parametrize('build', [vit, convnext, lite])
@pytest.mark.parametrize(
    'arguments, message',
    [
        (dict(in_channels=0), 'in_channels=0, expected'),
        (dict(in_channels=2, bands=dict(rgb=(0, 1, 2))), r'rgb=\(0, 1, 2\).*0 to 1'),
        (dict(in_channels=4, bands=dict(rgb=(1, 1, 2))), r'rgb=\(1, 1, 2\)'),
        (dict(in_channels=4, bands=dict(rgb=(1, 2))), r'rgb=\(1, 2\)'),
        (dict(in_channels=4, bands=dict(nir=3)), r"bands=\{'nir': 3\}"),
    ],
)
def test_mistakes_are_named(
    build: Callable[..., nn.Module], arguments: Dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        build(tmp_path, **arguments)


def test_mean_and_std_of_the_weights_are_for_rgb_only() -> None:
    vit_of = dict(type='DINOv3ViT', arch=PLAIN, in_channels=4)
    assert MODELS.build(vit_of).normalization is None
    with pytest.raises(ValueError, match="normalization='web' is for the bands red, green, blue"):
        MODELS.build(dict(vit_of, normalization='web'))
