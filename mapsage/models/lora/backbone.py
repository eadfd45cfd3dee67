"""``LoRABackbone``: any registered vision transformer with low-rank adapters.

It is a builder, not a wrapper: the result is the backbone itself, so ``init_cfg``, layer decay and
checkpoints see the usual names.
"""

from __future__ import annotations

from typing import Any, Dict

from mmengine.registry import MODELS
from torch import nn

from .inject import add_lora
from .settings import LoRAError


@MODELS.register_module(name='LoRABackbone')
def build_lora_backbone(of: Any, lora: Dict[str, Any], **settings: Any) -> nn.Module:
    """Build a backbone with low-rank adapters and freeze everything else in it.

    The names of its state dict do not change, so ``init_cfg`` and layer-wise learning rates work
    as without adapters. In a config that inherits another:
    ``model=dict(backbone=dict(type='LoRABackbone', of='BEiT', lora=dict(rank=16)))``.
    ``DINOv3ViT`` has its own setting ``lora`` and needs no ``LoRABackbone``.

    Args:
        of: Type of the backbone, such as ``'VisionTransformer'``, ``'BEiT'`` or ``'MAE'``.
        lora: Settings of the adapters; see :class:`LoRASettings`.
        **settings: Settings of the backbone.

    Raises:
        LoRAError: If a setting is wrong, or a target matches no layer.
    """
    if of == 'DINOv3ViT':
        raise LoRAError(
            "LoRABackbone(of='DINOv3ViT'): DINOv3ViT accepts lora itself. Set "
            "type='DINOv3ViT' and remove 'of'"
        )
    backbone = MODELS.build(dict(settings, type=of))
    add_lora(backbone, lora)
    return backbone
