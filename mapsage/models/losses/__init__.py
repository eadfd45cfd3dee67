"""Losses for unequal classes and for the score, registered in MMEngine's root registry."""
from .imbalance import SegDiceLoss, SegFocalLoss, SegLovaszLoss, SegTverskyLoss
from .jaccard import JaccardLoss, contour_band

__all__ = ['JaccardLoss', 'SegDiceLoss', 'SegFocalLoss', 'SegLovaszLoss', 'SegTverskyLoss',
           'contour_band']
