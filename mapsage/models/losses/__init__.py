"""Losses for unequal classes, registered in MMEngine's root registry."""
from .imbalance import SegDiceLoss, SegFocalLoss, SegLovaszLoss, SegTverskyLoss

__all__ = ['SegDiceLoss', 'SegFocalLoss', 'SegLovaszLoss', 'SegTverskyLoss']
