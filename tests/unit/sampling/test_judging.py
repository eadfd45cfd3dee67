"""A batch of one virtual rank is fetched, scored and sorted into groups, without other ranks."""

from __future__ import annotations

import math
from typing import Any, List, Sequence, Tuple

import pytest

from mapsage.sampling import SamplingSettings, StepStatistics, Validity
from mapsage.sampling.judging import Judge
from mapsage.sampling.step import Findings, StepInProgress


def judge(
    scores: Sequence[float], attempt: int = 0, step: int = 1, **settings: Any
) -> Tuple[StepInProgress, List[Tuple[List[float], str]]]:
    """Judge one batch whose samples are their scores; return the step and the observed groups."""
    observed: List[Tuple[List[float], str]] = []
    seed = settings.pop('seed', 0)
    judging = Judge(
        lambda rank, wanted: list(scores),
        lambda rank, samples: samples,
        SamplingSettings(Validity(low=0.5), 2, group_size=2, **settings),
        seed,
        observe=lambda samples, reason: observed.append((list(samples), reason)),
    )
    progress = StepInProgress(
        StepStatistics(step=step, goal=2, carried=0), [Findings(0, [])], attempt=attempt
    )
    judging.fetch_and_judge(progress, progress.findings[0], 2, None, None)
    return progress, observed


def test_groups_are_sorted_and_counted() -> None:
    step, observed = judge([1, 1, 0, 0, 1, math.nan])
    (findings,) = step.findings
    assert [group.samples for group in findings.usable] == [[1, 1]]
    assert [group.samples[0] for group in findings.original] == [1, 0, 1]
    assert (findings.judged, findings.passed, findings.not_finite) == (6, 2, 2)
    assert [bool(reason) for _, reason in observed] == [False, True, True]
    assert step.stats.fetched == 6 and step.unjudged == 0


def test_a_refill_counts_the_groups_that_it_drops() -> None:
    step, _ = judge([0, 0, 0, 0], attempt=1)
    (findings,) = step.findings
    # The first group fills the original batch of two samples; the fallback may use it.
    assert len(findings.original) == 1 and sum(step.stats.dropped.values()) == 2


def test_random_keep_depends_on_step_and_resample() -> None:
    def draws(**position: int) -> List[bool]:
        step, _ = judge([0.0] * 80, keep_fraction=0.5, **position)
        return [group.at_random for group in step.findings[0].original]

    first = draws()
    assert 8 < sum(first) < 32 and draws() == first
    assert all(draws(**other) != first for other in (dict(step=2), dict(attempt=1), dict(seed=1)))


def test_a_score_that_raises_leaves_the_samples_unjudged() -> None:
    step = StepInProgress(StepStatistics(step=1, goal=2, carried=0), [Findings(0, [])])

    def score(rank: int, samples: Sequence[Any]) -> Any:
        raise ArithmeticError('no score')

    judging = Judge(
        lambda rank, wanted: [1, 2],
        score,
        SamplingSettings(Validity(low=0.5), 2),
    )
    with pytest.raises(ArithmeticError):
        judging.fetch_and_judge(step, step.findings[0], 2, None, None)
    assert step.unjudged == 2
