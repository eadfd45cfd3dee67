"""Backbones, registered in MMEngine's root registry."""
from .efficientnet_lite import EfficientNetLite

__all__ = ['EfficientNetLite']
