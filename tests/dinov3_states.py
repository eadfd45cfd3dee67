"""Random DINOv3 weights by the names of each format."""

from __future__ import annotations

import re
from typing import Any, Callable, Dict

import torch

from mapsage.models.backbones.dinov3_weights import Arch

State = Dict[str, torch.Tensor]


def hub_state(arch: Dict[str, Any], unused: bool = True) -> State:
    """Random weights by the names of the official files."""
    a, generator = Arch(**arch), torch.Generator().manual_seed(0)
    c, f, quarter = a.embed_dims, a.feedforward_channels, a.embed_dims // a.num_heads // 4

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.3

    def linear(name: str, inputs: int, outputs: int) -> State:
        return {f'{name}.weight': draw(outputs, inputs), f'{name}.bias': draw(outputs)}

    state = {
        'cls_token': draw(1, 1, c),
        'patch_embed.proj.weight': draw(c, 3, 16, 16),
        'patch_embed.proj.bias': draw(c),
        'norm.weight': draw(c),
        'norm.bias': draw(c),
        'rope_embed.periods': 100.0 ** (torch.arange(quarter) / quarter),
    }
    if a.num_registers:
        state['storage_tokens'] = draw(1, a.num_registers, c)
    if unused:
        state.update(
            {
                'mask_token': draw(1, c),
                'local_cls_norm.weight': draw(c),
                'local_cls_norm.bias': draw(c),
            }
        )
    layers = {'fc1': (c, f), 'fc2': (f, c)}
    if a.gated_mlp:
        layers = {'w1': (c, f), 'w2': (c, f), 'w3': (f, c)}
    for index in range(a.num_layers):
        block: State = {'ls1.gamma': draw(c), 'ls2.gamma': draw(c)}
        for norm in ('norm1', 'norm2'):
            block.update({f'{norm}.weight': draw(c), f'{norm}.bias': draw(c)})
        block.update(linear('attn.qkv', c, 3 * c))
        block['attn.qkv.bias_mask'] = torch.ones(3 * c)
        block['attn.qkv.bias_mask'][c : 2 * c] = 0
        if not a.qkv_bias:
            del block['attn.qkv.bias'], block['attn.qkv.bias_mask']
        block.update(linear('attn.proj', c, c))
        for name, shape in layers.items():
            block.update(linear(f'mlp.{name}', *shape))
        state.update({f'blocks.{index}.{key}': value for key, value in block.items()})
    return state


def _renamed(state: State, pairs: Dict[str, str]) -> State:
    result = {}
    for key, value in state.items():
        for old, new in pairs.items():
            key = re.sub(old, new, key)
        result[key] = value
    return result


def huggingface_state(hub: State, layers: str = 'layer') -> State:
    """The same weights by Hugging Face's names: 4.x, or 5.x with ``layers='model.layer'``."""
    state = {k: v for k, v in hub.items() if not re.search('periods|bias_mask|local_cls', k)}
    gated = 'blocks.0.mlp.w1.weight' in state
    state = _renamed(
        state,
        {
            '^(cls_token|mask_token)$': r'embeddings.\1',
            '^storage_tokens$': 'embeddings.register_tokens',
            r'^patch_embed\.proj': 'embeddings.patch_embeddings',
            r'ls([12])\.gamma': r'layer_scale\1.lambda1',
            r'attn\.proj': 'attention.o_proj',
            r'mlp\.w1': 'mlp.gate_proj',
            r'mlp\.(w2|fc1)': 'mlp.up_proj',
            r'mlp\.w3' if gated else r'mlp\.fc2': 'mlp.down_proj',
            r'^blocks': layers,
        },
    )
    state.setdefault('embeddings.register_tokens', state['embeddings.cls_token'][:, :0])
    for key in [key for key in state if '.attn.qkv.' in key]:
        for name, part in zip('qkv', state.pop(key).chunk(3)):
            if (name, key[-4:]) != ('k', 'bias'):
                state[key.replace('attn.qkv', f'attention.{name}_proj')] = part
    return state


def timm_state(hub: State) -> State:
    """The same weights by timm's names, with biases (``_qkvb``) if there are any."""
    state = {
        k: v for k, v in hub.items() if not re.search('periods|bias_mask|local_cls|mask_token', k)
    }
    state = _renamed(
        state,
        {
            '^storage_tokens$': 'reg_token',
            r'ls([12])\.gamma': r'gamma_\1',
            r'mlp\.w1': 'mlp.fc1_g',
            r'mlp\.w2': 'mlp.fc1_x',
            r'mlp\.w3': 'mlp.fc2',
        },
    )
    for key in [key for key in state if key.endswith('qkv.bias')]:
        query, _, value = state.pop(key).chunk(3)
        state[key.replace('qkv.bias', 'q_bias')] = query
        state[key.replace('qkv.bias', 'v_bias')] = value
    return state


FORMATS: Dict[str, Callable[[State], State]] = {
    'hub': lambda hub: hub,
    'huggingface': huggingface_state,
    'huggingface 5': lambda hub: huggingface_state(hub, 'model.layer'),
    'timm': timm_state,
}
