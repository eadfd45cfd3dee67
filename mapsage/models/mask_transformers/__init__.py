"""Segmentors by mask queries on a plain DINOv3 ViT."""
from .loss import MaskClassLoss

__all__ = ['MaskClassLoss']
