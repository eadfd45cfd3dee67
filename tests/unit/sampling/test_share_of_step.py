"""The weight of a filtered step: adding up all draws gives the share of valid samples exactly."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace
from typing import Any, Dict, Iterator, List, Sequence

import pytest

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling import BatchShare, BlockSampler, Validity

RATE = 0.41


class Draws:
    """Samples that are valid or not as a script says; one that is used beyond it is an error."""

    def __init__(self) -> None:
        self.script: Iterator[int] = iter(())
        self.taken: List[int] = []

    def set(self, script: Sequence[int]) -> None:
        self.script, self.taken = iter(script), []

    def __call__(self, rank: int, wanted: int) -> List[int]:
        sample = next(self.script)
        self.taken.append(sample)
        return [sample]


def probability(samples: Sequence[int]) -> float:
    result = 1.0
    for sample in samples:
        result *= RATE if sample else 1 - RATE
    return result


def mean_weight(batch: int, resamples: int, **settings: Any) -> Dict[str, float]:
    """Return the expected gradient where each valid sample has the gradient 1, and its parts.

    A virtual rank for each sample of the global batch, all in this process. Every sequence of
    valid and invalid samples is drawn once and weighted by its probability.
    """
    draws = Draws()
    total = naive = covered = 0.0
    seen = set()
    for script in itertools.product((0, 1), repeat=batch * (resamples + 1)):
        draws.set(script)
        sampler = BlockSampler(
            draws,
            lambda rank, samples: [float(sample) for sample in samples],
            Validity(low=0.5),
            1,
            ranks=VirtualRanks(batch, 1),
            max_age=0,
            max_resample_times=resamples,
            max_refill_rounds=1,
            **settings,
        )
        batches = sampler.sample_block()
        taken = tuple(draws.taken)
        if taken in seen:  # the step ended before the scripts differ
            continue
        seen.add(taken)
        weight = probability(taken)
        covered += weight
        for turn, sampled in enumerate(batches):
            step = BatchShare.of(sampled, turn)
            gradient = sum(sampled.samples) / len(sampled.samples) * step.loss_weight / batch
            total += weight * gradient * step.share
            naive += (
                weight
                * gradient
                * (1 if sampled.statistics.outcome == 'fallback' else sampled.statistics.pass_rate)
            )
    return dict(total=total, naive=naive, covered=covered)


@pytest.mark.parametrize('shortfall', ['fallback', 'pad', 'shrink'])
@pytest.mark.parametrize('batch, resamples', [(1, 3), (1, 0), (2, 2), (3, 2), (4, 1)])
def test_the_expected_gradient_is_that_without_a_filter(
    batch: int, resamples: int, shortfall: str
) -> None:
    means = mean_weight(batch, resamples, shortfall=shortfall)
    assert means['covered'] == pytest.approx(1, abs=1e-12)
    assert means['total'] == pytest.approx(RATE, abs=1e-12)


def test_the_pass_rate_of_the_step_would_be_too_large() -> None:
    """A step ends once enough have passed: passed / judged is 1 where the first one passes."""
    means = mean_weight(1, 8, shortfall='fallback')
    assert means['naive'] / RATE > 1.45
    assert means['total'] == pytest.approx(RATE, abs=1e-12)


def test_a_step_whose_first_batch_is_empty_counts_as_one_that_was_not_filtered() -> None:
    statistics = SimpleNamespace(outcome='full', first_pass_rate=math.nan)
    batch: Any = SimpleNamespace(statistics=statistics, loss_weight=1.0)
    assert BatchShare.of(batch, 0).share == 1.0
