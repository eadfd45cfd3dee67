"""Intervals hold in simulated surveys, or carry a warning; a sample of tools/benchmarks/."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import ROOT

from mapsage.extras.assess.estimators import Survey, estimate_mean, estimate_ratio
from mapsage.extras.assess.intervals import find_interval, hidden_share, wilson


def load_benchmark(name: str) -> Any:
    path = Path(ROOT) / 'tools/benchmarks' / f'{name}.py'
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


coverage = load_benchmark('assess_coverage')


@pytest.mark.parametrize('scenario', coverage.scenarios(), ids=lambda scenario: scenario.name)
def test_intervals_without_a_warning_contain_the_truth(scenario: Any) -> None:
    rows = coverage.simulate(scenario, 1500, np.random.default_rng(1))
    # 1,500 surveys know a share of 95 % to within 1.5 percentage points.
    for row in rows:
        assert row.missed_unwarned <= 0.07 + 0.015, row
        if row.warned < 0.1:
            assert 0.93 - 0.015 <= row.printed <= 0.97 + 0.015, row
    if 'balanced' in scenario.name:
        assert all(row.warned < 0.01 for row in rows)


@pytest.mark.parametrize('pixels, points', [(60, 50), (60, 30), (150, 140), (1000, 100)])
def test_intervals_of_strata_that_are_nearly_used_up(pixels: int, points: int) -> None:
    """Areas of the pixels differ by a factor of 5, and the map is right where they are large."""
    rows = coverage.simulate_degrees(pixels, points, 1000, np.random.default_rng(0))
    users = next(row for row in rows if row.quantity == "user's accuracy of class 1")
    assert users.warned < 0.05 and 0.93 < users.printed < 0.975
    for row in rows:
        assert row.printed > 0.93 and row.missed_unwarned < 0.07, row


def test_the_textbook_interval_of_a_rare_class_fails_without_the_doubtful_stratum() -> None:
    areas = {}
    for scenario in coverage.scenarios()[:6]:
        row = next(
            row
            for row in coverage.simulate(scenario, 1500, np.random.default_rng(1))
            if row.quantity == 'area of class 1'
        )
        areas[scenario.name] = row
        assert row.warned > 0.99 and row.printed > 0.98
    assert areas['rare class, 200 each'].textbook == pytest.approx(0.448, abs=0.04)
    assert areas['rare class, 75/180/345'].textbook == pytest.approx(0.508, abs=0.04)
    doubtful = [row.textbook for name, row in areas.items() if 'doubtful' in name]
    assert all(0.88 < textbook < 0.93 for textbook in doubtful)


def test_wilson_is_the_solution_of_its_quadratic_equation() -> None:
    """The ends satisfy (p - q)^2 = z^2 q (1 - q) / n, which defines the score interval."""
    for share, points in ((0.3, 40.0), (0.0, 25.0), (1.0, 9.0), (0.97, 312.5)):
        for end in wilson(np.array(share), np.array(points)):
            assert (share - end) ** 2 == pytest.approx(
                1.959963984540054**2 * end * (1 - end) / points, abs=1e-12
            )


def test_intervals_are_those_of_statsmodels() -> None:
    proportion = pytest.importorskip('statsmodels.stats.proportion')
    for right, points in ((12, 40), (0, 25), (9, 9), (303, 312)):
        expected = proportion.proportion_confint(right, points, 0.05, 'wilson')
        assert wilson(np.array(right / points), np.array(float(points))) == pytest.approx(
            expected, abs=1e-12
        )
    for points in (2, 60, 700):
        assert hidden_share(0.5, points) / 0.5 == pytest.approx(
            proportion.proportion_confint(0, points, 0.05, 'beta')[1]
        )


def test_standard_errors_of_strata_are_those_of_statsmodels() -> None:
    weighted = pytest.importorskip('statsmodels.stats.weightstats')
    counts, shares = np.array([[30.0, 10.0, 60.0], [5.0, 90.0, 5.0]]), np.array([0.8, 0.2])
    values = np.array([1.0, 0.0, 0.25])
    estimate = estimate_mean(Survey(counts, shares, np.full(2, np.inf)), values)
    strata = [weighted.DescrStatsW(values, weights=points) for points in counts]
    assert estimate.value == pytest.approx(
        sum(share * stratum.mean for share, stratum in zip(shares, strata))
    )
    assert estimate.variance == pytest.approx(
        sum((share * stratum.std_mean) ** 2 for share, stratum in zip(shares, strata))
    )


def test_several_surveys_at_a_time_give_what_each_gives() -> None:
    random = np.random.RandomState(0)
    counts = random.multinomial(50, [0.4, 0.3, 0.2, 0.1], (5, 2)).astype(float)
    shares, sizes = np.array([0.3, 0.7]), np.array([1e3, 1e5])
    y, x = np.array([1.0, 0, 0, 0]), np.array([1.0, 1, 0, 0])
    together = estimate_ratio(
        Survey(counts, shares, sizes), np.broadcast_to(y, (5, 4)), np.broadcast_to(x, (5, 4))
    )
    for number in range(5):
        single = estimate_ratio(Survey(counts[number], shares, sizes), y, x)
        assert single.value == pytest.approx(together.value[number])
        assert single.variance == pytest.approx(together.variance[number])


def test_a_difference_has_a_symmetric_interval() -> None:
    survey = Survey(np.array([[30.0, 60.0, 10.0]]), np.ones(1), np.full(1, np.inf))
    estimate = estimate_mean(survey, np.array([1.0, 0.0, -1.0]))
    interval = find_interval(survey, estimate, np.ones(1), is_difference=True)
    assert not interval.is_doubtful
    assert (interval.low + interval.high) / 2 == pytest.approx(0.2)
    assert interval.high - 0.2 == pytest.approx(1.959963984540054 * math.sqrt((0.4 - 0.04) / 99))
