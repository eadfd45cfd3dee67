"""Backbones, decode heads, losses, segmentors and adapters, as MMEngine registry classes.

Nothing here communicates with other ranks: where a loss needs a sum over all ranks, the model
wrapper supplies it (mapsage/distributed/wrappers/batch_counts.py). Start with ``backbones/`` and ``losses/``;
``lora/`` has the adapters.
"""

from .backbones import (
    BackboneInputError,
    DINOv3ConvNeXt,
    DINOv3ViT,
    EfficientNetLite,
    StackBackbone,
    WeightsError,
)
from .checkpoint_fit import CheckpointFitError
from .frozen_weights import FrozenWeightsError
from .heads import LinearHead
from .layer_decay import DINOv3LayerDecayConstructor
from .lora import LoRAError
from .losses import JaccardLoss, SegDiceLoss, SegFocalLoss

__all__ = [
    'BackboneInputError',
    'CheckpointFitError',
    'DINOv3ConvNeXt',
    'DINOv3LayerDecayConstructor',
    'DINOv3ViT',
    'EfficientNetLite',
    'FrozenWeightsError',
    'JaccardLoss',
    'LinearHead',
    'LoRAError',
    'SegDiceLoss',
    'SegFocalLoss',
    'StackBackbone',
    'WeightsError',
]
