"""Backbones, registered in MMEngine's root registry.

``DINOv3ViT`` is plain PyTorch; ``DINOv3ConvNeXt`` and ``EfficientNetLite`` wrap other packages. All
of them accept any number of bands (``bands.py``). ``StackBackbone`` runs any backbone on the dates
of scene stacks, ``SiameseBackbone`` compares two dates.
"""
from .dinov3 import DINOv3ViT
from .dinov3_convnext import DINOv3ConvNeXt
from .dinov3_weights import WeightsError
from .efficientnet_lite import EfficientNetLite
from .pixels import BackboneInputError
from .siamese_backbone import SiameseBackbone
from .stack_backbone import StackBackbone

__all__ = [
    'BackboneInputError', 'DINOv3ConvNeXt', 'DINOv3ViT', 'EfficientNetLite', 'SiameseBackbone',
    'StackBackbone', 'WeightsError'
]
