"""Backbones, registered in MMEngine's root registry.

``DINOv3ViT`` is plain PyTorch; ``DINOv3ConvNeXt`` and ``EfficientNetLite`` wrap other packages. All
of them accept any number of bands (``bands.py``). ``earth/`` has encoders for several bands,
sensors and dates. ``StackBackbone`` runs any backbone on the dates of scene stacks,
``SiameseBackbone`` compares two dates.
"""
from .dinov3 import DINOv3ViT
from .dinov3_convnext import DINOv3ConvNeXt
from .earth import DOFA, EarthSensorError, OlmoEarth, PrithviEO, TerraMind
from .efficientnet_lite import EfficientNetLite
from .pixels import BackboneInputError
from .siamese_backbone import SiameseBackbone
from .stack_backbone import StackBackbone
from .weight_files import WeightsError

__all__ = [
    'DOFA', 'BackboneInputError', 'DINOv3ConvNeXt', 'DINOv3ViT', 'EarthSensorError',
    'EfficientNetLite', 'OlmoEarth', 'PrithviEO', 'SiameseBackbone', 'StackBackbone', 'TerraMind',
    'WeightsError'
]
