"""Backbones, decode heads, and learning rates by layer."""
from .backbones import (
    BackboneInputError,
    DINOv3ConvNeXt,
    DINOv3ViT,
    EfficientNetLite,
    WeightsError,
)
from .heads import LinearHead
from .layer_decay import DINOv3LayerDecayConstructor

__all__ = [
    'BackboneInputError', 'DINOv3ConvNeXt', 'DINOv3LayerDecayConstructor', 'DINOv3ViT',
    'EfficientNetLite', 'LinearHead', 'WeightsError'
]
