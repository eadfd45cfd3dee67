"""Adapters in the file format of Hugging Face's peft.

A folder holds ``adapter_config.json`` and ``adapter_model.safetensors``, whose keys are
``base_model.model.<layer>.lora_A.weight`` (rank, inputs) and ``lora_B.weight`` (outputs, rank).

Source: huggingface/peft, docs/source/developer_guides/checkpoint.md; read back by peft 0.21.2.
"""
from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import torch
from torch import nn

from .adapted import PARTS, Adapted
from .settings import LoRAError

CONFIG_FILE, WEIGHTS_FILE = 'adapter_config.json', 'adapter_model.safetensors'
# Names of DINOv3ViT's layers in transformers' DINOv3ViTModel.
_HUGGING_FACE = {'attn.proj': 'attention.o_proj', 'mlp.fc1': 'mlp.up_proj',
                 'mlp.fc2': 'mlp.down_proj', 'mlp.w1': 'mlp.gate_proj', 'mlp.w2': 'mlp.up_proj',
                 'mlp.w3': 'mlp.down_proj'}


def write_peft(backbone: nn.Module, folder: Path, names: str = 'own') -> int:
    """Write the adapters of a backbone into a folder, which is made.

    A layer that computes queries, keys and values at once gets one adapter, as in peft: its rank
    is that of all its parts together, with zeros in B where a part and an adapter do not go
    together, and its scale is the same.

    Args:
        backbone: Backbone with adapters.
        folder: Where the files go.
        names: Names of the layers: ``'own'``, or ``'huggingface'`` for those of DINOv3ViTModel of
            transformers 5, whose queries, keys and values are layers of their own;
            ``'huggingface4'`` for transformers 4.

    Returns:
        The number of layers.

    Raises:
        LoRAError: If the backbone has no adapters, or is no DINOv3ViT with the names of Hugging
            Face.
    """
    from safetensors.torch import save_file
    state: Dict[str, torch.Tensor] = {}
    ranks: Dict[str, int] = {}
    settings = None
    for name, layer in backbone.named_modules():
        if isinstance(layer, Adapted) and layer.adapted_parts:
            settings = layer.lora
            for key, down, up in _pairs(name, layer, names, type(backbone).__name__):
                for letter, value in (('A', down), ('B', up)):
                    state[f'base_model.model.{key}.lora_{letter}.weight'] = \
                        value.detach().cpu().contiguous().clone()
                ranks[key] = len(down)
    if settings is None:
        raise LoRAError(f'{type(backbone).__name__} has no adapters to export')
    # Names of other layers may end alike, so each pattern names whole layers.
    other = {f'^{re.escape(key)}$': rank for key, rank in ranks.items() if rank != settings.rank}
    config = dict(
        peft_type='LORA', task_type=None, base_model_name_or_path=None, inference_mode=True,
        r=settings.rank, lora_alpha=settings.scale * settings.rank,
        lora_dropout=settings.dropout, bias='none', fan_in_fan_out=False,
        target_modules=sorted(ranks), rank_pattern=other,
        alpha_pattern={key: settings.scale * rank for key, rank in other.items()})
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, str(folder / WEIGHTS_FILE), metadata=dict(format='pt'))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    return len(ranks)


def _pairs(name: str, layer: Adapted, names: str, backbone: str
           ) -> List[Tuple[str, torch.Tensor, torch.Tensor]]:
    """Return the names that a layer has in the file, each with its A and B."""
    if names == 'own':
        return [(name, *layer.matrices())]
    block = re.fullmatch(r'blocks\.(\d+)\.(.+)', name)
    if backbone != 'DINOv3ViT' or block is None:
        raise LoRAError(f'the names of Hugging Face are known for DINOv3ViT, not for {name} of '
                        f"{backbone}: expected names='own'")
    model = '' if names == 'huggingface4' else 'model.'  # since transformers 5
    prefix, inner = f'{model}layer.{block.group(1)}', block.group(2)
    if inner != 'attn.qkv':
        return [(f'{prefix}.{_HUGGING_FACE[inner]}', *layer.matrices())]
    own: Any = layer
    return [(f'{prefix}.attention.{part}_proj', own.lora_A[part], own.lora_B[part])
            for part in PARTS if part in layer.adapted_parts]
