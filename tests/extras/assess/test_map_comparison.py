"""Two maps at the same points: McNemar's variance, a paired interval, verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from mapsage.extras.assess.assessment import OVERALL, USERS, Sample, assess
from mapsage.extras.assess.comparison import compare
from mapsage.extras.assess.errors import AssessError
from mapsage.extras.assess.intervals import Z


def sample(mapped: np.ndarray, reference: np.ndarray, names: str = 'AB') -> Sample:
    """Return a simple random sample of a large map."""
    return Sample(
        np.zeros(len(mapped), int),
        mapped,
        reference,
        ['map'],
        np.ones(1),
        np.full(1, np.inf),
        np.ones((1, 2), bool),
        list(names),
    )


def two_maps(only_first: int, only_second: int) -> tuple:
    """Return samples of 500 points where one map alone is right at some points."""
    reference = np.arange(500) % 2
    first, second = reference.copy(), reference.copy()
    first[:only_second] ^= 1
    second[only_second : only_second + only_first] ^= 1
    # Errors that both maps share.
    first[-60:], second[-60:] = 1 - reference[-60:], 1 - reference[-60:]
    return sample(first, reference), sample(second, reference)


def test_the_difference_has_the_variance_of_mcnemar() -> None:
    first, second = two_maps(40, 20)
    overall = compare(first, second)[0]
    assert overall.quantity == OVERALL and overall.value == pytest.approx(20 / 500)
    # Paired proportions: (b + c - (b - c)^2 / n) / n^2, here with n - 1.
    variance = (60 - 20**2 / 500) / 500 / 499
    assert overall.error**2 == pytest.approx(variance)
    assert (overall.low, overall.high) == pytest.approx(
        (0.04 - Z * variance**0.5, 0.04 + Z * variance**0.5)
    )
    assert overall.better == 1 and compare(second, first)[0].better == 2


def test_shared_errors_cancel() -> None:
    first, second = two_maps(40, 20)
    apart = sum(assess(item).get(OVERALL).error ** 2 for item in (first, second)) ** 0.5
    assert compare(first, second)[0].error < 0.8 * apart
    assert compare(*two_maps(30, 28))[0].better == 0


def test_users_accuracies_are_compared_by_class() -> None:
    first, second = two_maps(40, 20)
    differences = {(item.quantity, item.class_name): item for item in compare(first, second)}
    item = differences[USERS, 'A']
    assert item.first == pytest.approx(assess(first).get(USERS, 'A').value)
    assert item.value == pytest.approx(item.first - item.second)
    # The bootstrap knows nothing of linearization.
    random, values = np.random.RandomState(0), []
    for _ in range(400):
        chosen = random.randint(0, 500, 500)
        rates = [
            (reference[chosen] == 0)[mapped[chosen] == 0].mean()
            for mapped, reference in (
                (first.mapped, first.reference),
                (second.mapped, second.reference),
            )
        ]
        values.append(rates[0] - rates[1])
    assert item.error == pytest.approx(np.std(values), rel=0.12)


def test_maps_without_a_common_class() -> None:
    first, second = two_maps(40, 20)
    with pytest.raises(AssessError, match='the maps share no class: A, B and C, D'):
        compare(first, Sample(**{**vars(second), 'class_names': ['C', 'D']}))
