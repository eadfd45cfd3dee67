"""What is kept at random weighs 1/p, so that the class prior is that of the data."""

from __future__ import annotations

import logging
import random
from typing import Any, List, Tuple

import pytest

from mapsage.sampling import DynamicSampler, Validity

PRIOR = 0.7  # share of dull tiles in the data


def walk(unbiased: bool, validity: Validity, size: int, **settings: Any) -> Tuple[float, float]:
    """Return the share of dull tiles by weight, and the mean weight, of what is trained on."""
    draw = random.Random(1)

    def fetch(wanted: int) -> List[bool]:
        tiles = [draw.random() < PRIOR for _ in range(wanted // size)]
        return [dull for dull in tiles for _ in range(size)]

    sampler = DynamicSampler(
        fetch,
        lambda samples: [draw.random() - dull for dull in samples],
        validity,
        8,
        group_size=size,
        keep_fraction=0.25,
        unbiased=unbiased,
        max_age=4,
        **settings,
    )
    dull = total = count = 0.0
    for _ in range(2000):
        batch = sampler.sample()
        assert len(batch.weights) == len(batch.samples) == 8
        for is_dull, weight in zip(batch.samples, batch.weights):
            dull, total, count = dull + is_dull * weight, total + weight, count + 1
    assert sampler.totals.shortfalls.get('fallback', 0) < 20
    return dull / total, total / count


@pytest.mark.parametrize(
    'validity, size', [(Validity(low=0.0), 1), (Validity(low=0.0), 4), (Validity(quantile=0.7), 1)]
)
def test_the_weighted_prior_is_that_of_the_data(validity: Validity, size: int) -> None:
    share, mean = walk(True, validity, size)
    # 16,000 samples, of which 6,000 are dull in groups of size, of weight 4: 4 standard deviations
    assert share == pytest.approx(PRIOR, abs=0.02 * size**0.5)
    assert mean == pytest.approx(1, abs=0.03 * size**0.5)  # the learning rate keeps its meaning


def test_without_weights_the_prior_moves() -> None:
    share, mean = walk(False, Validity(low=0.0), 1)
    assert share == pytest.approx(0.7 * 0.25 / (0.7 * 0.25 + 0.3), abs=0.02)
    assert mean == 1


def test_a_step_that_falls_back_weighs_all_alike() -> None:
    sampler = DynamicSampler(
        lambda wanted: [0.0] * 4,
        lambda scores: scores,
        Validity(low=0.5),
        4,
        keep_fraction=0.01,
        unbiased=True,
        max_resample_times=0,
    )
    batch = sampler.sample()
    assert (batch.statistics.outcome, batch.weights) == ('fallback', (1.0,) * 4)


@pytest.mark.parametrize(
    'unbiased, words',
    [(True, 'weighs 1/0.25 times as much'), (False, 'weighs as much as a valid one')],
)
def test_the_log_says_which_is_on(
    unbiased: bool, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    DynamicSampler(
        lambda wanted: [],
        lambda scores: scores,
        Validity(low=0),
        4,
        keep_fraction=0.25,
        unbiased=unbiased,
    )
    assert len(caplog.records) == 1 and words in caplog.text


def test_weights_without_anything_to_weigh_are_refused() -> None:
    with pytest.raises(ValueError, match='unbiased=True with keep_fraction=0'):
        DynamicSampler(lambda wanted: [], lambda scores: scores, Validity(low=0), 4, unbiased=True)
