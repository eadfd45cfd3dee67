"""Decode heads that MMSegmentation does not have."""
from .linear_head import LinearHead

__all__ = ['LinearHead']
