"""Ranks that raise, die, are late or have nothing; and no sample that is lost."""

from __future__ import annotations

import math
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Sequence

import pytest
import torch
from agreeing import wait_for_others, wait_until_done
from forked import DIED, fork_scenarios
from sampling_ranks import Answers, answers_of, scores, start
from support import main_leg

from mapsage.distributed import open_channel
from mapsage.sampling import (
    DynamicSampler,
    EndOfData,
    SampleMismatchError,
    ShortfallError,
    Validity,
)

pytestmark = main_leg
WORLDS = [2, 4, 8]
STEPS = 200  # at 8 ranks
LATE = 20.0  # seconds, at 2 ranks
IMPATIENT = 8.0  # seconds a rank may be late where that matters


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('sampling'))


def run_scenarios(folder: Path) -> Dict[str, Any]:
    return fork_scenarios(scenarios(), folder, 400)


def account_for_every_sample(steps: int, policy: str) -> Any:
    """Walk random steps; return ids used, dropped by count, pooled and fetched on this rank."""
    rank = start()
    draw, fetched, used = random.Random(rank), [], []
    step = 0

    def fetch(wanted: int) -> List[dict]:
        if draw.random() < 0.02:
            time.sleep(draw.random() * 0.01)
        # half of the steps need no resample, which takes most of the time
        chance = 1.0 if random.Random(step).random() < 0.5 else draw.choice([0.0, 0.3, 0.6, 1.0])
        new = []
        for _ in range(2 * draw.randint(0, 3) if draw.random() < 0.02 else 4):
            score = math.nan if draw.random() < 0.001 else float(draw.random() < chance)
            new.append(
                dict(
                    id=(rank, len(fetched) + len(new)),
                    score=score,
                    x=torch.zeros(draw.randint(0, 5)),
                )
            )
        fetched.extend(each['id'] for each in new)
        return new

    sampler = DynamicSampler(
        fetch,
        scores,
        Validity(low=0.5),
        4,
        group_size=2,
        max_resample_times=2,
        shortfall=policy,
        max_age=2,
    )
    failed = 0
    sizes = Counter()
    for step in range(steps):  # noqa: B007  (fetch reads it)
        try:
            batch = sampler.sample()
        except ShortfallError:  # an original batch may be empty here
            failed += 1
            continue
        seen = [sample['id'] for sample in batch.samples]
        used += seen
        sizes[len(seen), batch.statistics.outcome] += 1
    pool = [sample['id'] for group in sampler.state_dict()['pool'] for sample in group['samples']]
    return dict(
        fetched=fetched,
        used=used,
        pool=pool,
        totals=sampler.totals,
        sizes=dict(sizes),
        failed=failed,
    )


@pytest.mark.parametrize('scenario', ['account fallback', 'account shrink', 'account pad'])
def test_each_sample_is_used_dropped_with_a_reason_or_in_the_pool(
    scenario: str, answers: Answers
) -> None:
    every = answers.of(scenario)
    fetched = [sample for each in every for sample in each['fetched']]
    used = [sample for each in every for sample in each['used']]
    pool = [sample for each in every for sample in each['pool']]
    dropped = sum(sum(each['totals'].dropped.values()) for each in every)
    times = Counter(used)
    replicated = sum(count - 1 for count in times.values())
    assert replicated == sum(each['totals'].replicated for each in every)
    assert not set(times) & set(pool)
    assert set(times) | set(pool) <= set(fetched)
    assert len(fetched) == len(times) + len(pool) + dropped
    assert len(fetched) == sum(each['totals'].fetched for each in every)
    assert {each['totals'].steps for each in every} == {every[0]['totals'].steps}
    assert len({each['totals'].moved_samples for each in every}) == 1
    assert every[0]['totals'].moved_samples > 0
    assert len({each['failed'] for each in every}) == 1
    assert all(
        size == 4 for each in every for size, outcome in each['sizes'] if outcome != 'shrink'
    )


def account_through_faults(steps: int, policy: str) -> Any:
    """Walk steps in which any rank may fail anywhere, and continue after each error."""
    rank = start()
    draw, fetched, used = random.Random(100 + rank), [], []

    def strike(what: str) -> None:
        if draw.random() < 0.04:
            raise OSError(what)

    def fetch(wanted: int) -> List[dict]:
        strike('fetch')
        pairs = [float(draw.random() < 0.5 + 0.1 * rank) for _ in range(draw.randint(1, 3))]
        new = [
            dict(id=(rank, len(fetched) + k), score=pairs[k // 2]) for k in range(2 * len(pairs))
        ]
        fetched.extend(each['id'] for each in new)
        if draw.random() < 0.02:
            new[-1]['open'] = lambda: None  # cannot be sent
        return new

    def score(samples: Sequence[dict]) -> List[float]:
        strike('score')
        return scores(samples)

    def place(sample: dict) -> dict:
        strike('place')
        return sample

    validity = Validity(quantile=0.4) if policy == 'quantile' else Validity(low=0.5)
    sampler = DynamicSampler(
        fetch,
        score,
        validity,
        4,
        group_size=2,
        max_resample_times=2,
        max_age=2,
        place=place,
        channel=open_channel(None, None, 'sampling'),
        shortfall='fallback' if policy == 'quantile' else policy,
        keep_fraction=0.2,
        unbiased=True,
        observe=lambda group, reason: strike('observe'),
    )
    errors, weights = [], []
    for _ in range(steps):
        try:
            batch = sampler.sample()
        except Exception as error:
            errors.append((type(error).__name__, str(error).split('failed in')[-1]))
            continue
        used += [sample['id'] for sample in batch.samples]
        weights.append(
            [(sample['score'], weight) for sample, weight in zip(batch.samples, batch.weights)]
            if batch.statistics.outcome == 'valid'
            else []
        )
    state = sampler.state_dict()
    pool = [sample['id'] for group in state['pool'] for sample in group['samples']]
    lost = sampler.totals.over_ranks(open_channel(None, None, 'sampling')).lost
    return dict(
        fetched=fetched,
        used=used,
        pool=pool,
        totals=sampler.totals,
        errors=errors,
        lost=lost,
        state=(state['step'], state['rate'], state['scores']),
        weights=weights,
    )


@pytest.mark.parametrize(
    'scenario', ['faults fallback 2', 'faults pad 3', 'faults quantile 3', 'faults shrink 5']
)
def test_no_fault_on_any_rank_loses_a_sample(scenario: str, answers: Answers) -> None:
    every = answers.of(scenario)
    fetched = [sample for each in every for sample in each['fetched']]
    times = Counter(sample for each in every for sample in each['used'])
    pool = [sample for each in every for sample in each['pool']]
    dropped: Counter = Counter()
    for each in every:
        dropped.update(each['totals'].dropped)
    assert len(set(pool)) == len(pool) and not set(times) & set(pool)
    assert len(fetched) == len(times) + len(pool) + sum(dropped.values())
    assert dropped['failed'] > 0
    assert {each['lost'] for each in every} == {0}
    # every error ends the step on all ranks, one of which raises its own
    assert len({len(each['errors']) for each in every}) == 1
    assert {kind for each in every for kind, _ in each['errors']} >= {'OSError', 'RankError'}
    told = ' '.join(text for each in every for _, text in each['errors'])
    assert all(what in told for what in ('fetch', 'score', 'place', 'observe'))
    assert len({str(each['state']) for each in every}) == 1
    if 'quantile' not in scenario:  # a weight stays with its sample when that moves
        told_apart = False
        for step in zip(*(each['weights'] for each in every)):
            kinds = {pair for each in step for pair in each}
            assert len(kinds) == len({score for score, _ in kinds}) <= 2
            told_apart |= len(kinds) == 2
            assert len({round(5 * weight if score else weight, 9) for score, weight in kinds}) <= 1
        assert told_apart


def fallback_of_more_than_the_target(drawn: Sequence[int]) -> Any:
    rank = start()
    sampler = DynamicSampler(
        lambda wanted: [dict(id=(rank, k), score=0.0) for k in range(drawn[rank])],
        scores,
        Validity(low=0.5),
        8,
        max_resample_times=0,
    )
    batch = sampler.sample()
    return [sample['id'] for sample in batch.samples], batch.statistics


def test_a_fallback_trains_on_the_target_and_no_more(answers: Answers) -> None:
    every = answers.of('fallback of more')
    assert [len(ids) for ids, _ in every] == [8, 8, 8]
    for rank, (ids, _) in enumerate(every):
        assert ids[: (8, 8, 3)[rank]] == [(rank, k) for k in range((8, 8, 3)[rank])]
    assert len({each for ids, _ in every for each in ids}) == 24
    assert sum(statistics.dropped['too_low'] for _, statistics in every[:2]) == 24 + 24 + 3 - 24
    assert {statistics.outcome for _, statistics in every} == {'fallback'}


def with_a_fault(fault: str, folder: Path) -> Any:
    """Walk into a fault of the last rank, in a resample where that makes a difference."""
    rank, world = start(), int(os.environ['WORLD_SIZE'])
    bad = rank == world - 1
    calls = iter(range(100))
    settings: dict = dict(local_target=4, shortfall='shrink')

    def fetch(wanted: int) -> List[dict]:
        call = next(calls)
        if bad and call == 1:
            if fault == 'raises':
                raise OSError('tile 17 cannot be read')
            if fault == 'dies' and world == 4:
                os.kill(os.getpid(), signal.SIGKILL)
            if fault == 'dies':
                os._exit(1)
            if fault == 'late':
                time.sleep(LATE if world == 2 else 2.0)
            if fault == 'too late':
                wait_until_done(folder, range(rank))  # the others must give up meanwhile
                time.sleep(2)  # until gloo has given up too, whose deadline is the same
            if fault == 'ends':
                raise StopIteration
            if fault == 'empty':
                return []
        if bad and fault == 'ends at once':
            raise StopIteration
        if fault == 'all end':
            raise StopIteration
        samples = [
            dict(id=(rank, call, k), x=torch.ones(2), score=float(k >= (not call)))
            for k in range(4)
        ]
        if fault in ('other keys', 'place') and not rank:  # so that this one must receive
            samples = [dict(sample, score=0.0) for sample in samples]
        if bad and fault == 'other keys':
            samples = [dict(sample, extra=1) for sample in samples]
        if bad and fault == 'nan':
            samples = [dict(sample, score=math.nan) for sample in samples]
        if bad and fault == 'metadata':
            samples = [dict(sample, open=lambda: None) for sample in samples]
        if fault == 'metadata' and not rank:
            samples = [dict(sample, score=0.0, open=1) for sample in samples]
        elif fault == 'metadata' and not bad:
            samples = [dict(sample, open=1) for sample in samples]
        return samples

    def place(sample: dict) -> dict:
        if fault == 'place':
            raise RuntimeError('out of memory on gcu:0')
        return sample

    def score(samples: Sequence[dict]) -> List[float]:
        if bad and fault == 'scorer':
            raise ZeroDivisionError('no pixels')
        return scores(samples)[:3] if bad and fault == 'few scores' else scores(samples)

    if fault == 'too late':
        settings['timeout'] = IMPATIENT
    if fault == 'parts of groups':
        settings['group_size'] = 3
    if fault == 'settings' and bad:
        settings['max_age'] = 7
    if fault == 'bad setting' and bad:
        settings['max_resample_times'] = -1
    if fault == 'no original':
        settings.update(shortfall='fallback', max_resample_times=0)
        fetch = (lambda wanted: []) if bad else fetch

    def walk() -> Any:
        # Four ranks have MapSage's channel, the others the library's.
        channel = (
            open_channel(None, settings.pop('timeout', None), 'sampling') if world == 4 else None
        )
        sampler = DynamicSampler(
            fetch, score, Validity(low=0.5), place=place, channel=channel, **settings
        )
        if fault == 'step' and bad:
            sampler._step = 3
        batch = sampler.sample()
        return [sample['id'] for sample in batch.samples], batch.statistics.outcome

    try:
        answer: Any = walk()
    except Exception as error:
        answer = type(error).__name__, str(error)
    wait_for_others(folder, [r for r in range(world) if not (fault == 'dies' and r == world - 1)])
    return answer


@pytest.mark.parametrize('world', WORLDS)
def test_an_exception_on_one_rank_reaches_all(world: int, answers: Answers) -> None:
    *others, bad = answers.of(f'raises {world}')
    assert bad == ('OSError', 'tile 17 cannot be read')
    assert others == [
        (
            'RankError',
            f'rank {world - 1} failed in fetching or scoring samples: '
            f'OSError: tile 17 cannot be read',
        )
    ] * (world - 1)


@pytest.mark.parametrize('world', WORLDS)
def test_a_rank_that_dies_in_a_resample_is_named(world: int, answers: Answers) -> None:
    *others, dead = answers.of(f'dies {world}')
    assert dead == DIED
    for kind, text in others:
        assert kind == 'RankLostError'
        assert f'rank(s) [{world - 1}]' in text


@pytest.mark.parametrize('world', WORLDS)
def test_a_late_rank_is_waited_for(world: int, answers: Answers) -> None:
    every = answers.of(f'late {world}')
    assert [len(ids) for ids, _ in every] == [4] * world
    assert {outcome for _, outcome in every} == {'valid'}


@pytest.mark.parametrize('world', WORLDS)
def test_a_rank_later_than_the_timeout_is_named_while_it_is_away(
    world: int, answers: Answers
) -> None:
    *others, late = answers.of(f'too late {world}')
    for kind, text in others:
        assert kind == 'RankLostError'
        assert f'rank(s) [{world - 1}] did not come' in text
    assert late[0] == 'RankLostError'  # nor does it continue alone


@pytest.mark.parametrize(
    'fault, sizes',
    [
        ('ends', [4] * 4),
        ('empty', [4] * 4),
        ('nan', [4] * 4),
        ('ends at once', [4] * 4),
        ('no original', [4] * 4),
    ],
)
def test_the_others_fill_the_share_of_a_rank_with_nothing(
    fault: str, sizes: List[int], answers: Answers
) -> None:
    every = answers.of(fault)
    assert [len(ids) for ids, _ in every] == sizes
    used = [each for ids, _ in every for each in ids]
    # the others drew 12 in all, of which some are trained on twice
    assert len(set(used)) == (12 if fault == 'no original' else 16)
    if fault in ('nan', 'ends at once', 'no original'):
        assert all(rank != 3 for rank, _, _ in used)


@pytest.mark.parametrize(
    'fault, raiser, kind, words',
    [
        ('scorer', 3, 'ZeroDivisionError', 'no pixels'),
        ('few scores', 3, 'ValueError', '3 scores for 4 samples'),
        ('place', 0, 'RuntimeError', 'out of memory on gcu:0'),
        ('metadata', 3, None, 'lambda'),
    ],
)
def test_a_failure_anywhere_is_one_error_on_all_ranks(
    fault: str, raiser: int, kind: str, words: str, answers: Answers
) -> None:
    every = answers.of(fault)
    assert words in every[raiser][1]
    assert kind in (None, every[raiser][0])
    for rank, (name, text) in enumerate(every):
        if rank != raiser:
            assert name == 'RankError'
            assert text.startswith(f'rank {raiser} failed in')
            assert text.endswith(f'{every[raiser][0]}: {every[raiser][1]}')


@pytest.mark.parametrize(
    'fault, error, words',
    [
        (
            'other keys',
            SampleMismatchError,
            'rank 0: none; rank 1: (id, score, x); '
            'rank 2: (id, score, x); rank 3: (extra, id, score, x)',
        ),
        (
            'parts of groups',
            ValueError,
            'local_target=4, group_size=3: expected a whole number of '
            'groups on each rank, for example local_target=3, '
            'group_size=3.',
        ),
        ('settings', None, 'rank 3: local_target=4'),
        ('bad setting', None, 'rank 3: max_resample_times=-1, expected 0 or more.'),
        ('step', None, 'rank 3: step 4, resample 0'),
        ('all end', EndOfData, 'the loaders of all 4 rank(s) have ended'),
    ],
)
def test_ranks_that_cannot_go_on_raise_the_same_error(
    fault: str, error: Any, words: str, answers: Answers
) -> None:
    every = answers.of(fault)
    assert len(set(every)) == 1
    assert every[0][0] == (error.__name__ if error else 'LockstepError')
    assert words in every[0][1]


# By criterion: itself, a group that meets it, one that does not, and the reason for that.
CRITERIA: Dict[str, Any] = {
    'spread': (Validity(eps=0.0), [0.0, 1.0], [2.0, 2.0], 'no_spread'),
    'low': (Validity(low=0.5), [1.0, 1.0], [0.0, 0.0], 'too_low'),
    'high': (Validity(high=0.5), [0.0, 0.0], [1.0, 1.0], 'too_high'),
}
# By rank, the groups of its first batch: good, poor, or a score in them. Later ones are good.
NAN, INF = math.nan, math.inf
FIRST_BATCHES: List[List[Any]] = [
    [NAN, 'good', 'good', 'good'],
    [INF, -INF, 'good', 'good'],
    [NAN, 'poor', INF, 'good'],
    ['poor', 'good', -INF, NAN],
]
NOT_FINITE = {
    (rank, 0, k)
    for rank, groups in enumerate(FIRST_BATCHES)
    for k in range(8)
    if not isinstance(groups[k // 2], str)
}
POOR = {
    (rank, 0, k)
    for rank, groups in enumerate(FIRST_BATCHES)
    for k in range(8)
    if groups[k // 2] == 'poor'
}


def scores_that_are_not_finite(criterion: str, keep_fraction: float) -> Any:
    """Walk two steps; return ids used, dropped and what is in the pool."""
    rank, calls = start(), iter(range(100))
    validity, good, poor, _ = CRITERIA[criterion]

    def fetch(wanted: int) -> List[dict]:
        call, batch = next(calls), []
        for number, kind in enumerate(['good'] * 4 if call else FIRST_BATCHES[rank]):
            pair = {'good': good, 'poor': poor}.get(kind, [good[0], kind])
            batch += [
                dict(id=(rank, call, 2 * number + k), score=score) for k, score in enumerate(pair)
            ]
        return batch

    sampler = DynamicSampler(
        fetch, scores, validity, 8, group_size=2, keep_fraction=keep_fraction, shortfall='pad'
    )
    steps = [sampler.sample() for _ in range(2)]
    return (
        [[sample['id'] for sample in step.samples] for step in steps],
        [step.statistics for step in steps],
        {sample['id'] for group in sampler.state_dict()['pool'] for sample in group['samples']},
    )


@pytest.mark.parametrize('keep_fraction', [0.0, 1.0])
@pytest.mark.parametrize('criterion', CRITERIA)
def test_scores_that_are_not_finite_are_never_valid_nor_kept(
    criterion: str, keep_fraction: float, answers: Answers
) -> None:
    every = answers.of(f'not finite, {criterion} {keep_fraction}')
    for rank, (steps, statistics, pool) in enumerate(every):
        assert [len(ids) for ids in steps] == [8, 8]
        assert not NOT_FINITE & (set(steps[0]) | set(steps[1]) | pool)
        assert [each.not_finite for each in statistics] == [len(NOT_FINITE), 0]
        mine = len([each for each in NOT_FINITE if each[0] == rank])
        poor = len([each for each in POOR if each[0] == rank])
        # Surplus of groups with a spread does not wait.
        surplus = statistics[0].dropped.pop('surplus', 0)
        assert not surplus or criterion == 'spread'
        dropped = {'not_finite': mine, CRITERIA[criterion][3]: 0 if keep_fraction else poor}
        assert statistics[0].dropped == {reason: n for reason, n in dropped.items() if n}
        assert statistics[0].unfiltered == (poor if keep_fraction else 0)
        assert statistics[0].attempts == 1
        assert statistics[0].judged - statistics[0].passed == len(NOT_FINITE) + len(POOR)
    used = {each for steps, _, pool in every for each in steps[0] + steps[1] + sorted(pool)}
    assert bool(used & POOR) == bool(keep_fraction)


def scenarios() -> Dict[str, Any]:
    named: Dict[str, Any] = {}
    for criterion in CRITERIA:
        for keep_fraction in (0.0, 1.0):
            named[f'not finite, {criterion} {keep_fraction}'] = (
                scores_that_are_not_finite,
                4,
                criterion,
                keep_fraction,
            )
    for world in WORLDS:
        for fault in ('raises', 'dies', 'late', 'too late'):
            named[f'{fault} {world}'] = with_a_fault, world, fault, Path
    for fault in (
        'ends',
        'ends at once',
        'empty',
        'nan',
        'scorer',
        'few scores',
        'place',
        'metadata',
        'other keys',
        'parts of groups',
        'settings',
        'bad setting',
        'step',
        'all end',
        'no original',
    ):
        named[fault] = with_a_fault, 4, fault, Path
    for policy, world in (('fallback', 2), ('pad', 3), ('quantile', 3), ('shrink', 5)):
        named[f'faults {policy} {world}'] = account_through_faults, world, 120, policy
    named['fallback of more'] = fallback_of_more_than_the_target, 3, (24, 24, 3)
    named['account fallback'] = account_for_every_sample, 8, STEPS, 'fallback'
    named['account shrink'] = account_for_every_sample, 4, 100, 'shrink'
    named['account pad'] = account_for_every_sample, 4, 100, 'pad'
    return named
