"""What the log says of the classes that the teacher gives."""

from __future__ import annotations

import inspect

import numpy as np

from mapsage.extras.labels.fixmatch import FixMatchHook
from mapsage.extras.labels.fixmatch.pseudo_label_report import PseudoLabelReport

COUNTS = np.array([[1000, 500, 0], [800, 0, 0], [400, 0, 0], [300, 0, 0]])


def report(patience: int = 20) -> PseudoLabelReport:
    return PseudoLabelReport(['land', 'water', 'road'], 0.95, patience)


def test_the_table() -> None:
    assert report().table(COUNTS, 10) == (
        'of 10 step(s): 53.3% of 1,500 unlabeled pixels pass 0.95, 75.0% of these are right\n'
        'class         pixels           pass   share   right\n'
        'land           1,000            800   80.0%   75.0%\n'
        'water            500              0    0.0%       -\n'
        'road               0              0       -       -'
    )
    assert 'right' not in report().table(COUNTS * [[1], [1], [0], [0]], 10)


def test_a_class_that_nothing_reaches_is_named_once() -> None:
    mine, sure = report(), COUNTS[1]
    assert mine.warning(sure, 10) == ''
    assert (
        'no unlabeled pixel of water, road has passed the threshold 0.95 for 20 steps'
        in mine.warning(sure, 10)
    )
    assert mine.warning(sure, 10) == ''
    assert mine.warning(np.array([5, 5, 0]), 10) == ''
    assert mine.warning(np.array([0, 0, 0]), 10) == ''
    assert 'of any class has passed' in mine.warning(np.array([0, 0, 0]), 10)
    assert mine.warning(np.array([1, 0, 0]), 10) == '' != mine.warning(np.array([0, 0, 0]), 20)


def test_nothing_that_passes_for_200_steps_is_said_once() -> None:
    mine = report(inspect.signature(FixMatchHook).parameters['patience'].default)
    said = [mine.warning(np.zeros(3, np.int64), 10) for _ in range(40)]
    assert [number for number, text in enumerate(said) if text] == [19]
    assert 'any class has passed the threshold 0.95 for 200 steps or more' in said[19]
    assert 'Lower threshold' in said[19]
