"""What the log says of a teacher's classes: how many pixels count, and how many are right."""
from __future__ import annotations

from typing import List, Sequence

import numpy as np


class PseudoLabelReport:
    """Tables of pseudo-labels by class, and warnings of classes that none reaches.

    Args:
        classes: Names of the classes.
        threshold: Least probability that counts.
        patience: Steps without any sure pixel of a class after which a warning names it.
    """

    def __init__(self, classes: Sequence[str], threshold: float, patience: int) -> None:
        self._classes, self._threshold, self._patience = list(classes), threshold, patience
        self._without = np.zeros(len(self._classes), np.int64)  # steps since a pixel was sure
        self._named: List[str] = []

    def table(self, counts: np.ndarray, steps: int) -> str:
        """Return the text of an interval.

        Args:
            counts: Pixels by class, int64 (4, C): given to the class, sure, of these with known
                truth, right.
            steps: Steps of the interval.
        """
        given, sure, known, right = counts
        lines = [f'of {steps} step(s): {_share(sure.sum(), given.sum())} of {given.sum():,} '
                 f'unlabeled pixels pass {self._threshold:g}' + (
                     f', {_share(right.sum(), known.sum())} of these are right'
                     if known.sum() else '')]
        width = max(len('class'), *map(len, self._classes))
        truth = bool(known.sum())
        lines.append(f'{"class":<{width}}  {"pixels":>13}  {"pass":>13}  {"share":>6}'
                     + f'  {"right":>6}' * truth)
        for at, name in enumerate(self._classes):
            lines.append(f'{name:<{width}}  {given[at]:>13,}  {sure[at]:>13,}  '
                         f'{_share(sure[at], given[at]):>6}'
                         + f'  {_share(right[at], known[at]):>6}' * truth)
        return '\n'.join(lines)

    def warning(self, sure: np.ndarray, steps: int) -> str:
        """Return a warning of classes that no pixel has reached for long, '' if there is none.

        Args:
            sure: Sure pixels of each class in an interval, int64 (C,).
            steps: Steps of the interval.
        """
        self._without = np.where(sure > 0, 0, self._without + steps)
        late = [name for name, since in zip(self._classes, self._without)
                if since >= self._patience]
        new = [name for name in late if name not in self._named]
        # A class that has come back is named again if it is lost again.
        self._named = late
        if not new:
            return ''
        what = 'any class' if len(late) == len(self._classes) else ', '.join(late)
        return (f'no unlabeled pixel of {what} has passed the threshold {self._threshold:g} for '
                f'{self._patience} steps or more: the unlabeled images teach nothing about it. '
                'Lower threshold, train on the labels alone for longer first (load_from), or label '
                'tiles that show it.')


def _share(part: float, whole: float) -> str:
    return f'{part / whole:.1%}' if whole else '-'
