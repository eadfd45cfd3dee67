"""Segmentors by mask queries on a plain DINOv3 ViT: EoMT and PMT."""
from .eomt import EoMT, EoMTHead
from .loss import MaskClassLoss
from .pmt import PMTHead
from .two_stages import TwoStageConstructor, TwoStagePolyLR

__all__ = [
    'EoMT', 'EoMTHead', 'MaskClassLoss', 'PMTHead', 'TwoStageConstructor', 'TwoStagePolyLR'
]
