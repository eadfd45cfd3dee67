"""The loop on one rank: settings, accounting, pool, resume. Many ranks: tests/distributed."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Iterator, List, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mapsage.sampling import (
    DynamicSampler,
    EndOfData,
    ShortfallError,
    SurplusPool,
    Validity,
)
from mapsage.sampling.pool import Group
from mapsage.sampling.shortfall import divide_groups, refill_size

Sample = dict


def loader(batches: Sequence[Sequence[float]]) -> Callable[[int], List[Sample]]:
    """Return a fetch of batches of scores; samples are numbered from 0."""
    number = iter(range(10**6))
    source = iter(batches)
    return lambda wanted: [
        dict(id=next(number), score=score, x=torch.tensor(score)) for score in next(source)
    ]


def make(fetch: Callable[[int], Any], **settings: Any) -> DynamicSampler:
    options: dict = dict(validity=Validity(low=0), local_target=4)
    options.update(settings)
    return DynamicSampler(fetch, lambda samples: [each['score'] for each in samples], **options)


def ids(samples: List[Sample]) -> List[int]:
    return [sample['id'] for sample in samples]


def test_three_resamples_are_made_and_each_is_judged() -> None:
    batch = make(loader([[0] * 4, [0] * 4, [0] * 4, [1] * 4])).sample()
    assert ids(batch.samples) == [12, 13, 14, 15]
    assert (batch.statistics.attempts, batch.statistics.outcome) == (3, 'valid')
    short = make(loader([[0] * 4, [0] * 4, [0] * 4, [0] * 4, [1] * 4])).sample()
    assert (short.statistics.attempts, short.statistics.outcome) == (3, 'fallback')
    assert ids(short.samples) == [0, 1, 2, 3]


def test_no_resample_is_made_when_none_is_allowed() -> None:
    batch = make(loader([[1, 1, 1, 0]]), max_resample_times=0, shortfall='shrink').sample()
    assert ids(batch.samples) == [0, 1, 2]
    assert batch.loss_weight == 1
    assert batch.statistics.wanted == 0


def test_surplus_waits_its_turn_and_expires() -> None:
    sampler = make(
        loader([[1, 0, 1, 0], [1, 1, 1, 0], [1] * 4, [0] * 4, [0] * 4, [1] * 4]),
        max_resample_times=1,
        max_age=1,
        max_refill_rounds=1,
    )
    assert ids(sampler.sample().samples) == [0, 2, 4, 5]  # 6 stays
    third = sampler.sample()
    assert ids(third.samples) == [6, 8, 9, 10]  # the oldest first; 11 stays
    assert third.statistics.surplus == 1
    # none of the batch and of the resample is valid; 11 is kept, for one step only
    short = sampler.sample()
    assert (short.statistics.outcome, short.statistics.surplus) == ('fallback', 1)
    fourth = sampler.sample()
    assert ids(fourth.samples) == [20, 21, 22, 23]
    assert fourth.statistics.dropped == {'expired': 1}


def test_samples_twice_in_a_batch_are_two_objects() -> None:
    batch = make(loader([[1, 1, 1, 0]]), max_resample_times=0, shortfall='pad').sample()
    assert ids(batch.samples) == [0, 1, 2, 0]
    batch.samples[3]['x'] += 5
    assert batch.samples[0]['x'] == 1
    assert batch.statistics.replicated == 1


def test_scores_that_are_not_finite_are_counted_and_never_kept() -> None:
    batch = make(loader([[math.nan, 1, math.inf, 1], [1, 1, 1, 1]]), keep_fraction=1.0).sample()
    assert ids(batch.samples) == [1, 3, 4, 5]
    assert batch.statistics.dropped == {'not_finite': 2}
    assert batch.statistics.not_finite == 2


def test_a_share_of_what_is_not_valid_is_kept_reproducibly() -> None:
    kept = []
    for seed in (0, 0, 1):
        sampler = make(
            loader([[0] * 1000]), keep_fraction=0.3, local_target=100, max_age=0, seed=seed
        )
        kept.append(sampler.sample())
    assert ids(kept[0].samples) == ids(kept[1].samples) != ids(kept[2].samples)
    unfiltered = kept[0].statistics.unfiltered
    assert 230 < unfiltered < 370  # 5 standard deviations
    assert kept[0].statistics.dropped == {'too_low': 1000 - unfiltered, 'surplus': unfiltered - 100}
    assert kept[0].statistics.pass_rate == 0


def test_the_end_of_the_data_leaves_the_pool() -> None:
    sampler = make(loader([[1] * 6]), max_resample_times=1)
    sampler.sample()
    before = sampler.state_dict()
    for _ in range(3):
        with pytest.raises(EndOfData, match='step 2'):
            sampler.sample()
    assert sampler.state_dict()['pool'] == before['pool']
    assert ids(sampler.sample([dict(id=9, score=1), dict(id=10, score=1)]).samples) == [4, 5, 9, 10]


def test_the_end_of_the_data_expires_nothing() -> None:
    sampler = make(loader([[1] * 5, [0] * 4]), max_resample_times=0)
    sampler.sample()
    sampler.sample()  # sample 4 is not enough, and is too old from now on
    for _ in range(2):
        with pytest.raises(EndOfData):
            sampler.sample()
        assert [ids(group['samples']) for group in sampler.state_dict()['pool']] == [[4]]


def test_nothing_is_asked_of_a_loader_that_has_ended() -> None:
    batch = make(loader([[1, 1, 0, 0]])).sample()
    assert (batch.statistics.attempts, batch.statistics.outcome) == (1, 'fallback')


def test_raise_keeps_what_was_found() -> None:
    sampler = make(
        loader([[1, 1, 0, 0], [1, 0, 0, 0], [1, 0, 0, 0]]), max_resample_times=1, shortfall='raise'
    )
    with pytest.raises(ShortfallError, match='3/4 valid'):
        sampler.sample()
    assert ids(sampler.sample().samples) == [0, 1, 4, 8]
    assert sampler.totals.shortfalls == {'raise': 1}


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize('validity', [Validity(low=0), Validity(high=2), Validity(eps=0, low=0)])
def test_a_group_with_a_score_that_is_not_finite_is_dropped_whole(
    validity: Validity, bad: float
) -> None:
    scores = [[0.5, bad, 0.5, 1], [bad, bad, 1, 0.5]]
    batch = make(loader(scores), validity=validity, group_size=2, keep_fraction=1.0).sample()
    assert ids(batch.samples) == [2, 3, 6, 7]
    assert batch.statistics.dropped == {'not_finite': 4}
    assert batch.statistics.unfiltered == 0
    assert (batch.statistics.not_finite, batch.statistics.passed) == (4, 4)


@pytest.mark.parametrize(
    'policy, outcomes',
    [
        ('fallback', ['fallback'] * 3),
        ('pad', ['pad', 'fallback', 'pad']),
        ('shrink', ['shrink', 'fallback', 'shrink']),
    ],
)
def test_without_resamples_each_step_takes_the_policy(policy: str, outcomes: List[str]) -> None:
    sampler = make(
        loader([[0, 1, 1, 0], [0] * 4, [1, 0, 0, 0]]),
        shortfall=policy,
        max_resample_times=0,
        max_age=0,
    )
    steps = [sampler.sample() for _ in range(3)]
    assert [step.statistics.outcome for step in steps] == outcomes
    assert [ids(step.samples) for step in steps] == {
        'fallback': [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]],
        'pad': [[1, 2, 1, 2], [4, 5, 6, 7], [8, 8, 8, 8]],
        'shrink': [[1, 2], [4, 5, 6, 7], [8]],
    }[policy]
    totals = sampler.totals
    assert (totals.wanted, totals.attempts, totals.missing, totals.surplus) == (0, 0, 9, 0)
    assert totals.fetched == totals.used - totals.replicated + sum(totals.dropped.values())
    assert totals.dropped == ({} if policy == 'fallback' else {'too_low': 5})


@pytest.mark.parametrize(
    'settings_, message',
    [
        (
            dict(local_target=6, group_size=4),
            'local_target=6, group_size=4: expected a whole number of '
            'groups on each rank, for example local_target=4, '
            'group_size=4[.]$',
        ),
        (dict(local_target=2, group_size=4), 'local_target=2.* for example local_target=4'),
        (dict(local_target=0), 'local_target=0'),
        (dict(group_size=0), 'group_size=0'),
        (dict(max_resample_times=-1), 'max_resample_times=-1'),
        (dict(max_refill_rounds=0), 'max_refill_rounds=0'),
        (dict(keep_fraction=1.5), 'keep_fraction'),
        (dict(max_age=-1), 'max_age=-1'),
        (dict(shortfall='wait'), "'wait', expected one of"),
        (dict(validity=Validity(eps=0)), 'group_size=1'),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings_: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(loader([]), **settings_)


def test_batches_and_scores_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match='batch of 3 samples .* group_size=2'):
        make(loader([[1] * 3]), group_size=2).sample()
    with pytest.raises(ValueError, match='2 scores for 4 samples'):
        DynamicSampler(loader([[1] * 4]), lambda _: [1, 1], Validity(low=0), 4).sample()


@given(st.integers(1, 10**6), st.floats(0, 1), st.integers(1, 10**7), st.sampled_from([-2, 0, 1]))
def test_refills_are_the_deficit_over_the_pass_rate(
    deficit: int, rate: float, limit: int, deviations: int
) -> None:
    def reach(groups: float) -> float:
        return groups * rate + deviations * math.sqrt(groups * rate * (1 - rate))

    wanted = refill_size(deficit, rate, limit, deviations)
    assert 1 <= wanted <= limit
    if rate and 1 < wanted < limit:
        rounding = 0.5 if deviations > 0 else 1.0
        assert reach(wanted + 1 - rounding + 1e-6) >= deficit * (1 - 1e-9)
        assert reach(wanted - rounding - 1e-6) <= deficit * (1 + 1e-9)


@given(st.integers(0, 200), st.integers(1, 9))
def test_all_ranks_draw_equally_often(groups: int, ranks: int) -> None:
    totals = [0] * ranks
    for first in range(ranks):
        shares = divide_groups(groups, ranks, first)
        assert sum(shares) == groups and max(shares) - min(shares) <= 1
        totals = [total + share for total, share in zip(totals, shares)]
    assert len(set(totals)) == 1


def test_refills_of_the_loop_follow_the_pass_rate() -> None:
    # One of 8 is valid: 7 missing samples take 56, and the limit is 5 times the target.
    number = itertools.count()

    def fetch(wanted: int) -> List[dict]:
        return [dict(id=0, score=float(next(number) % 8 == 0)) for _ in range(wanted)]

    sampler = make(fetch, local_target=8, max_refill_rounds=5, max_resample_times=1)
    assert sampler.sample().statistics.wanted == 40
    statistics = make(fetch, local_target=8, max_refill_rounds=50).sample().statistics
    assert (statistics.wanted, statistics.attempts, statistics.outcome) == (56, 1, 'valid')


@settings(deadline=None, max_examples=40)
@given(
    st.lists(
        st.lists(st.sampled_from([0, 0, 1]), min_size=4, max_size=4), min_size=60, max_size=60
    ),
    st.sampled_from(['fallback', 'pad', 'shrink']),
    st.integers(0, 3),
    st.integers(0, 3),
    st.sampled_from([Validity(low=0), Validity(quantile=0.6)]),
    st.booleans(),
)
def test_a_resumed_loop_equals_one_that_was_not(
    batches: list, shortfall: str, max_age: int, resamples: int, validity: Validity, unbiased: bool
) -> None:
    options = dict(
        shortfall=shortfall,
        max_age=max_age,
        max_resample_times=resamples,
        group_size=2,
        keep_fraction=0.2,
        validity=validity,
        unbiased=unbiased,
    )

    def walk(sampler: DynamicSampler, steps: int) -> Iterator[Any]:
        for _ in range(steps):
            batch = sampler.sample()
            statistics = batch.statistics
            statistics.seconds = 0
            yield ids(batch.samples), batch.loss_weight, batch.weights, statistics

    fetch = loader(batches)
    straight = list(walk(make(fetch, **options), 4))
    fetch = loader(batches)
    first = make(fetch, **options)
    begun = list(walk(first, 2))
    resumed = make(fetch, **options)
    resumed.load_state_dict(first.state_dict())
    assert begun + list(walk(resumed, 2)) == straight


@given(st.lists(st.integers(0, 5)), st.integers(0, 3))
def test_the_pool_forgets_by_age_alone(found: List[int], max_age: int) -> None:
    pool, held, dropped = SurplusPool(max_age), [], 0
    for step, new in enumerate(found):
        young, old = pool.take(step)
        assert young == [group for group in held if step - group.found_at <= max_age]
        held = young + [Group([k], step) for k in range(new)]
        dropped += len(old) + len(pool.put(held))
        held = held if max_age else []
    assert len(pool) == len(held) == sum(found) - dropped


def test_a_step_that_raises_keeps_the_pool_and_is_taken_again() -> None:
    def fetch(wanted: int) -> List[dict]:
        batch = next(batches)
        if isinstance(batch, Exception):
            raise batch
        return batch

    batches: Any = iter(
        [
            [dict(id=k, score=1.0) for k in range(6)],
            OSError('tile 17'),
            [dict(id=k, score=1.0) for k in (6, 7)],
        ]
    )
    sampler = DynamicSampler(
        fetch, lambda samples: [s['score'] for s in samples], Validity(low=0), 4
    )
    sampler.sample()
    with pytest.raises(OSError, match='tile 17'):
        sampler.sample()
    assert sampler.step == 1 and len(sampler.state_dict()['pool']) == 2
    assert [sample['id'] for sample in sampler.sample().samples] == [4, 5, 6, 7]
