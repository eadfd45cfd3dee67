"""Areas and accuracies of a map from the labeled points of a plan.

`assess` is the good-practice estimate of Olofsson et al. 2014 with Stehman's 2014 estimators, since
strata and map classes differ as soon as there is a doubtful stratum. If the plan has the map's
probabilities, areas and accuracies are model-assisted. No kappa: Stehman and Foody 2019 advise
against it.

Shapes (n points, H strata, K classes of the map, R reference classes, R >= K):
    y, x        (K, R) value of each pair of map class and reference class
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import List, Optional, Sequence, Tuple

import numpy as np

from .errors import AssessError
from .estimators import (
    Estimate,
    Survey,
    estimate_assisted_mean,
    estimate_assisted_ratio,
    estimate_mean,
    estimate_ratio,
)
from .intervals import FEWEST, Interval, find_interval, hidden_share, span_of_cells

AREA, USERS, PRODUCERS, OVERALL = (
    'area',
    "user's accuracy",
    "producer's accuracy",
    'overall accuracy',
)
LABELS_ONLY = 'area from labels only'


@dataclass(frozen=True)
class Sample:
    """Labeled points and their strata.

    Attributes:
        stratum: Index of each point's stratum, ``(n,)``.
        mapped: Index of its class on the map, ``(n,)``.
        reference: Index of its reference class, ``(n,)``.
        stratum_names: Names of the strata.
        area: Area of each stratum, ``(H,)``.
        pixels: Pixels of each stratum, ``(H,)``; infinite for no finite population correction.
        occurs: Whether a stratum has pixels of a map class, bool ``(H, K)``.
        class_names: Names of the reference classes; the first K are the classes of the map.
        probability: Probability of each map class at the points, ``(n, K)``, or None.
        known: Mean over each stratum of [map class = m] * probability of class k, ``(H, K, K)``.
        weights: Area of the pixel of each point, or numbers in proportion to it, ``(n,)``; None if
            all pixels have the same area.
    """

    stratum: np.ndarray
    mapped: np.ndarray
    reference: np.ndarray
    stratum_names: Sequence[str]
    area: np.ndarray
    pixels: np.ndarray
    occurs: np.ndarray
    class_names: Sequence[str]
    probability: Optional[np.ndarray] = None
    known: Optional[np.ndarray] = None
    weights: Optional[np.ndarray] = None

    @property
    def shares(self) -> np.ndarray:
        """Share of the area of each stratum, ``(H,)``."""
        return self.area / self.area.sum()

    def point_survey(self) -> Survey:
        """Return the survey with a cell for each point."""
        counts = (self.stratum == np.arange(len(self.area))[:, None]).astype(float)
        return Survey(counts, self.shares, self.pixels, self.weights)

    def check(self) -> None:
        """Check that every stratum has a variance.

        Raises:
            AssessError: If a stratum has fewer than two labeled points.
        """
        points = np.bincount(self.stratum, minlength=len(self.area))
        for name, count in zip(self.stratum_names, points):
            if count < 2:
                raise AssessError(
                    f'stratum {name!r} has {count} labeled point(s), expected 2 or more: '
                    + (
                        'nothing is known of its part of the map'
                        if not count
                        else 'one point has no standard error'
                    )
                    + '. Label more of its points, or make a plan with more points.'
                )


@dataclass(frozen=True)
class Result:
    """An estimate with its interval.

    Attributes:
        quantity: What it is: ``AREA``, ``USERS``, ``PRODUCERS``, ``OVERALL`` or ``LABELS_ONLY``.
        class_name: Name of the class; '' for the whole map.
        value: The estimate, as a share; NaN if it cannot be estimated.
        error: Its standard error.
        low: Lower end of the interval of 95 %.
        high: Upper end.
        warning: Why the textbook interval must not be believed, or ''; ``low`` and ``high`` are
            then a cautious interval.
    """

    quantity: str
    class_name: str
    value: float
    error: float
    low: float
    high: float
    warning: str


@dataclass(frozen=True)
class Assessment:
    """All estimates of a map.

    Attributes:
        results: The estimates.
        matrix: Error matrix in shares of the area, map classes in rows, ``(K, R)``.
        counts: Points by map class and reference class, int64 ``(K, R)``.
        class_names: Names of the reference classes.
        points: Labeled points of each stratum.
        total_area: Area of the map.
    """

    results: List[Result]
    matrix: np.ndarray
    counts: np.ndarray
    class_names: Sequence[str]
    points: np.ndarray
    total_area: float

    def get(self, quantity: str, class_name: str = '') -> Result:
        """Return the estimate of a quantity."""
        return next(
            result
            for result in self.results
            if (result.quantity, result.class_name) == (quantity, class_name)
        )


def assess(sample: Sample) -> Assessment:
    """Return all estimates of a sample.

    Raises:
        AssessError: If a stratum has fewer than two points.
    """
    sample.check()
    results = [_estimate(sample, OVERALL, '', _tables(sample, None)[0], None)]
    for number, name in enumerate(sample.class_names):
        right, is_mapped, is_true = _tables(sample, number)
        results.append(_estimate(sample, AREA, name, is_true, None))
        if _is_assisted(sample, number):
            results.append(_estimate(sample, LABELS_ONLY, name, is_true, None, assisted=False))
        if number < sample.occurs.shape[1]:
            results.append(_estimate(sample, USERS, name, right, is_mapped))
        results.append(_estimate(sample, PRODUCERS, name, right, is_true))
    survey = sample.point_survey()
    shape = sample.occurs.shape[1], len(sample.class_names)
    cells = sample.mapped * shape[1] + sample.reference
    shares = (sample.shares / survey.points) @ (survey.counts * survey.relative_areas)
    matrix, counts = (
        np.bincount(cells, values, shape[0] * shape[1]).reshape(shape) for values in (shares, None)
    )
    return Assessment(
        results,
        matrix,
        counts.astype(np.int64),
        sample.class_names,
        survey.points.astype(np.int64),
        float(sample.area.sum()),
    )


def estimate_table(
    sample: Sample, y: np.ndarray, x: Optional[np.ndarray], assisted: bool
) -> Tuple[Survey, Estimate, np.ndarray]:
    """Return survey, estimate and span of the mean of ``y``, or of the ratio of ``y`` and ``x``."""
    survey = sample.point_survey()
    cells = sample.mapped, sample.reference
    y_values = y[cells]
    if x is None:
        estimate, residual = estimate_mean(survey, y_values), y
    else:
        x_values = x[cells]
        estimate = estimate_ratio(survey, y_values, x_values)
        with np.errstate(divide='ignore', invalid='ignore'):
            residual = (y - estimate.value * x) / survey.mean(x_values)
    span = span_of_cells(residual, sample.occurs)
    if not assisted:
        return survey, estimate, span
    values = [_at_points(sample, table) for table in (y, x) if table is not None]
    known = [_known_means(sample, table) for table in (y, x) if table is not None]
    if x is None:
        (value, guess), mean = values[0], known[0]
        return survey, estimate_assisted_mean(survey, value, guess, mean), span
    return (
        survey,
        estimate_assisted_ratio(
            survey, values[0][0], values[1][0], values[0][1], values[1][1], *known
        ),
        span,
    )


def _estimate(
    sample: Sample,
    quantity: str,
    class_name: str,
    y: np.ndarray,
    x: Optional[np.ndarray],
    assisted: bool = True,
) -> Result:
    number = sample.class_names.index(class_name) if class_name else 0
    assisted = assisted and _is_assisted(sample, number)
    survey, estimate, span = estimate_table(sample, y, x, assisted)
    if np.isnan(estimate.value) and assisted:
        result = _estimate(sample, quantity, class_name, y, x, assisted=False)
        return (
            result
            if np.isnan(result.value)
            else replace(
                result,
                warning=result.warning
                or (
                    'with the probabilities of the map it cannot be estimated, so this one is from labels '
                    'only'
                ),
            )
        )
    if np.isnan(estimate.value):
        missing = 'is mapped there' if quantity == USERS else 'has this class as reference'
        return Result(
            quantity,
            class_name,
            np.nan,
            np.nan,
            0.0,
            1.0,
            f'no point {missing}, so it cannot be estimated',
        )
    interval = find_interval(survey, estimate, span)
    value = float(np.clip(estimate.value, 0, 1))
    return Result(
        quantity,
        class_name,
        value,
        float(np.sqrt(estimate.variance)),
        float(interval.low),
        float(interval.high),
        explain_doubt(sample, survey, interval, quantity, float(estimate.value)),
    )


def explain_doubt(
    sample: Sample, survey: Survey, interval: Interval, quantity: str, value: float
) -> str:
    """Return why the interval of an estimate, which is ``value``, is doubtful, or ''."""
    if not interval.is_doubtful:
        return ''
    if interval.is_cut:
        end = 'above 100 %' if value > 1 else 'below 0 %'
        return (
            f'the estimate is {100 * value:.4g} %, {end}, to which it is set: the labels and '
            'the probabilities of the map contradict each other'
        )
    stratum = int(interval.moved_by)
    points = survey.points[stratum]
    if interval.move > 0:
        text = (
            f'stratum {sample.stratum_names[stratum]!r} ({100 * sample.shares[stratum]:.1f} % '
            f'of the map, {points:.0f} points) shows fewer than 3 points of the rarer kind; '
            f'one more would move the estimate by {100 * interval.move:.2g} percentage points'
        )
        if quantity in (AREA, LABELS_ONLY):
            share = float(sample.shares[stratum])
            # No more than the pixels without a point.
            hidden = min(
                hidden_share(share, float(points)),
                share * float(1 - points / survey.sizes[stratum]),
            )
            text += (
                ', and what none of its points shows may still cover up to '
                f'{100 * hidden:.2g} % of the map'
            )
        return text
    if not interval.carried_by < FEWEST:
        return f'the estimate is {100 * value:.0f} %, and its standard error is not 0'
    return f'{interval.carried_by:.1f} points carry the standard error, expected {FEWEST} or more'


def _is_assisted(sample: Sample, number: int) -> bool:
    """Return whether the probabilities say something of a reference class."""
    return sample.probability is not None and number < sample.occurs.shape[1]


def _tables(sample: Sample, number: Optional[int]) -> Tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return y = right, x = mapped and x = true of a class, or of all classes; each (K, R)."""
    shape = sample.occurs.shape[1], len(sample.class_names)
    if number is None:
        return np.eye(*shape), np.ones(shape), np.ones(shape)
    is_mapped, is_true = np.zeros(shape), np.zeros(shape)
    is_mapped[number : number + 1], is_true[:, number] = 1, 1
    return is_mapped * is_true, is_mapped, is_true


def _at_points(sample: Sample, table: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return a table's value at the points, and the value that the model expects there."""
    assert sample.probability is not None, 'called for samples with probabilities'
    classes = sample.probability.shape[1]
    return (
        table[sample.mapped, sample.reference],
        (sample.probability * table[sample.mapped, :classes]).sum(1),
    )


def _known_means(sample: Sample, table: np.ndarray) -> np.ndarray:
    """Return the mean over all pixels of a stratum of the value that the model expects, (H,)."""
    assert sample.known is not None, 'a sample with probabilities has their means'
    classes = sample.known.shape[1]
    return np.einsum('hmk,mk->h', sample.known, table[:, :classes])
