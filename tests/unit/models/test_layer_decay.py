"""Learning rates by depth."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from mmengine.optim import build_optim_wrapper
from torch import nn

from mapsage.models import DINOv3ViT

ARCH = dict(embed_dims=16, num_layers=4, num_heads=2, feedforward_channels=24)


class Segmentor(nn.Module):
    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.backbone = DINOv3ViT(ARCH, **arguments)
        self.decode_head = nn.Conv2d(16, 2, 1)


def groups_of(model: nn.Module, **paramwise: Any) -> Dict[str, Dict[str, Any]]:
    """The optimizer's group of each parameter's name."""
    wrapper = build_optim_wrapper(
        model,
        dict(
            type='OptimWrapper',
            constructor='DINOv3LayerDecayConstructor',
            optimizer=dict(type='AdamW', lr=1.0, weight_decay=0.05),
            paramwise_cfg=paramwise,
        ),
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names[id(parameter)]: group
        for group in wrapper.optimizer.param_groups
        for parameter in group['params']
    }


def test_rates_shrink_from_the_head_to_the_embedding() -> None:
    groups = groups_of(Segmentor(), decay_rate=0.5)
    for name, rate in {
        'decode_head.weight': 1,
        'backbone.norm.weight': 1,
        'backbone.blocks.3.attn.qkv.weight': 0.5,
        'backbone.blocks.2.gamma_1': 0.25,
        'backbone.blocks.1.mlp.fc1.weight': 0.125,
        'backbone.blocks.0.norm1.bias': 0.0625,
        'backbone.patch_embed.weight': 0.03125,
        'backbone.cls_token': 0.03125,
        'backbone.register_tokens': 0.03125,
    }.items():
        assert groups[name]['lr'] == pytest.approx(rate), name


def test_every_parameter_is_in_one_group() -> None:
    model = Segmentor()
    groups = groups_of(model, decay_rate=0.9)
    assert set(groups) == {name for name, _ in model.named_parameters()}


def test_weight_decay_is_for_matrices() -> None:
    groups = groups_of(Segmentor(), decay_rate=0.9)
    decayed = {name for name, group in groups.items() if group['weight_decay']}
    assert decayed == {name for name in groups if name.endswith('.weight') and 'norm' not in name}
    assert {group['weight_decay'] for group in groups.values()} == {0, 0.05}


def test_blocks_that_are_not_built_do_not_count() -> None:
    groups = groups_of(Segmentor(out_indices=(0, 1)), decay_rate=0.5)
    assert groups['backbone.blocks.1.norm1.weight']['lr'] == 0.5
    assert groups['backbone.cls_token']['lr'] == 0.125


def test_frozen_parameters_are_left_out() -> None:
    groups = groups_of(Segmentor(frozen_stages=2), decay_rate=0.5)
    assert not any(
        name.startswith(('backbone.cls', 'backbone.blocks.0', 'backbone.blocks.1'))
        for name in groups
    )
    assert groups['backbone.blocks.2.gamma_1']['lr'] == 0.25
    assert set(groups_of(Segmentor(frozen=True), decay_rate=0.5)) == {
        'decode_head.weight',
        'decode_head.bias',
    }


def test_the_backbone_may_lie_anywhere() -> None:
    assert groups_of(DINOv3ViT(ARCH), decay_rate=0.5)['blocks.3.gamma_2']['lr'] == 0.5
    nested = nn.ModuleDict({'student': Segmentor(), 'teacher': Segmentor()})
    groups = groups_of(nested, decay_rate=0.5)
    assert groups['teacher.backbone.blocks.2.gamma_2']['lr'] == 0.25
    assert groups['student.decode_head.bias']['lr'] == 1


def test_it_steps() -> None:
    model = Segmentor(normalization='web')
    wrapper = build_optim_wrapper(
        model,
        dict(
            constructor='DINOv3LayerDecayConstructor',
            optimizer=dict(type='SGD', lr=0.1),
            paramwise_cfg=dict(decay_rate=0.5),
        ),
    )
    before = model.backbone.cls_token.detach().clone()
    wrapper.update_params(model.decode_head(model.backbone(torch.rand(1, 3, 32, 32))[-1]).sum())
    assert not torch.equal(before, model.backbone.cls_token)


@pytest.mark.parametrize(
    'paramwise',
    [
        dict(decay_rate=0),
        dict(decay_rate=1.5),
        dict(decay_rate=0.5, num_layers=24),
        dict(custom_keys={}),
    ],
)
def test_other_settings_are_refused(paramwise: Dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'must be dict\(decay_rate=...\)'):
        groups_of(Segmentor(), **paramwise)


def test_a_model_without_the_backbone_is_refused() -> None:
    with pytest.raises(ValueError, match='Conv2d has no DINOv3ViT'):
        groups_of(nn.Conv2d(1, 1, 1), decay_rate=0.5)


def test_a_rate_is_needed() -> None:
    with pytest.raises(ValueError, match='has no lr'):
        build_optim_wrapper(
            Segmentor(),
            dict(
                constructor='DINOv3LayerDecayConstructor',
                optimizer=dict(type='AdamW'),
                paramwise_cfg=dict(decay_rate=0.5),
            ),
        )
