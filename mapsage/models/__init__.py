"""Backbones, heads and losses."""
from .backbones import EfficientNetLite

__all__ = ['EfficientNetLite']
