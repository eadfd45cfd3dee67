"""Backbones, registered in MMEngine's root registry.

``DINOv3ViT`` is plain PyTorch; ``DINOv3ConvNeXt`` and ``EfficientNetLite`` wrap other packages. All
of them accept any number of bands (``bands.py``). ``StackBackbone`` runs any backbone on the dates
of scene stacks.
"""

from .dinov3 import DINOv3ViT
from .dinov3_convnext import DINOv3ConvNeXt
from .efficientnet_lite import EfficientNetLite
from .pixels import BackboneInputError
from .stack_backbone import StackBackbone
from .weight_files import WeightsError

__all__ = [
    'BackboneInputError',
    'DINOv3ConvNeXt',
    'DINOv3ViT',
    'EfficientNetLite',
    'StackBackbone',
    'WeightsError',
]
