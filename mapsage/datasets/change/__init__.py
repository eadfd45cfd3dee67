"""Pairs of two dates: Open-CD's folders, labels of change, and augmentation of pairs.

A pair is a stack (`mapsage/stacks/`) of one sensor with two dates. `dataset.py` lists pairs of
files, `labels.py` turns files of change or of classes into labels, `augment.py` works on any stack
of two dates, whoever has loaded it.
"""
from .augment import ExchangeDates, JitterDates, ShiftDate
from .dataset import ChangeDataError, ChangeDataset
from .loading import LoadChangeLabels, LoadChangePair

__all__ = [
    'ChangeDataError', 'ChangeDataset', 'ExchangeDates', 'JitterDates', 'LoadChangeLabels',
    'LoadChangePair', 'ShiftDate'
]
