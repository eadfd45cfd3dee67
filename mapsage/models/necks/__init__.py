"""Necks, registered in MMEngine's root registry: pooling of dates and sensors."""

from .temporal_pool import TemporalPool

__all__ = ['TemporalPool']
