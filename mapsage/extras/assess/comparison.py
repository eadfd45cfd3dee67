"""Which of two maps is better, from the same labeled points.

Both maps are judged at the same pixels, so the errors that they share cancel, and the interval of
the difference is narrower than the two intervals suggest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List, Tuple

import numpy as np

from .assessment import OVERALL, PRODUCERS, USERS, Sample, estimate_table, explain_doubt
from .errors import AssessError
from .estimators import Estimate
from .intervals import find_interval


@dataclass(frozen=True)
class FigureDifference:
    """An accuracy of two maps and its difference.

    Attributes:
        quantity: ``OVERALL``, ``USERS`` or ``PRODUCERS``.
        class_name: Name of the class; '' for the whole map.
        first: Accuracy of the first map; NaN if it cannot be estimated.
        second: Accuracy of the second map.
        value: First minus second.
        error: Standard error of the difference.
        low: Lower end of the interval of 95 % of the difference.
        high: Upper end.
        warning: Why the textbook interval must not be believed, or ''.
    """

    quantity: str
    class_name: str
    first: float
    second: float
    value: float
    error: float
    low: float
    high: float
    warning: str

    @property
    def better(self) -> int:
        """1 or 2 for the map that is better beyond chance, 0 if the interval contains 0."""
        return 1 if self.low > 0 else 2 if self.high < 0 else 0


def compare(first: Sample, second: Sample) -> List[FigureDifference]:
    """Return the differences of two maps: overall accuracy, and the accuracies of shared classes.

    Args:
        first: Labeled points with the classes of the first map.
        second: The same points with the classes of the second map.

    Raises:
        AssessError: If a stratum has fewer than two points, or the maps share no class.
    """
    names = [name for name in first.class_names if name in second.class_names]
    if not names:
        raise AssessError(
            f'the maps share no class: {", ".join(first.class_names)} and '
            f'{", ".join(second.class_names)}; compare maps with the same classes.'
        )
    first.check()
    differences = [_difference(first, second, OVERALL, '')]
    for name in names:
        differences += [
            _difference(first, second, quantity, name)
            for quantity in (USERS, PRODUCERS)
            if quantity == PRODUCERS or _is_mapped(first, name) and _is_mapped(second, name)
        ]
    return differences


def _is_mapped(sample: Sample, name: str) -> bool:
    return list(sample.class_names).index(name) < sample.occurs.shape[1]


def _difference(first: Sample, second: Sample, quantity: str, name: str) -> FigureDifference:
    estimates, spans = zip(*(_of_points(sample, quantity, name) for sample in (first, second)))
    survey = first.point_survey()
    residual = estimates[0].residual - estimates[1].residual
    value = estimates[0].value - estimates[1].value
    estimate = Estimate(value, survey.variance(residual), residual)
    interval = find_interval(survey, estimate, np.maximum(*spans), is_difference=True)
    unknown = bool(np.isnan(value))
    return FigureDifference(
        quantity,
        name,
        float(estimates[0].value),
        float(estimates[1].value),
        float(value),
        float(np.sqrt(estimate.variance)),
        -1.0 if unknown else float(interval.low),
        1.0 if unknown else float(interval.high),
        'no point has this class on a map or as reference, so it cannot be estimated'
        if unknown
        else explain_doubt(first, survey, interval, quantity, float(value)),
    )


def _of_points(sample: Sample, quantity: str, name: str) -> Tuple[Estimate, np.ndarray]:
    """Return the estimate of an accuracy with a residual for each point, and its span."""
    shape = sample.occurs.shape[1], len(sample.class_names)
    if quantity == OVERALL:
        y, x = np.eye(*shape), None
    else:
        number = list(sample.class_names).index(name)
        y, x = np.zeros(shape), np.zeros(shape)
        # A class that the map lacks has no pixel that is right.
        if number < shape[0]:
            y[number, number] = 1
        x[(number, slice(None)) if quantity == USERS else (slice(None), number)] = 1
    _, estimate, span = estimate_table(sample, y, x, assisted=False)
    return estimate, span
