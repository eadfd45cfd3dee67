"""Thresholds that follow the scores, and the warning where a fixed one does not."""

from __future__ import annotations

import logging
import math
import random
from typing import Any, List

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.sampling import DynamicSampler, ScoreWindow, Validity

finite = st.floats(-1e3, 1e3)


@given(st.lists(finite, min_size=1), st.floats(0.01, 0.99))
def test_at_most_the_share_is_below_the_quantile(scores: List[float], share: float) -> None:
    window = ScoreWindow(len(scores))
    window.add(scores)
    bound = window.quantile(share)
    assert bound in scores
    assert sum(score < bound for score in scores) <= share * len(scores)
    assert sum(score <= bound for score in scores) > share * len(scores) - 1e-9


@given(
    st.lists(st.lists(st.one_of(finite, st.just(math.nan), st.just(math.inf)), max_size=5)),
    st.integers(1, 9),
)
def test_a_window_holds_the_latest_whole_rounds(rounds: List[List[float]], size: int) -> None:
    window = ScoreWindow(size)
    for each in rounds:
        window.add(each)
    kept: List[float] = []
    for each in reversed(rounds):
        if len(kept) < size:
            kept = [score for score in each if math.isfinite(score)] + kept
    assert [score for each in window.state_dict() for score in each] == kept
    assert window.latest() == kept[-size:]
    if not kept:
        assert window.quantile(0.5) is None
    resumed = ScoreWindow(size)
    resumed.load_state_dict(window.state_dict())
    window.add([1.0, 2.0])
    resumed.add([1.0, 2.0])
    assert window.state_dict() == resumed.state_dict()


def falling(validity: Validity, steps: int, size: int = 1, **settings: Any) -> DynamicSampler:
    """Walk steps over scores of which the median falls from 2 to 0.02, as a loss does."""
    draw, step = random.Random(0), 0

    def fetch(wanted: int) -> List[float]:
        return [2 * 0.01 ** (step / steps) * draw.lognormvariate(0, 0.5) for _ in range(wanted)]

    sampler = DynamicSampler(fetch, lambda scores: scores, validity, 8, group_size=size, **settings)
    for step in range(steps):  # noqa: B007  (fetch reads it)
        sampler.sample()
    return sampler


@pytest.mark.parametrize('size', [1, 4])
def test_a_quantile_follows_a_falling_loss_where_a_fixed_bound_stops_the_training(
    size: int,
) -> None:
    fixed = falling(Validity(low=1.0), 200, size).totals
    assert sum(fixed.shortfalls.values()) > 80 and fixed.wanted > 12 * 8 * 80
    follows = falling(Validity(quantile=0.3), 200, size).totals
    assert not follows.shortfalls
    # the window is behind, most so where groups of four make few scores a round
    assert (0.6 if size == 1 else 0.42) < follows.pass_rate < 0.7
    assert follows.wanted < 8 * 300


@pytest.mark.parametrize(
    'score, outcome, passed',
    [(0.7, 'valid', 1.0), (0.0, 'valid', 1.0), (math.nan, 'fallback', 0.0)],
)
def test_a_quantile_of_equal_scores_and_of_none(score: float, outcome: str, passed: float) -> None:
    sampler = DynamicSampler(
        lambda wanted: [score] * 4, lambda scores: scores, Validity(quantile=0.9), 4
    )
    for _ in range(3):
        assert sampler.sample().statistics.outcome == outcome
    assert sampler.totals.pass_rate == passed


@pytest.mark.parametrize(
    'criteria, words',
    [
        (dict(quantile=0.0), 'quantile=0.0, expected a share between 0 and 1'),
        (dict(quantile=30), 'quantile=30'),
        (dict(quantile=math.nan), 'quantile=nan'),
        (dict(quantile=0.3, low=0.1), 'quantile=0.3 and low=0.1 are both lower bounds'),
    ],
)
def test_quantiles_that_cannot_be_meant_are_refused(criteria: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Validity(**criteria)


def warnings(caplog: pytest.LogCaptureFixture) -> List[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno == logging.WARNING and 'fell short: ' not in record.getMessage()
    ]


def test_a_collapse_is_told_with_its_numbers_and_not_every_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    falling(Validity(low=1.0), 600)
    told = warnings(caplog)
    assert 2 <= len(told) <= 5  # of 600 steps
    assert all(text.startswith('[DynSample] The pass rate has collapsed: ') for text in told)
    assert '0.0% of 2080 samples were valid in the last 20 steps (low=1)' in told[-1]
    assert '13.0 times as many samples as it needs, and 20 of 20 steps fell short ' in told[-1]
    assert "(shortfall='fallback')" in told[-1]
    assert 'median 0.0' in told[-1] and '100% of the groups score 1 or less' in told[-1]
    assert 'validity=dict(quantile=0.3)' in told[-1]
    pauses = [int(text.split('Next look in ')[1].split()[0]) for text in told]
    assert pauses == [40 * 2**k for k in range(len(told))]


def test_a_healthy_run_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    falling(Validity(quantile=0.3), 100)
    falling(Validity(low=0.0), 100)
    assert not warnings(caplog)


@pytest.mark.parametrize(
    'validity, score, words',
    [
        (
            Validity(high=0.5),
            0.7,
            '100% of the groups score 0.5 or more: half of them pass with high=0.7',
        ),
        (Validity(low=0.5), math.nan, 'Most scores are NaN or infinite'),
        (Validity(quantile=0.3), math.inf, 'Most scores are NaN or infinite'),
    ],
)
def test_the_warning_names_the_criterion(
    validity: Validity, score: float, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    sampler = DynamicSampler(lambda wanted: [score] * 2, lambda scores: scores, validity, 2)
    for _ in range(20):
        sampler.sample()
    assert len(warnings(caplog)) == 1
    assert words in warnings(caplog)[0]


@pytest.mark.parametrize(
    'validity, words',
    [
        (Validity(eps=0.1), 'in the summaries, and lower eps if it is no_spread. Next'),
        (
            Validity(eps=0),
            'in the summaries. With eps=0, no_spread means that all scores of a group are equal',
        ),
        (Validity(high=0.9, low=0.8), 'half of them pass with low=0.5'),
    ],
)
def test_the_warning_looks_at_the_spread_too(
    validity: Validity, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    """There is no lower eps than 0."""
    sampler = DynamicSampler(
        lambda wanted: [0.5] * 2, lambda scores: scores, validity, 2, group_size=2
    )
    for _ in range(20):
        sampler.sample()
    [warning] = warnings(caplog)
    assert words in warning and ('lower eps' in warning) == bool(validity.eps)
