"""Sums of rewards, and what is remembered of a tile."""

from __future__ import annotations

import math
from typing import Any, List, Sequence

import pytest
import torch

from mapsage.distributed import SerialChannel
from mapsage.sampling import Candidate, TileHistory, Totals, Validity, WeightedRewards
from mapsage.sampling.statistics import StepStatistics


def of_index(samples: Sequence[int]) -> torch.Tensor:
    return torch.tensor(samples, dtype=torch.float32)


def test_rewards_are_summed_with_weights_in_float64() -> None:
    score = WeightedRewards([of_index, lambda samples: [0.1] * len(samples)], [2, 10])
    assert score([1, 2]).tolist() == [3.0, 5.0]
    assert score([1, 2]).dtype == torch.float64
    assert WeightedRewards([of_index, of_index])([4]).tolist() == [8.0]


def test_a_reward_that_is_nan_drops_its_group_and_no_other() -> None:
    score = WeightedRewards([of_index, lambda samples: [math.nan, 0.0, 0.0, 0.0]])
    verdict = Validity(eps=0.5).judge(score([1, 2, 3, 4]), 2)
    assert verdict.reasons == ['not_finite', '']


def test_bad_rewards() -> None:
    with pytest.raises(ValueError, match=r'1 reward function\(s\) and 2 weight\(s\)'):
        WeightedRewards([of_index], [1, 2])

    def too_few(samples: Any) -> List[float]:
        return [0.0, 0.0]

    with pytest.raises(ValueError, match='too_few returned 2 rewards for 3 samples'):
        WeightedRewards([too_few])([1, 2, 3])


def candidates(*indices: int) -> List[Candidate]:
    return [Candidate(index, index) for index in indices]


class Counting:
    """Scores a sample by what the test says, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: List[List[int]] = []
        self.value = 1.0

    def __call__(self, samples: Sequence[int]) -> List[float]:
        self.asked.append(list(samples))
        return [self.value * sample for sample in samples]


def test_a_known_tile_needs_no_second_look_until_it_is_old() -> None:
    scorer = Counting()
    history = TileHistory(scorer, momentum=0.25, recheck=3)
    assert history(candidates(1, 2)) == [1, 2]
    assert history(candidates(2, 3)) == [2, 3]
    assert history(candidates(1, 2)) == [1, 2]
    scorer.value = 9.0
    assert history(candidates(1, 3)) == [0.25 * 1 + 0.75 * 9, 3]
    assert scorer.asked == [[1, 2], [3], [1]]
    assert history.looks == 4


def test_tiles_of_unknown_index_are_always_looked_at() -> None:
    history = TileHistory(Counting())
    for _ in range(2):
        assert history([Candidate(5), Candidate(7)]) == [5, 7]
    assert history.looks == 4 and len(history.shared_state()) == 0


def test_an_average_recovers_from_nan() -> None:
    scorer = Counting()
    history = TileHistory(scorer, recheck=1)
    scorer.value = math.nan
    assert math.isnan(history(candidates(1))[0])
    scorer.value = 2.0
    assert history(candidates(1)) == [2.0]


def test_a_history_goes_on_from_its_state() -> None:
    one, other = TileHistory(Counting(), recheck=2), TileHistory(Counting(), recheck=2)
    one(candidates(1, 2))
    one.share(SerialChannel())
    one(candidates(3))
    other.load_state(one.shared_state(), one.rank_state())
    assert other(candidates(1, 3)) == one(candidates(1, 3))
    assert other.rank_state() == one.rank_state()
    assert torch.equal(other.shared_state(), one.shared_state())


@pytest.mark.parametrize(
    'settings, words',
    [
        (dict(momentum=1.0), 'momentum=1.0, expected a share'),
        (dict(recheck=0), 'recheck=0, expected 1 call'),
    ],
)
def test_bad_settings(settings: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        TileHistory(Counting(), **settings)


def test_totals_of_one_process_are_its_own() -> None:
    totals = Totals()
    step = StepStatistics(
        judged=8, passed=6, used=4, fetched=8, seconds=0.5, missing=2, outcome='pad', surplus=2
    )
    step.drop('too_low', 2)
    totals.add(step)
    together = totals.over_ranks(SerialChannel())
    assert vars(together) == vars(totals)
    assert together.summary() == (
        '[DynSample] 1 step(s): pass rate 75.0% of 8 samples, 0 resample(s) of 0 sample(s), '
        '0 sample(s) moved (0.0 MiB), surplus 2, shortfalls: pad 1, dropped: too_low 2, 0.5 s'
    )
