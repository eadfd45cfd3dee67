"""``LoRABackbone``: any vision transformer with adapters."""
from __future__ import annotations

from typing import Any, Dict

from mmengine.registry import MODELS
from torch import nn

from .inject import add_lora
from .settings import LoRAError


@MODELS.register_module(name='LoRABackbone')
def build_lora_backbone(of: Any, lora: Dict[str, Any], **settings: Any) -> nn.Module:
    """Build a backbone with low-rank adapters, which alone are trained.

    It is the backbone itself, with the names of its own state dict, so that ``init_cfg`` and the
    learning rates by layer work as without adapters. In a config that inherits another:
    ``model=dict(backbone=dict(type='LoRABackbone', of='BEiT', lora=dict(rank=16)))``. The settings
    of ``DINOv3ViT`` include ``lora``, so that it needs no ``LoRABackbone``.

    Args:
        of: Type of the backbone, such as ``'VisionTransformer'``, ``'BEiT'`` or ``'MAE'``.
        lora: Settings of the adapters; see :class:`LoRASettings`.
        **settings: Settings of the backbone.

    Raises:
        LoRAError: If a setting is wrong, or a target matches no layer.
    """
    if of == 'DINOv3ViT':
        raise LoRAError("LoRABackbone(of='DINOv3ViT'): DINOv3ViT takes lora itself. Set "
                        "type='DINOv3ViT' and leave of out")
    backbone = MODELS.build(dict(settings, type=of))
    add_lora(backbone, lora)
    return backbone
