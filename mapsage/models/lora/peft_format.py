"""Export of adapters in the file format of Hugging Face's peft.

The folder contains ``adapter_config.json`` and ``adapter_model.safetensors``, whose keys are
``base_model.model.<layer>.lora_A.weight`` (rank, inputs) and ``lora_B.weight`` (outputs, rank).
peft knows one adapter per layer, so adapters of q, k and v in one layer are joined.

Source: huggingface/peft, docs/source/developer_guides/checkpoint.md; read back by peft 0.21.2.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Dict, List, Tuple

import torch
from torch import nn

from .adapted import PROJECTIONS, Adapted, LoRAError

CONFIG_FILE, WEIGHTS_FILE = 'adapter_config.json', 'adapter_model.safetensors'
# Names of DINOv3ViT's layers in transformers' DINOv3ViTModel.
_HUGGING_FACE = {
    'attn.proj': 'attention.o_proj',
    'mlp.fc1': 'mlp.up_proj',
    'mlp.fc2': 'mlp.down_proj',
    'mlp.w1': 'mlp.gate_proj',
    'mlp.w2': 'mlp.up_proj',
    'mlp.w3': 'mlp.down_proj',
}


def write_peft(backbone: nn.Module, folder: Path, names: str = 'own') -> int:
    """Write the adapters of a backbone into a folder.

    A layer that computes queries, keys and values at once gets one adapter, as in peft. Its rank
    is the sum of its projections' ranks, and its scale is unchanged (see
    :meth:`Adapted.join_matrices`).

    Args:
        backbone: Backbone with adapters.
        folder: Folder of the files, created if missing.
        names: Names of the layers in the file: ``'own'`` for the backbone's names; for DINOv3ViT
            also ``'huggingface'``, the names of DINOv3ViTModel in transformers 5, which has
            separate layers for queries, keys and values, or ``'huggingface4'``, the same in
            transformers 4.

    Returns:
        The number of adapted layers.

    Raises:
        LoRAError: If the backbone has no adapters, or ``names`` asks for Hugging Face's names of
            another backbone than DINOv3ViT.
    """
    from safetensors.torch import save_file

    state: Dict[str, torch.Tensor] = {}
    ranks: Dict[str, int] = {}
    settings = None
    for name, layer in backbone.named_modules():
        if isinstance(layer, Adapted) and layer.adapted_projections:
            settings = layer.lora
            for key, down, up in _export_matrices(name, layer, names, type(backbone).__name__):
                for letter, value in (('A', down), ('B', up)):
                    state[f'base_model.model.{key}.lora_{letter}.weight'] = (
                        value.detach().cpu().contiguous().clone()
                    )
                ranks[key] = len(down)
    if settings is None:
        raise LoRAError(f'{type(backbone).__name__} has no adapters to export')
    # peft matches patterns at the end of names, where several layers may agree. So each pattern
    # matches one whole name.
    rank_pattern = {
        f'^{re.escape(key)}$': rank for key, rank in ranks.items() if rank != settings.rank
    }
    config = dict(
        peft_type='LORA',
        task_type=None,
        base_model_name_or_path=None,
        inference_mode=True,
        r=settings.rank,
        lora_alpha=settings.scale * settings.rank,
        lora_dropout=settings.dropout,
        bias='none',
        fan_in_fan_out=False,
        target_modules=sorted(ranks),
        rank_pattern=rank_pattern,
        alpha_pattern={key: settings.scale * rank for key, rank in rank_pattern.items()},
    )
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, str(folder / WEIGHTS_FILE), metadata=dict(format='pt'))
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    return len(ranks)


def _export_matrices(
    name: str, layer: Adapted, names: str, backbone: str
) -> List[Tuple[str, torch.Tensor, torch.Tensor]]:
    """Return (layer name in the file, A, B) for each of the file's layers that a layer becomes."""
    if names == 'own':
        return [(name, *layer.join_matrices())]
    block = re.fullmatch(r'blocks\.(\d+)\.(.+)', name)
    if backbone != 'DINOv3ViT' or block is None:
        raise LoRAError(
            f"Hugging Face's names are known for DINOv3ViT, not for {name} of "
            f"{backbone}: expected names='own'"
        )
    # transformers 5 prefixes the layers with 'model.'.
    model = '' if names == 'huggingface4' else 'model.'
    prefix, name_in_block = f'{model}layer.{block.group(1)}', block.group(2)
    if name_in_block != 'attn.qkv':
        return [(f'{prefix}.{_HUGGING_FACE[name_in_block]}', *layer.join_matrices())]
    return [
        (
            f'{prefix}.attention.{projection}_proj',
            layer.lora_A[projection],
            layer.lora_B[projection],
        )
        for projection in PROJECTIONS
        if projection in layer.adapted_projections
    ]
