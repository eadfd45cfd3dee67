"""Stacks: images of one area from several sensors and dates, as one tensor of fixed shape.

`layout.py` says which channel holds what, `dates.py` turns dates into numbers that a tensor can
hold. The datasets write this tensor, and the models read it; neither knows the other. PyTorch is
imported in functions only, because maps from an exported model do without it.
"""

from .dates import NO_DAY, calendar, day_number, day_of_year
from .layout import (
    SceneStack,
    SensorImages,
    SensorLayout,
    StackLayout,
    StackLayoutError,
    canonical_band,
)

__all__ = [
    'NO_DAY',
    'SceneStack',
    'SensorImages',
    'SensorLayout',
    'StackLayout',
    'StackLayoutError',
    'calendar',
    'canonical_band',
    'day_number',
    'day_of_year',
]
