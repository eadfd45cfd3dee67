"""Backbones, registered in MMEngine's root registry."""
from .dinov3 import DINOv3ViT
from .dinov3_convnext import DINOv3ConvNeXt
from .dinov3_weights import WeightsError
from .efficientnet_lite import EfficientNetLite
from .pixels import BackboneInputError

__all__ = [
    'BackboneInputError', 'DINOv3ConvNeXt', 'DINOv3ViT', 'EfficientNetLite', 'WeightsError'
]
