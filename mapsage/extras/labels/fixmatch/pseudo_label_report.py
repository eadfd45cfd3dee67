"""Log texts about a teacher's classes: how many pixels count, and how many of them are right.

A class without any confident pixel learns nothing from unlabeled images, and the loss does not show
it. So the table lists every class, and a class that stays empty is named in a warning.
"""

from __future__ import annotations

from typing import List, Sequence

import numpy as np


class PseudoLabelReport:
    """Tables of pseudo-labels by class, and warnings of classes without confident pixels.

    Args:
        classes: Names of the classes.
        threshold: Least probability that counts.
        patience: Steps without any confident pixel of a class after which a warning names it.
    """

    def __init__(self, classes: Sequence[str], threshold: float, patience: int) -> None:
        self._classes, self._threshold, self._patience = list(classes), threshold, patience
        # Steps since the last confident pixel of each class.
        self._steps_without = np.zeros(len(self._classes), np.int64)
        self._named: List[str] = []

    def table(self, counts: np.ndarray, steps: int) -> str:
        """Return the text of an interval.

        Args:
            counts: Pixels by class, int64 (4, C): predicted as the class; of these, confident; of
                these, with known truth; of these, right.
            steps: Steps of the interval.
        """
        predicted, confident, known, right = counts
        lines = [
            f'of {steps} step(s): {_percent(confident.sum(), predicted.sum())} of '
            f'{predicted.sum():,} unlabeled pixels pass {self._threshold:g}'
            + (f', {_percent(right.sum(), known.sum())} of these are right' if known.sum() else '')
        ]
        width = max(len('class'), *map(len, self._classes))
        truth = bool(known.sum())
        lines.append(
            f'{"class":<{width}}  {"pixels":>13}  {"pass":>13}  {"share":>6}'
            + f'  {"right":>6}' * truth
        )
        for index, name in enumerate(self._classes):
            lines.append(
                f'{name:<{width}}  {predicted[index]:>13,}  {confident[index]:>13,}  '
                f'{_percent(confident[index], predicted[index]):>6}'
                + f'  {_percent(right[index], known[index]):>6}'
                * truth
            )
        return '\n'.join(lines)

    def warning(self, confident: np.ndarray, steps: int) -> str:
        """Return a warning of classes without a confident pixel for long; ``''`` without any.

        Args:
            confident: Confident pixels of each class in an interval, int64 (C,).
            steps: Steps of the interval.
        """
        self._steps_without = np.where(confident > 0, 0, self._steps_without + steps)
        late = [
            name
            for name, since in zip(self._classes, self._steps_without)
            if since >= self._patience
        ]
        new = [name for name in late if name not in self._named]
        # A class that has confident pixels again is named again if it loses them again.
        self._named = late
        if not new:
            return ''
        names = 'any class' if len(late) == len(self._classes) else ', '.join(late)
        return (
            f'no unlabeled pixel of {names} has passed the threshold {self._threshold:g} for '
            f'{self._patience} steps or more: the unlabeled images teach nothing about it. '
            'Lower threshold, train on the labels only for longer first (load_from), or label '
            'tiles that show it.'
        )


def _percent(part: float, whole: float) -> str:
    return f'{part / whole:.1%}' if whole else '-'
