"""How often the intervals of `mapsage assess` contain the truth, in simulated surveys.

    python tools/benchmarks/assess_coverage.py [--surveys 10000] [--markdown] [--degrees]

A scenario is a population (share of each stratum, and in it the shares of map class and true class)
and the number of points in each stratum. The surveys are drawn from it at random and go through the
estimators of `mapsage/extras/assess/`, all at a time. A row is one estimate of a scenario: coverage
of the textbook interval (+- 1.96 standard errors) and of the printed one, the share of surveys with
a warning, and the share of surveys that miss the truth without a warning. The exit status is 1 if a
row that warns in less than a tenth of its surveys covers less than 93 or more than 97 %.

With --degrees the scenarios are a rare class of few pixels on a map in degrees, most of which are
labeled. Their areas differ by a factor of 5, and the class is right where they are large.
"""

from __future__ import annotations

import argparse
import sys
from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np

from mapsage.extras.assess.estimators import Survey, estimate_mean, estimate_ratio
from mapsage.extras.assess.intervals import Z, find_interval, span_of_cells


class Scenario(NamedTuple):
    """A population and a design.

    Attributes:
        name: Name in the table.
        shares: Share of each stratum, ``(H,)``.
        joint: Shares of map class and true class in each stratum, ``(H, K, K)``.
        points: Points in each stratum.
    """

    name: str
    shares: np.ndarray
    joint: np.ndarray
    points: Sequence[int]


class Row(NamedTuple):
    """Results of an estimate in all surveys of a scenario, as shares of the surveys."""

    scenario: str
    quantity: str
    truth: float
    textbook: float
    printed: float
    warned: float
    missed_unwarned: float
    half_width: float


def by_class(confusion: Sequence[Sequence[float]]) -> np.ndarray:
    """Return the joint shares of strata that are the map's classes."""
    rows = np.array(confusion)
    return np.einsum('hm,hk->hmk', np.eye(len(rows)), rows)


def scenarios() -> List[Scenario]:
    """Return a rare class without and with a doubtful stratum, and three balanced populations."""
    # Change covers 0.5 % of the map; 0.2 % of the mapped forest and 0.1 % of the rest are change.
    shares = np.array([0.005, 0.30, 0.695])
    rare = by_class([[0.80, 0.10, 0.10], [0.002, 0.95, 0.048], [0.001, 0.02, 0.979]])
    listed = [
        Scenario('rare class, 200 each', shares, rare, (200, 200, 200)),
        Scenario('rare class, 75/180/345', shares, rare, (75, 180, 345)),
        Scenario('rare class, proportional', shares, rare, (3, 180, 417)),
    ]
    listed += [
        Scenario(
            f'rare class, doubtful stratum, {"/".join(map(str, points))}', *_doubtful(), points
        )
        for points in ((200, 200, 200), (150, 300, 150), (75, 180, 345))
    ]
    listed.append(
        Scenario(
            'balanced, 3 classes',
            np.array([0.2, 0.3, 0.5]),
            by_class([[0.85, 0.10, 0.05], [0.06, 0.88, 0.06], [0.05, 0.07, 0.88]]),
            (200, 200, 200),
        )
    )
    listed.append(
        Scenario(
            'balanced, 4 classes',
            np.array([0.15, 0.25, 0.25, 0.35]),
            by_class(
                [
                    [0.80, 0.10, 0.05, 0.05],
                    [0.05, 0.85, 0.05, 0.05],
                    [0.04, 0.06, 0.82, 0.08],
                    [0.03, 0.03, 0.06, 0.88],
                ]
            ),
            (150, 150, 150, 150),
        )
    )
    listed.append(
        Scenario(
            'balanced, 2 classes',
            np.array([0.4, 0.6]),
            by_class([[0.85, 0.15], [0.1, 0.9]]),
            (300, 300),
        )
    )
    return listed


def _doubtful() -> Tuple[np.ndarray, np.ndarray]:
    """Return strata and joint shares of the rare class with 90 % of its omissions in 3 %."""
    omitted = np.array([0.30 * 0.002, 0.695 * 0.001])
    shares, joint = np.array([0.005, 0.03, 0.965]), np.zeros((3, 3, 3))
    joint[0, 0] = 0.8, 0.1, 0.1
    forest = 0.285 / 0.965
    for number, parts, hidden in (
        (1, ((0.5, 0.80), (0.5, 0.80)), 0.9),
        (2, ((forest, 0.96), (1 - forest, 0.985)), 0.1),
    ):
        for mapped, (share, right) in enumerate(parts, 1):
            change = hidden * omitted[mapped - 1] / shares[number]
            joint[number, mapped] = change, 0, 0
            joint[number, mapped, mapped] = right * share - right * change
            joint[number, mapped, 3 - mapped] = (1 - right) * (share - change)
    return shares, joint


# Area of a pixel from the equator to 80 degrees, and how many pixels of the rare class are right.
_AREAS = np.array([1.0, 0.8, 0.6, 0.4, 0.2])
_RIGHT = np.array([0.95, 0.9, 0.7, 0.5, 0.3])
# Pixels of the rare class, and points in it.
DEGREES = [(60, 50), (60, 30), (60, 58), (150, 50), (150, 140), (1000, 100), (100000, 100)]


def simulate_degrees(
    pixels: int, points: int, surveys: int, random: np.random.Generator
) -> List[Row]:
    """Return the rows of a rare class of ``pixels`` pixels, of which ``points`` are labeled.

    The other stratum has a million pixels and 300 points; 1 % of its pixels are of the class.
    """
    # Cells (stratum, true class, area).
    cells = np.zeros((2, 2, len(_AREAS)), np.int64)
    cells[0, 0] = np.round(pixels / len(_AREAS) * _RIGHT)
    cells[0, 1] = pixels // len(_AREAS) - cells[0, 0]
    cells[1] = 1000000 // len(_AREAS) * np.array([[0.01], [0.99]])
    areas = np.tile(_AREAS, 4).reshape(cells.shape)
    counts = np.zeros((surveys, 2, *cells.shape))
    for stratum, drawn in enumerate((points, 300)):
        counts[:, stratum, stratum] = random.multivariate_hypergeometric(
            cells[stratum].ravel(), drawn, surveys, method='marginals'
        ).reshape(surveys, *cells.shape[1:])
    ground = (cells * areas).sum((1, 2))
    survey = Survey(
        counts.reshape(surveys, 2, -1),
        ground / ground.sum(),
        cells.sum((1, 2)).astype(float),
        areas.ravel(),
    )
    rows = []
    for name, y, x in quantities(2):
        tables = [np.repeat(table.ravel(), len(_AREAS)) for table in (y, x)]
        truth = float(np.divide(*((cells * areas).ravel() @ table for table in tables)))
        rows.append(
            _judge(
                f'{pixels} pixels, {points} points',
                name,
                truth,
                survey,
                y,
                x,
                np.eye(2, dtype=bool),
                tables,
            )
        )
    return rows


def quantities(classes: int) -> Iterator[Tuple[str, np.ndarray, np.ndarray]]:
    """Yield the name of an estimate and its y and x, ``(K, K)``; x is 1 where it is a mean."""
    same, one = np.eye(classes), np.ones((classes, classes))
    yield 'overall accuracy', same, one
    for number in range(classes):
        right, mapped, true = np.zeros_like(one), np.zeros_like(one), np.zeros_like(one)
        right[number, number], mapped[number], true[:, number] = 1, 1, 1
        yield f'area of class {number + 1}', true, one
        yield f"user's accuracy of class {number + 1}", right, mapped
        yield f"producer's accuracy of class {number + 1}", right, true


def simulate(scenario: Scenario, surveys: int, random: np.random.Generator) -> List[Row]:
    """Return the rows of a scenario."""
    strata, classes = scenario.joint.shape[:2]
    counts = np.stack(
        [
            random.multinomial(points, cells.ravel() / cells.sum(), surveys)
            for points, cells in zip(scenario.points, scenario.joint)
        ],
        1,
    )
    survey = Survey(counts.astype(float), scenario.shares, np.full(strata, np.inf))
    population = np.einsum('h,hmk->mk', scenario.shares, scenario.joint)
    occurs = scenario.joint.sum(2) > 0
    rows = []
    for name, y, x in quantities(classes):
        truth = float((population * y).sum() / (population * x).sum())
        rows.append(_judge(scenario.name, name, truth, survey, y, x, occurs))
    return rows


def _judge(
    scenario: str,
    name: str,
    truth: float,
    survey: Survey,
    y: np.ndarray,
    x: np.ndarray,
    occurs: np.ndarray,
    tables: Optional[Sequence[np.ndarray]] = None,
) -> Row:
    """Return how often the intervals of an estimate contain the truth.

    Args:
        scenario: Name of the scenario.
        name: Name of the estimate.
        truth: True value.
        survey: The surveys.
        y: Value of each pair of classes ``(K, K)``.
        x: The same for the denominator.
        occurs: Whether a stratum has pixels of a map class, ``(H, K)``.
        tables: Values of ``y`` and ``x`` for the cells of the survey, if these are no such pairs.
    """
    surveys = len(survey.counts)
    flat_y, flat_x = (
        np.broadcast_to(table.ravel(), (surveys, table.size)) for table in tables or (y, x)
    )
    estimate = estimate_mean(survey, flat_y) if x.all() else estimate_ratio(survey, flat_y, flat_x)
    bottom, value = (array[:, None, None] for array in (survey.mean(flat_x), estimate.value))
    with np.errstate(divide='ignore', invalid='ignore'):
        residual = np.broadcast_to(y, (surveys, *y.shape)) if x.all() else (y - value * x) / bottom
    interval = find_interval(survey, estimate, span_of_cells(residual, occurs))
    half = Z * np.sqrt(estimate.variance)
    inside = (interval.low <= truth) & (truth <= interval.high)
    return Row(
        scenario,
        name,
        truth,
        float((abs(estimate.value - truth) <= half).mean()),
        float(inside.mean()),
        float(interval.is_doubtful.mean()),
        float((~inside & ~interval.is_doubtful).mean()),
        float(np.nanmean(half)),
    )


def main() -> int:
    """Print the table; return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--surveys', type=int, default=10000)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--markdown', action='store_true')
    parser.add_argument('--degrees', action='store_true', help='strata that are nearly used up')
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    rows = (
        [
            row
            for pixels, points in DEGREES
            for row in simulate_degrees(pixels, points, args.surveys, random)
        ]
        if args.degrees
        else [row for scenario in scenarios() for row in simulate(scenario, args.surveys, random)]
    )
    separator = ' | ' if args.markdown else '  '
    for row in rows:
        print(
            separator.join(
                [
                    f'{row.scenario:42}',
                    f'{row.quantity:32}',
                    f'{row.truth:.4f}',
                    *(f'{100 * value:5.1f}' for value in row[3:7]),
                    f'{row.half_width:.4f}',
                ]
            )
        )
    wrong = [row for row in rows if row.warned < 0.1 and not 0.93 <= row.printed <= 0.97]
    for row in wrong:
        print(f'outside 93 to 97 %: {row.scenario}, {row.quantity}: {100 * row.printed:.1f} %')
    return int(bool(wrong))


if __name__ == '__main__':
    sys.exit(main())
