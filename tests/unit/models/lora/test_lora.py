"""Adapters: what they compute, which layers get them, what is trained, merging."""

from __future__ import annotations

import copy
from typing import Any, Dict, Tuple

import pytest
import torch
from mmengine.registry import MODELS
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from mmseg.utils import register_all_modules
from torch import nn

from mapsage.extras.streaming.encoder_gate import FeatureSourceError, check_frozen
from mapsage.models import DINOv3ConvNeXt, DINOv3ViT
from mapsage.models.lora import LoRAError, add_lora, is_adapter, merge_lora

register_all_modules(init_default_scope=False)
pytestmark = pytest.mark.usefixtures('mmseg_scope')

ARCH = dict(embed_dims=32, num_layers=3, num_heads=2, feedforward_channels=48)
HOST = dict(img_size=32, embed_dims=32, num_layers=3, num_heads=2, out_indices=(0, 1, 2))
# By name: config of a backbone without adapters, and its output layer of the attention.
BACKBONES: Dict[str, Tuple[Dict[str, Any], str]] = dict(
    dinov3=(dict(type='DINOv3ViT', arch=ARCH, normalization=None), 'proj'),
    dinov3_gated=(
        dict(type='DINOv3ViT', normalization=None, arch=dict(ARCH, gated_mlp=True, qkv_bias=False)),
        'proj',
    ),
    vit=(dict(type='VisionTransformer', **HOST), 'out_proj'),
    beit=(dict(type='BEiT', **HOST), 'proj'),
    beit_no_bias=(dict(type='BEiT', qv_bias=False, **HOST), 'proj'),
    mae=(dict(type='MAE', **HOST), 'proj'),
)
every_backbone = pytest.mark.parametrize('name', BACKBONES)


def without(name: str) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS.build(BACKBONES[name][0])
    model.init_weights()
    with torch.no_grad():
        for key, value in model.named_parameters():
            if 'gamma' in key:  # LayerScale begins at 1e-5, which would hide what an adapter does
                value.fill_(0.5)
            elif key.endswith('bias'):
                value.normal_(std=0.1)
    model.eval()  # MMSegmentation's backbones return nothing here
    return model


def adapted(name: str, targets: Tuple[str, ...] = ('q', 'v'), **lora: Any) -> nn.Module:
    torch.manual_seed(3)
    config = dict(BACKBONES[name][0])
    lora = dict(dict(rank=4, targets=targets), **lora)
    if config['type'] != 'DINOv3ViT':
        config.update(type='LoRABackbone', of=config['type'])
    model = MODELS.build(dict(config, lora=lora))
    missing, unexpected = model.load_state_dict(without(name).state_dict(), strict=False)
    assert not unexpected and all(map(is_adapter, missing)) and missing
    model.eval()
    return model


def train_adapters(model: nn.Module) -> None:
    """Give the adapters values that a training could have given them."""
    torch.manual_seed(1)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if '.lora_B.' in key:
                value.normal_(std=0.3)


def image() -> torch.Tensor:
    return torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def difference(one: Any, other: Any) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(one, other))


@every_backbone
def test_a_new_adapter_changes_nothing(name: str) -> None:
    assert difference(without(name)(image()), adapted(name)(image())) < 1e-6


@every_backbone
def test_output_is_that_of_the_formula_and_of_the_merged_weights(name: str) -> None:
    """The reference adds ``alpha / rank * B A`` to the rows of queries and values itself."""
    model = adapted(name, ('q', 'v', BACKBONES[name][1]), alpha=2.0)
    train_adapters(model)
    state, reference = model.state_dict(), without(name)
    weights = dict(reference.named_parameters())
    for key, up in state.items():
        if '.lora_B.' not in key:
            continue
        layer, part = key.split('.lora_B.')
        name_of_weight = next(
            each for each in (f'{layer}.weight', f'{layer}.in_proj_weight') if each in weights
        )
        rows = dict(q=slice(0, 32), v=slice(64, 96), all=slice(None))[part]
        with torch.no_grad():
            weights[name_of_weight][rows] += 0.5 * up @ state[f'{layer}.lora_A.{part}']
    wanted = reference(image())
    assert difference(without(name)(image()), wanted) > 1e-2
    assert difference(model(image()), wanted) < 1e-5
    assert difference(copy.deepcopy(model)(image()), wanted) < 1e-5  # EMAHook copies the model
    merge_lora(model)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert difference(model(image()), wanted) < 1e-5
    for key, value in reference.state_dict().items():
        torch.testing.assert_close(model.state_dict()[key], value)


@every_backbone
def test_adapters_alone_are_trained_and_all_of_them(name: str) -> None:
    model = adapted(name, ('q', 'k', 'v', BACKBONES[name][1]))
    model.train()
    train_adapters(model)
    sum(level.square().mean() for level in model(image())).backward()
    for key, value in model.named_parameters():
        assert value.requires_grad == is_adapter(key) == (value.grad is not None), key
        assert value.grad is None or float(value.grad.abs().sum()) > 0, key


@pytest.mark.parametrize('name', ['dinov3', 'vit', 'beit'])
def test_recomputed_blocks_have_the_same_gradients(name: str) -> None:
    def gradients(recompute: str) -> Dict[str, torch.Tensor]:
        model = adapted(name)
        model.train()
        train_adapters(model)
        if recompute == 'own':
            for each in model.modules():
                if hasattr(each, 'with_cp'):
                    each.with_cp = True
        elif recompute:
            blocks = 'blocks' if hasattr(model, 'blocks') else 'layers'
            turn_on_activation_checkpointing(model, [f'{blocks}.{i}' for i in range(3)])
        sum(level.square().mean() for level in model(image())).backward()
        return {key: value.grad for key, value in model.named_parameters() if is_adapter(key)}

    plain = gradients('')
    for recompute in ('own', 'activation_checkpointing'):
        for key, gradient in gradients(recompute).items():
            torch.testing.assert_close(gradient, plain[key], msg=f'{recompute} {key}')


def test_dropout_is_for_training() -> None:
    model = adapted('vit', dropout=0.5)
    train_adapters(model)
    assert difference(model(image()), model(image())) == 0
    model.train()
    assert difference(model(image()), model(image())) > 1e-3


def test_frozen_stages_have_no_adapters() -> None:
    config = dict(BACKBONES['dinov3'][0], lora=dict(rank=2), frozen_stages=2, frozen=True)
    model = MODELS.build(config).train()
    trained = {
        key.split('.attn')[0] for key, value in model.named_parameters() if value.requires_grad
    }
    assert trained == {'blocks.2'}
    assert not model.blocks[0].training and model.blocks[2].training


def test_cached_features_of_an_adapted_encoder_are_refused() -> None:
    with pytest.raises(FeatureSourceError, match='LoRA adapters.*Leave lora out'):
        check_frozen(adapted('dinov3'))


class _ReadsItsWeight(nn.Module):
    """An attention that does not call its layer."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.qkv.weight)


def test_an_adapter_without_effect_is_an_error() -> None:
    model = nn.Sequential(_ReadsItsWeight())
    add_lora(model, dict(rank=2))
    with pytest.raises(LoRAError, match='0.qkv: _ReadsItsWeight does not call that layer'):
        model(torch.zeros(1, 8))


@pytest.mark.parametrize(
    'lora, message',
    [
        (
            dict(rank=4, targets=('q', 'fc7')),
            "'fc7' matches no layer of DINOv3ViT.*q, k, v, and the linear layers attn.qkv, attn.proj, "
            'mlp.fc1, mlp.fc2',
        ),
        (dict(rank=0), 'rank=0'),
        (dict(rank=4.0), 'rank=4.0'),
        (dict(rank=64), '32 inputs'),
        (dict(rank=4, dropout=1), 'dropout=1'),
        (dict(rank=4, alpha=0), 'alpha=0'),
        (dict(rank=4, target=('q',)), "no setting 'target'.*Did you mean 'targets'"),
        (dict(targets=('q',)), 'expected dict'),
        (dict(rank=4, targets=()), r'targets=\(\)'),
    ],
)
def test_wrong_settings(lora: Any, message: str) -> None:
    with pytest.raises(LoRAError, match=message):
        DINOv3ViT(ARCH, lora=lora)


def test_what_cannot_be_adapted() -> None:
    with pytest.raises(LoRAError, match='no attention.*DINOv3ViT'):
        MODELS.build(dict(type='LoRABackbone', of='ResNet', depth=18, lora=dict(rank=4)))
    with pytest.raises(LoRAError, match='convolutional'):
        DINOv3ConvNeXt(lora=dict(rank=4))
    with pytest.raises(LoRAError, match='no block of DINOv3ViT'):
        DINOv3ViT(ARCH, lora=dict(rank=4), frozen_stages=3)
    with pytest.raises(LoRAError, match='accepts lora itself'):
        MODELS.build(dict(type='LoRABackbone', of='DINOv3ViT', lora=dict(rank=4)))
    with pytest.raises(LoRAError, match='with_cp'):
        DINOv3ViT(ARCH, lora=dict(rank=4, dropout=0.1), with_cp=True)
