"""Mask-query segmentors on a plain DINOv3 ViT: EoMT and PMT.

Each query predicts a mask and a class. EoMT runs its queries through the last blocks of a trained
backbone; PMT runs them through a small decoder on a frozen one. ``query_head.py`` has what both
share, ``loss.py`` and ``matching.py`` the training, ``published.py`` the authors' checkpoints.
"""

from mapsage_launcher.only_help import is_only_help

if not is_only_help():
    # The help of mapsage export_eomt needs no model.
    from .eomt import EoMT, EoMTHead
    from .loss import MaskClassLoss
    from .pmt import PMTHead
    from .two_stages import TwoStageConstructor, TwoStagePolyLR

__all__ = ['EoMT', 'EoMTHead', 'MaskClassLoss', 'PMTHead', 'TwoStageConstructor', 'TwoStagePolyLR']
