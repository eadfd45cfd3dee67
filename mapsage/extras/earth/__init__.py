"""Encoders for satellite images of several bands, sensors and dates, in plain PyTorch.

``encoder.py`` has what they share; every encoder has a file. They read stacks (``mapsage/geo/stacks``).
``temporal_pool.py`` is the neck that pools the features of dates.
"""

from .dofa import DOFA
from .olmoearth import OlmoEarth
from .prithvi import PrithviEO
from .sensors import EarthSensorError
from .temporal_pool import TemporalPool
from .terramind import TerraMind

__all__ = ['DOFA', 'EarthSensorError', 'OlmoEarth', 'PrithviEO', 'TemporalPool', 'TerraMind']
