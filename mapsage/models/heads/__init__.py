"""Decode heads that MMSegmentation lacks, registered in MMEngine's root registry."""

from .linear_head import LinearHead

__all__ = ['LinearHead']
