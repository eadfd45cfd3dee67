"""Half-widths of `mapsage assess` against a simple random sample of as many points.

    python tools/benchmarks/assess_widths.py [--surveys 2000] [--points 600]

A population of a million pixels has probabilities, a map (the most probable class) and a truth
drawn from flatter probabilities, so the model is overconfident. Each survey is drawn from it twice:
as a simple random sample, and by the strata and allocation of `mapsage assess plan` with
model-assisted estimates. A row is the area of a class: mean half-width (1.96 standard errors) of
both, their ratio, and the coverage of the printed interval.

The column "bound" is the smallest ratio of any design that knows what this model knows: strata of
equal probability and Neyman's allocation, with q the true probability of the class at a pixel and p
its area, have the ratio mean(sqrt(q (1 - q))) / sqrt(p (1 - p)).
"""

from __future__ import annotations

import argparse
from typing import Dict, List, Sequence, Tuple

import numpy as np

from mapsage.extras.assess.allocation import allocate
from mapsage.extras.assess.assessment import AREA, Assessment, Sample, assess
from mapsage.extras.assess.census import MapCensus
from mapsage.extras.assess.intervals import Z
from mapsage.extras.assess.map_reader import LEVELS
from mapsage.extras.assess.strata import build_strata

_PIXELS = 1000000

# Name -> (offsets of the classes' scores, their spread, class whose area the survey is for).
# The larger the spread, the better the map.
POPULATIONS: Dict[str, Tuple[Sequence[float], float, int]] = {
    'good map, rare class': ((2.0, 1.4, -8.0), 5.0, 2),
    'noisy map, rare class': ((2.0, 1.4, -3.2), 2.0, 2),
    'good map, balanced': ((0.6, 0.0, 0.0), 5.0, 0),
    'noisy map, balanced': ((0.6, 0.0, 0.0), 2.0, 0),
}


class Population:
    """Pixels with probabilities, map and truth.

    Args:
        offsets: Offset of each class's score.
        spread: Standard deviation of the scores.
        random: Generator of the pixels.
    """

    def __init__(
        self, offsets: Sequence[float], spread: float, random: np.random.Generator
    ) -> None:
        scores = random.normal(size=(_PIXELS, len(offsets))) * spread + np.array(offsets)
        self.probability = _softmax(scores)
        self.mapped = self.probability.argmax(1)
        # The truth follows flatter probabilities: the model is overconfident.
        true = _softmax(scores * 0.7).cumsum(1)
        self.truth = (random.random(_PIXELS)[:, None] > true).sum(1).clip(0, len(offsets) - 1)
        self._true_cumulative = true
        self.level = np.round(100 * self.probability.max(1)).astype(int)
        self.names = [f'class {number + 1}' for number in range(len(offsets))]

    def bound(self, target: int) -> float:
        """Return the smallest ratio of half-widths that a design could have for a class's area."""
        true = np.diff(self._true_cumulative, axis=1, prepend=0)[:, target].clip(0, 1)
        area = true.mean()
        return float(np.sqrt(true * (1 - true)).mean() / np.sqrt(area * (1 - area)))

    def census(self) -> MapCensus:
        """Return the tables that a plan would count."""
        classes = len(self.names)
        cells, size = self.mapped * LEVELS + self.level, classes * LEVELS
        pixels = np.bincount(cells, minlength=size).reshape(classes, LEVELS)
        probability = np.stack(
            [np.bincount(cells, column, size) for column in self.probability.T], 1
        )
        return MapCensus(
            self.names,
            'px',
            pixels,
            pixels.astype(float),
            probability.reshape(classes, LEVELS, classes),
            '',
        )


def survey_simple(population: Population, points: int, random: np.random.Generator) -> Assessment:
    """Return the estimates of a simple random sample, from labels only."""
    chosen = random.choice(_PIXELS, points, replace=False)
    classes = len(population.names)
    return assess(
        Sample(
            np.zeros(points, int),
            population.mapped[chosen],
            population.truth[chosen],
            ['map'],
            np.array([1.0]),
            np.array([float(_PIXELS)]),
            np.ones((1, classes), bool),
            population.names,
        )
    )


class PlannedSurveys:
    """Surveys by the strata of a plan, with model-assisted estimates.

    Args:
        population: The pixels.
        points: Number of points.
        target: Class whose area the Neyman allocation is for.
    """

    def __init__(self, population: Population, points: int, target: int) -> None:
        self._population, census = population, population.census()
        self.strata = build_strata(census, 0.05)
        share = self.strata.joint[:, :, target].sum(1)
        self.points = allocate(
            'neyman', points, self.strata.shares, np.maximum(np.sqrt(share * (1 - share)), 0.1)
        )
        stratum = self.strata.table[population.mapped, population.level]
        self._members = [
            np.flatnonzero(stratum == number) for number in range(len(self.strata.names))
        ]
        self._known = np.zeros((len(self._members), *self.strata.joint.shape[1:]))
        for number, members in enumerate(self._members):
            np.add.at(
                self._known[number],
                population.mapped[members],
                population.probability[members] / len(members),
            )

    def draw(self, random: np.random.Generator) -> Assessment:
        """Return the estimates of one survey."""
        population, strata = self._population, self.strata
        chosen = np.concatenate(
            [
                random.choice(members, count, replace=False)
                for members, count in zip(self._members, self.points)
            ]
        )
        return assess(
            Sample(
                np.repeat(np.arange(len(strata.names)), self.points),
                population.mapped[chosen],
                population.truth[chosen],
                strata.names,
                strata.area,
                strata.pixels.astype(float),
                strata.composition > 0,
                population.names,
                population.probability[chosen],
                self._known,
            )
        )


def _softmax(scores: np.ndarray) -> np.ndarray:
    exponents = np.exp(scores - scores.max(1, keepdims=True))
    return exponents / exponents.sum(1, keepdims=True)


def _row(
    name: str,
    population: Population,
    target: int,
    simple: List[Assessment],
    planned: List[Assessment],
) -> str:
    label = population.names[target]
    truth = (population.truth == target).mean()
    areas = [[assessment.get(AREA, label) for assessment in group] for group in (simple, planned)]
    widths = [Z * np.mean([area.error for area in group]) for group in areas]
    inside = np.mean([area.low <= truth <= area.high for area in areas[1]])
    warned = np.mean([bool(area.warning) for area in areas[1]])
    accuracy = (population.mapped == population.truth).mean()
    return (
        f'{name:24} accuracy {100 * accuracy:.1f} %  area {100 * truth:6.2f} %  simple '
        f'{100 * widths[0]:.2f}  planned {100 * widths[1]:.2f}  ratio '
        f'{widths[1] / widths[0]:.2f}  bound {population.bound(target):.2f}  coverage '
        f'{100 * inside:.1f} %  warned '
        f'{100 * warned:.0f} %'
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or '').splitlines()[0])
    parser.add_argument('--surveys', type=int, default=2000)
    parser.add_argument('--points', type=int, default=600)
    args = parser.parse_args()
    for name, (offsets, spread, target) in POPULATIONS.items():
        random = np.random.default_rng(0)
        population = Population(offsets, spread, random)
        planned = PlannedSurveys(population, args.points, target)
        print(
            _row(
                name,
                population,
                target,
                [survey_simple(population, args.points, random) for _ in range(args.surveys)],
                [planned.draw(random) for _ in range(args.surveys)],
            )
        )


if __name__ == '__main__':
    main()
