"""Adapters in peft's file format, by its documented names and shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Tuple

import pytest
import torch
from mmengine.registry import MODELS
from mmseg.utils import register_all_modules
from safetensors.torch import load_file
from torch import nn

from mapsage.models import DINOv3ViT
from mapsage.models.lora import LoRAError, merge_lora
from mapsage.models.lora.peft_format import write_peft

register_all_modules(init_default_scope=False)
pytestmark = pytest.mark.usefixtures('mmseg_scope')

ARCH = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=48)


def adapted(**settings: Any) -> nn.Module:
    torch.manual_seed(0)
    model = MODELS.build(settings)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if '.lora_B.' in name:
                value.normal_(std=0.3)
    return model


def dinov3() -> nn.Module:
    return adapted(
        type='DINOv3ViT', arch=ARCH, lora=dict(rank=4, alpha=2.0, targets=('q', 'v', 'attn.proj'))
    )


def read(folder: Path) -> Tuple[Dict[str, Any], Dict[str, torch.Tensor]]:
    config = json.loads((folder / 'adapter_config.json').read_text())
    return config, load_file(str(folder / 'adapter_model.safetensors'))


def delta_of(config: Dict[str, Any], state: Dict[str, torch.Tensor], layer: str) -> torch.Tensor:
    """What peft adds to the weight of a layer."""
    down, up = (state[f'base_model.model.{layer}.lora_{letter}.weight'] for letter in 'AB')
    pattern = f'^{layer}$'.replace('.', r'\.')
    rank = config['rank_pattern'].get(pattern, config['r'])
    assert down.shape[0] == up.shape[1] == rank
    return config['alpha_pattern'].get(pattern, config['lora_alpha']) / rank * up @ down


@pytest.mark.parametrize(
    'model',
    [
        dinov3,
        lambda: adapted(
            type='LoRABackbone',
            of='VisionTransformer',
            img_size=32,
            embed_dims=32,
            num_layers=2,
            num_heads=2,
            lora=dict(rank=4),
        ),
    ],
)
def test_what_peft_adds_is_what_is_merged(model: Any, tmp_path: Path) -> None:
    model = model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    write_peft(model, tmp_path / 'adapter')
    merge_lora(model)
    config, state = read(tmp_path / 'adapter')
    assert config['peft_type'] == 'LORA' and config['bias'] == 'none'
    assert {key.split('.lora_')[0] for key in state} == {
        f'base_model.model.{layer}' for layer in config['target_modules']
    }
    changed = [
        name for name, value in model.state_dict().items() if not torch.equal(value, before[name])
    ]
    assert len(changed) == len(config['target_modules']) > 0
    for name, layer in zip(sorted(changed), config['target_modules']):
        assert name.startswith(layer)
        torch.testing.assert_close(
            model.state_dict()[name], before[name] + delta_of(config, state, layer)
        )


@pytest.mark.parametrize(
    'gated, kind, prefix', [(False, 'huggingface', 'model.layer'), (True, 'huggingface4', 'layer')]
)
def test_names_of_hugging_face(tmp_path: Path, gated: bool, kind: str, prefix: str) -> None:
    mlp = ('w1', 'w2', 'w3') if gated else ('fc1', 'fc2')
    model = adapted(
        type='DINOv3ViT',
        arch=dict(ARCH, gated_mlp=gated),
        lora=dict(rank=4, targets=('q', 'v', 'attn.proj', *(f'mlp.{name}' for name in mlp))),
    )
    write_peft(model, tmp_path, kind)
    config, state = read(tmp_path)
    names = [
        'attention.o_proj',
        'attention.q_proj',
        'attention.v_proj',
        'mlp.down_proj',
        *(['mlp.gate_proj'] if gated else []),
        'mlp.up_proj',
    ]
    assert config['target_modules'] == [f'{prefix}.{i}.{name}' for i in (0, 1) for name in names]
    assert config['rank_pattern'] == {} and config['r'] == config['lora_alpha'] == 4
    layer = model.blocks[1].attn.qkv
    key = f'base_model.model.{prefix}.1.attention.v_proj.lora_{{}}.weight'
    assert torch.equal(state[key.format('A')], layer.lora_A['v'])
    assert torch.equal(state[key.format('B')], layer.lora_B['v'])


def test_what_cannot_be_exported(tmp_path: Path) -> None:
    with pytest.raises(LoRAError, match='no adapters'):
        write_peft(DINOv3ViT(ARCH), tmp_path / 'none')
    vit = adapted(
        type='LoRABackbone',
        of='VisionTransformer',
        img_size=32,
        embed_dims=32,
        num_layers=2,
        num_heads=2,
        lora=dict(rank=4),
    )
    with pytest.raises(LoRAError, match="known for DINOv3ViT.*names='own'"):
        write_peft(vit, tmp_path / 'none', 'huggingface')
    assert not (tmp_path / 'none').exists()
