"""Decode heads that MMSegmentation lacks."""
from .linear_head import LinearHead

__all__ = ['LinearHead']
