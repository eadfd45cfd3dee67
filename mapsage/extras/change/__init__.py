"""Pairs of two dates: Open-CD's folders, labels of change, and augmentation of pairs.

A pair is a stack (`mapsage/geo/stacks/`) of one sensor with two dates. `dataset.py` lists pairs of
files, `labels.py` turns files of change or of classes into labels, `augment.py` works on any stack
of two dates, whoever has loaded it. `siamese_backbone.py` compares the features of both dates, and
`metric.py` scores what has changed. Names of classes of change are in `mapsage/geo/change_classes.py`,
which maps of pairs need too.
"""

from .augment import ExchangeDates, JitterDates, ShiftDate
from .dataset import ChangeDataError, ChangeDataset
from .loading import LoadChangeLabels, LoadChangePair
from .metric import ChangeMetric
from .siamese_backbone import SiameseBackbone

__all__ = [
    'ChangeDataError',
    'ChangeDataset',
    'ChangeMetric',
    'ExchangeDates',
    'JitterDates',
    'LoadChangeLabels',
    'LoadChangePair',
    'ShiftDate',
    'SiameseBackbone',
]
