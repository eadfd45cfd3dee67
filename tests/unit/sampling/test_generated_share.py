"""How many samples are generated for each one that is trained on."""

from __future__ import annotations

import logging
import random
from typing import Any, List, Tuple

import pytest

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling import BlockSampler, Totals, Validity

GROUP = 4


def walk(
    rate: float, steps: int, ranks: int = 4, groups: int = 8, **settings: Any
) -> Tuple[Totals, List[int]]:
    """Walk steps on several virtual ranks; return the sums and what each rank was asked for."""
    draw = random.Random(1)
    asked = [0] * ranks

    def fetch(rank: int, wanted: int) -> List[float]:
        assert wanted % GROUP == 0
        asked[rank] += wanted
        return [
            score
            for _ in range(wanted // GROUP)
            for score in ([0.0, 1.0, 0.0, 1.0] if draw.random() < rate else [1.0] * GROUP)
        ]

    sampler = BlockSampler(
        fetch,
        lambda rank, samples: samples,
        Validity(eps=1e-6),
        groups * GROUP,
        ranks=VirtualRanks(ranks, 1),
        group_size=GROUP,
        shortfall='mask',
        **settings,
    )
    for _ in range(steps):
        sampler.sample_block()
    return sampler.totals, asked


@pytest.mark.parametrize('rate', [0.8, 0.6, 0.4])
def test_little_more_is_generated_than_the_pass_rate_demands(rate: float) -> None:
    totals, asked = walk(rate, 120)
    trained = totals.used - totals.replicated
    assert totals.fetched == sum(asked)
    assert totals.fetched / trained < 1.05 / rate
    # All ranks generate equally often, to within 2 %.
    assert max(asked) < 1.02 * min(asked)


def test_where_surplus_waits_almost_no_step_falls_short() -> None:
    totals, _ = walk(0.4, 100, max_age=1)
    assert sum(totals.shortfalls.values()) <= 3
    assert totals.fetched / (totals.used - totals.replicated) < 1.05 / 0.4


def test_small_fetches_are_no_collapse(caplog: pytest.LogCaptureFixture) -> None:
    """A resample of one group is a small thing, however many there are."""
    caplog.set_level(logging.WARNING)
    totals, _ = walk(0.58, 60, ranks=1, groups=8, max_resample_times=40)
    assert totals.attempts > 2 * totals.steps
    assert not [record for record in caplog.records if 'collapsed' in record.getMessage()]
