"""The published tables of Olofsson 2014 and 2013 and Stehman 2014, to the last printed digit."""

from __future__ import annotations

import itertools
from typing import Any, Sequence

import numpy as np
import pytest

from mapsage.extras.assess.assessment import (
    AREA,
    LABELS_ONLY,
    OVERALL,
    PRODUCERS,
    USERS,
    Assessment,
    Sample,
    assess,
)
from mapsage.extras.assess.errors import AssessError
from mapsage.extras.assess.estimators import Survey, estimate_assisted_mean
from mapsage.extras.assess.intervals import Z


def sample_of_matrix(
    matrix: Sequence[Sequence[int]],
    pixels: Sequence[float],
    names: Sequence[str] = 'ABCD',
    finite: bool = False,
) -> Sample:
    """Return a sample with the map's classes as strata, from its error matrix."""
    mapped, reference = (
        np.repeat(index, np.ravel(matrix)) for index in map(np.ravel, np.indices(np.shape(matrix)))
    )
    size = np.array(pixels, float)
    classes = len(matrix)
    return Sample(
        mapped,
        mapped,
        reference,
        list(names[:classes]),
        size,
        size if finite else np.full(classes, np.inf),
        np.eye(classes, dtype=bool),
        list(names[:classes]),
    )


OLOFSSON_2014 = dict(
    matrix=[[66, 0, 5, 4], [0, 55, 8, 12], [1, 0, 153, 11], [2, 1, 9, 313]],
    pixels=[200000, 150000, 3200000, 6450000],
)


def half(assessment: Assessment, quantity: str, name: str = '') -> float:
    return Z * assessment.get(quantity, name).error


def test_table_8_of_olofsson_2014() -> None:
    assessment = assess(sample_of_matrix(**OLOFSSON_2014))
    hectares = 10000000 * 900 / 10000
    printed = []
    for name in 'ABCD':
        row = [
            f'{assessment.get(quantity, name).value:.6f} {half(assessment, quantity, name):.6f}'
            for quantity in (USERS, PRODUCERS)
        ]
        area = assessment.get(AREA, name)
        printed.append(
            [*row, f'{area.value * hectares:.2f} {half(assessment, AREA, name) * hectares:.2f}']
        )
    assert printed == [
        ['0.880000 0.074040', '0.748661 0.213306', '21157.76 6157.52'],
        ['0.733333 0.100755', '0.847156 0.254404', '11686.15 3755.76'],
        ['0.927273 0.039745', '0.934509 0.034324', '285769.93 15509.55'],
        ['0.963077 0.020533', '0.961609 0.018361', '581386.15 16281.36'],
    ]
    overall = assessment.get(OVERALL)
    assert f'{overall.value:.6f} {half(assessment, OVERALL):.6f}' == '0.946512 0.018483'


def test_the_finite_population_correction_of_table_8() -> None:
    assessment = assess(sample_of_matrix(**OLOFSSON_2014, finite=True))
    assert f'{half(assessment, AREA, "A") * 900000:.2f}' == '6157.32'


def test_example_1_of_olofsson_2013() -> None:
    assessment = assess(
        sample_of_matrix([[97, 0, 3], [3, 279, 18], [2, 1, 97]], [22353, 1122543, 610228])
    )
    pixels = 22353 + 1122543 + 610228
    area = assessment.get(AREA, 'A')
    assert f'{area.value * pixels:.1f}' == '45112.4'
    # Other programs print 10751.9: the formula with these counts gives 10751.4.
    assert area.error * pixels == pytest.approx(10751.9, rel=1e-4)
    assert f'{assessment.get(OVERALL).value:.6f}' == '0.944417'
    assert f'{assessment.get(PRODUCERS, "A").value:.6f}' == '0.480631'


def stehman_2014() -> Sample:
    stratum = np.repeat(np.arange(4), 10)
    mapped = 'AAAAAAABBB' + 'A' + 'B' * 9 + 'BB' + 'CCCCCC' + 'BB' + 'D' * 10
    reference = 'AAAAACBABC' + 'A' + 'BBBBB' + 'AABB' + 'CCCCCDDBBADDDDDDDCCB'
    assert len(mapped) == len(reference) == 40
    size = np.array([40000, 30000, 20000, 10000.0])
    return Sample(
        stratum,
        np.array(['ABCD'.index(name) for name in mapped]),
        np.array(['ABCD'.index(name) for name in reference]),
        list('ABCD'),
        size,
        size,
        np.ones((4, 4), bool),
        list('ABCD'),
    )


def test_the_example_of_stehman_2014_whose_strata_are_not_the_map_classes() -> None:
    assessment = assess(stehman_2014())
    keys = [(AREA, 'A'), (AREA, 'C'), (OVERALL, ''), (USERS, 'B'), (PRODUCERS, 'B')]
    printed = {
        key: f'{assessment.get(*key).value:.6f} {assessment.get(*key).error:.6f}' for key in keys
    }
    assert printed == {
        (AREA, 'A'): '0.350000 0.082248',
        (AREA, 'C'): '0.200000 0.064280',
        (OVERALL, ''): '0.630000 0.084642',
        (USERS, 'B'): '0.574468 0.124782',
        (PRODUCERS, 'B'): '0.794118 0.116548',
    }
    assert round(float(assessment.matrix[1, 2]), 6) == 0.08


def test_standard_errors_agree_with_the_jackknife() -> None:
    """The delete-one jackknife by stratum knows none of the formulas of variance."""
    sample = stehman_2014()
    infinite = Sample(**{**vars(sample), 'pixels': np.full(4, np.inf)})
    full = assess(infinite)
    variance = {}
    for stratum in range(4):
        members = np.flatnonzero(sample.stratum == stratum)
        values = {key: [] for key in [(OVERALL, ''), (AREA, 'A'), (USERS, 'B'), (PRODUCERS, 'B')]}
        for point in members:
            rest = np.delete(np.arange(40), point)
            left = assess(
                Sample(
                    **{
                        **vars(infinite),
                        **{
                            name: getattr(sample, name)[rest]
                            for name in ('stratum', 'mapped', 'reference')
                        },
                    }
                )
            )
            for key in values:
                values[key].append(left.get(*key).value)
        for key, column in values.items():
            size = len(column)
            variance[key] = variance.get(key, 0) + (size - 1) / size * sum(
                (np.array(column) - np.mean(column)) ** 2
            )
    for key, expected in variance.items():
        # Equal for means; for ratios of so few points up to the linearization.
        tolerance = 1e-9 if key[0] in (OVERALL, AREA) else 0.1
        assert full.get(*key).error == pytest.approx(np.sqrt(expected), rel=tolerance)


def test_the_estimates_of_pixels_of_different_areas() -> None:
    """Cochran 1977, 6.2 and 6.4, written out point by point, for two strata and three classes."""
    random = np.random.RandomState(0)
    stratum, mapped, reference = (
        np.repeat([0, 1], [40, 60]),
        random.randint(0, 2, 100),
        random.randint(0, 3, 100),
    )
    area, pixels, shares = random.uniform(0.2, 1, 100), np.array([55.0, 4000.0]), [0.3, 0.7]
    assessment = assess(
        Sample(
            stratum,
            mapped,
            reference,
            ['A', 'B'],
            np.array(shares),
            pixels,
            np.ones((2, 2), bool),
            ['a', 'b', 'c'],
            weights=area,
        )
    )

    def mean(y: np.ndarray) -> float:
        return sum(
            share * (area * y)[stratum == h].sum() / area[stratum == h].sum()
            for h, share in enumerate(shares)
        )

    def error(y: np.ndarray, value: float, x: np.ndarray) -> float:
        residual, variance = (y - value * x) / mean(x), 0.0
        for h, share in enumerate(shares):
            r, a = residual[stratum == h], area[stratum == h]
            deviations = a * (r - (a * r).sum() / a.sum())
            count = len(a)
            variance += (
                (share / a.mean()) ** 2
                * (1 - count / pixels[h])
                * (deviations**2).sum()
                / (count - 1)
                / count
            )
        return float(np.sqrt(variance))

    one, right = np.ones(100), mapped == reference
    for quantity, name, y, x in (
        (OVERALL, '', right, one),
        (AREA, 'c', reference == 2, one),
        (USERS, 'a', right & (mapped == 0), mapped == 0),
        (PRODUCERS, 'b', right & (mapped == 1), reference == 1),
    ):
        result = assessment.get(quantity, name)
        value = mean(y * 1.0) / mean(x * 1.0)
        assert result.value == pytest.approx(value, rel=1e-12)
        assert result.error == pytest.approx(error(y * 1.0, value, x * 1.0), rel=1e-9)
    assert assessment.matrix[1, 2] == pytest.approx(mean(((mapped == 1) & (reference == 2)) * 1.0))
    assert assessment.matrix.sum() == pytest.approx(1)


def test_all_samples_of_a_small_stratum() -> None:
    """Over all 924 samples of 6 of 12 pixels: no bias, and the variance of the estimates."""
    areas, right = np.linspace(0.5, 1, 12), np.array([1, 0, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1])
    results = []
    for chosen in itertools.combinations(range(12), 6):
        points = np.array(chosen)
        results.append(
            assess(
                Sample(
                    np.zeros(6, int),
                    np.zeros(6, int),
                    1 - right[points],
                    ['A'],
                    np.ones(1),
                    np.array([12.0]),
                    np.ones((1, 1), bool),
                    ['a', 'b'],
                    weights=areas[points],
                )
            ).get(OVERALL)
        )
    truth = (areas * right).sum() / areas.sum()
    values = np.array([result.value for result in results])
    assert values.mean() == pytest.approx(truth, abs=0.002)
    assert np.mean([result.error**2 for result in results]) == pytest.approx(
        ((values - truth) ** 2).mean(), rel=0.05
    )


def test_a_census_has_no_standard_error() -> None:
    assessment = assess(sample_of_matrix([[8, 2], [1, 9]], [10, 10], finite=True))
    overall = assessment.get(OVERALL)
    assert overall.value == pytest.approx(0.85) and overall.error == 0


@pytest.mark.parametrize(
    'matrix, text',
    [
        ([[1, 0], [5, 5]], "stratum 'A' has 1 labeled point"),
        ([[0, 0], [5, 5]], "stratum 'A' has 0 labeled point"),
    ],
)
def test_a_stratum_needs_two_points(matrix: Any, text: str) -> None:
    with pytest.raises(AssessError, match=text):
        assess(sample_of_matrix(matrix, [100, 100]))


def test_a_class_that_no_point_shows_has_an_upper_bound_and_no_accuracy() -> None:
    assessment = assess(sample_of_matrix([[0, 50, 0], [0, 40, 10], [0, 5, 45]], [10, 500, 490]))
    area = assessment.get(AREA, 'A')
    assert area.value == 0 and 0.02 < area.high < 0.1 and 'may still cover' in area.warning
    assert np.isnan(assessment.get(PRODUCERS, 'A').value)
    assert assessment.get(USERS, 'A').value == 0


def test_omissions_in_a_large_stratum_are_warned_of_and_a_balanced_map_is_not() -> None:
    rare = assess(
        sample_of_matrix([[160, 20, 20], [0, 190, 10], [0, 4, 196]], [5000, 300000, 695000])
    )
    area = rare.get(AREA, 'A')
    assert "stratum 'C'" in area.warning
    # The textbook interval ends below the true 0.53 %, the cautious one does not.
    assert area.value + Z * area.error < 0.0053 < area.high
    balanced = assess(
        sample_of_matrix([[170, 20, 10], [12, 176, 12], [10, 14, 176]], [200000, 300000, 500000])
    )
    assert [result.warning for result in balanced.results if result.warning] == []


def test_a_class_that_the_map_lacks_has_an_area_and_no_right_pixel() -> None:
    sample = sample_of_matrix([[170, 20], [12, 176]], [400000, 600000])
    reference = sample.reference.copy()
    reference[:40] = 2
    extra = assess(
        Sample(**{**vars(sample), 'reference': reference, 'class_names': ['A', 'B', 'tree']})
    )
    missed = extra.get(PRODUCERS, 'tree')
    assert (missed.value, missed.low, missed.warning) == (0, 0, '')
    assert missed.high == pytest.approx(0, abs=1e-12)
    assert extra.get(AREA, 'tree').value == pytest.approx(0.4 * 40 / 190)


def probabilities(sample: Sample, random: np.random.RandomState, worth: float) -> Sample:
    """Return a sample of two classes with probabilities that know the truth to a degree."""
    noise = random.uniform(0, 1, len(sample.reference))
    truth = (sample.reference == 0) * worth + noise * (1 - worth)
    # In the strata, 40 and 10 % of the pixels are of the first class.
    means = np.array([0.4, 0.1]) * worth + 0.5 * (1 - worth)
    known = np.einsum('hm,hk->hmk', np.eye(2), np.stack([means, 1 - means], 1))
    return Sample(
        **{**vars(sample), 'probability': np.stack([truth, 1 - truth], 1), 'known': known}
    )


def test_probabilities_that_know_something_narrow_the_interval() -> None:
    sample = sample_of_matrix([[80, 120], [20, 180]], [5e5, 5e5])
    assisted = assess(probabilities(sample, np.random.RandomState(0), 0.7))
    assert assisted.get(AREA, 'A').error < 0.6 * assisted.get(LABELS_ONLY, 'A').error
    assert assisted.get(OVERALL).error < 0.8 * assess(sample).get(OVERALL).error
    assert assisted.get(LABELS_ONLY, 'A').error == assess(sample).get(AREA, 'A').error


def test_the_assisted_mean_is_that_of_prediction_powered_inference() -> None:
    """PPI++ for known pixels: a tuned difference, with the variance of y - b g."""
    random = np.random.RandomState(0)
    g = random.uniform(size=300)
    y = (random.uniform(size=300) < g).astype(float)
    survey = Survey(np.ones((1, 300)), np.ones(1), np.full(1, 5000.0))
    estimate = estimate_assisted_mean(survey, y, g, np.array([0.47]))
    tuned = np.cov(y, g)[0, 1] / g.var(ddof=1)
    assert 0 < tuned < 1
    assert estimate.value == pytest.approx(y.mean() + tuned * (0.47 - g.mean()))
    assert estimate.variance == pytest.approx((1 - 300 / 5000) * (y - tuned * g).var(ddof=1) / 300)


def test_probabilities_that_know_nothing_change_little() -> None:
    sample = sample_of_matrix([[80, 120], [20, 180]], [5e5, 5e5])
    assisted = assess(probabilities(sample, np.random.RandomState(0), 0.0))
    expected = assess(sample).get(AREA, 'A').error
    assert assisted.get(AREA, 'A').error == pytest.approx(expected, rel=0.02)


def test_an_assisted_estimate_beyond_one_has_an_interval_and_a_warning() -> None:
    """The points show fewer pixels of class A than the probabilities of the whole map expect."""
    random = np.random.RandomState(0)
    reference = np.repeat([0, 1], [80, 40])
    first = np.where(reference == 0, 0.7, 0.3) + random.uniform(-0.2, 0.2, 120)
    zero = np.zeros(120, int)
    sample = Sample(
        zero,
        zero,
        reference,
        ['A'],
        np.ones(1),
        np.array([1e6]),
        np.array([[True, False]]),
        ['A', 'B'],
        np.stack([first, 1 - first], 1),
        np.array([[[0.95, 0.05], [0, 0]]]),
    )
    assessment = assess(sample)
    for quantity, name, value, text in (
        (AREA, 'A', 1, 'above 100 %'),
        (AREA, 'B', 0, 'below 0 %'),
        (OVERALL, '', 1, 'above'),
    ):
        result = assessment.get(quantity, name)
        assert result.value == value and text in result.warning
        assert 0 <= result.low <= value + 1e-9 and value - 1e-9 <= result.high <= 1
        assert result.high - result.low > 0.02
    assert 0.5 < assessment.get(LABELS_ONLY, 'A').value < 0.8


def test_no_interval_is_unknown_without_a_warning() -> None:
    random = np.random.RandomState(0)
    for number in range(150):
        strata, classes = random.randint(1, 4), random.randint(2, 4)
        count = random.randint(2, 12, strata)
        stratum = np.repeat(np.arange(strata), count)
        mapped, reference = random.randint(0, classes, (2, len(stratum)))
        reference = np.where(
            random.uniform(size=len(stratum)) < random.uniform(), mapped, reference
        )
        probability = random.dirichlet(np.full(classes, 0.3), len(stratum))
        known = random.dirichlet(np.full(classes**2, 0.3), strata).reshape(strata, classes, -1)
        sample = Sample(
            stratum,
            mapped,
            reference,
            list(map(str, range(strata))),
            random.uniform(0.1, 1, strata),
            count + random.choice([0, 1, 1000], strata),
            np.ones((strata, classes), bool),
            list('ABC'[:classes]),
            *((probability, known) if number % 2 else (None, None)),
            weights=random.uniform(0.1, 1, len(stratum)),
        )
        for result in assess(sample).results:
            assert np.isfinite([result.low, result.high]).all(), result
            assert 0 <= result.low <= result.high <= 1, result
            if np.isnan([result.value, result.error]).any():
                assert result.warning, result
            else:
                assert result.low - 1e-9 <= result.value <= result.high + 1e-9, result
