"""Backbones, decode heads, losses, and learning rates by layer."""
from .backbones import (
    BackboneInputError,
    DINOv3ConvNeXt,
    DINOv3ViT,
    EfficientNetLite,
    WeightsError,
)
from .checkpoint_fit import CheckpointFitError
from .frozen_weights import FrozenWeightsError
from .heads import LinearHead
from .layer_decay import DINOv3LayerDecayConstructor
from .lora import LoRAError
from .losses import JaccardLoss, SegDiceLoss, SegFocalLoss, SegLovaszLoss, SegTverskyLoss
from .mask_transformers import EoMT, EoMTHead, MaskClassLoss, PMTHead

__all__ = [
    'BackboneInputError', 'CheckpointFitError', 'DINOv3ConvNeXt', 'DINOv3LayerDecayConstructor',
    'DINOv3ViT', 'EfficientNetLite', 'EoMT', 'EoMTHead', 'FrozenWeightsError', 'JaccardLoss',
    'LinearHead', 'LoRAError', 'MaskClassLoss', 'PMTHead', 'SegDiceLoss', 'SegFocalLoss',
    'SegLovaszLoss', 'SegTverskyLoss', 'WeightsError'
]
