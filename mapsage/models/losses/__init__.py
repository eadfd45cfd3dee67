"""Losses for unbalanced classes, the IoU and centerlines, registered in MMEngine's root registry.

Each loss is normalized over the global batch, so its gradient does not depend on how the batch is
split over ranks (mapsage/distributed/wrappers/batch_counts.py).
"""

from .centerline_dice import CenterlineDiceLoss
from .imbalance import SegDiceLoss, SegFocalLoss
from .jaccard import JaccardLoss, contour_band

__all__ = [
    'CenterlineDiceLoss',
    'JaccardLoss',
    'SegDiceLoss',
    'SegFocalLoss',
    'contour_band',
]
