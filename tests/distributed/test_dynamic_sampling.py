"""The scenarios of the reports, between real processes, with the lines users know."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from sampling_ranks import (
    Answers,
    Lines,
    answers_of,
    batches,
    logger_with,
    sampler_of,
    start,
)

from mapsage.sampling import POLICIES, ShortfallError


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('sampling'))


def run_scenarios(folder: Path) -> Dict[str, Any]:
    return fork_scenarios(scenarios(), folder)


def reported(valid: Sequence[Sequence[int]], settings: dict) -> Dict[str, Any]:
    """Walk one step; ``valid[k][rank]`` samples of a rank's k-th batch are valid."""
    rank, lines = start(), Lines()
    size = settings.get('local_target', 16)
    sampler = sampler_of(
        batches(rank, [row[rank] for row in valid], size), logger=logger_with(lines), **settings
    )
    try:
        batch = sampler.sample()
    except ShortfallError as error:
        return dict(error=str(error), lines=lines.lines)
    assert all(
        torch.equal(sample['x'], torch.full((sample['id'][2] % 3 + 1, 2), float(sample['id'][0])))
        for sample in batch.samples
    )
    return dict(
        ids=[sample['id'] for sample in batch.samples],
        weight=batch.loss_weight,
        weights=batch.weights,
        statistics=batch.statistics,
        lines=lines.lines,
    )


FOURS, PAIRS = dict(group_size=4), dict(group_size=2)
# Valid samples by batch and rank, settings, and the counts in the log. One resample fills up.
FILLED: Dict[str, Tuple[List[List[int]], dict, Tuple[str, str, int]]] = {
    '1 rank of 16': ([[12], [4]], FOURS, ('12/16', '16/16', 4)),
    '4 ranks of 16': ([[16, 8, 16, 16], [4, 0, 4, 0]], FOURS, ('56/64', '64/64', 8)),
    '8 ranks of 16': (
        [[16, 16, 16, 16, 16, 8, 16, 16], [0, 4, 0, 0, 0, 0, 0, 4]],
        FOURS,
        ('120/128', '128/128', 8),
    ),
    '8 ranks of 8': (
        [[8, 0, 8, 4, 8, 8, 8, 4], [4, 0, 4, 0, 4, 0, 4, 0]],
        dict(FOURS, local_target=8),
        ('48/64', '64/64', 16),
    ),
}
# From which rank how many samples are in each rank's batch, in its order: its own come first.
ORDER = {
    '1 rank of 16': [[(0, 16)]],
    '4 ranks of 16': [[(0, 16)], [(1, 8), (0, 4), (2, 4)], [(2, 16)], [(3, 16)]],
    '8 ranks of 16': [
        [(0, 16)],
        [(1, 16)],
        [(2, 16)],
        [(3, 16)],
        [(4, 16)],
        [(5, 8), (1, 4), (7, 4)],
        [(6, 16)],
        [(7, 16)],
    ],
    '8 ranks of 8': [
        [(0, 8)],
        [(1, 0), (0, 4), (2, 4)],
        [(2, 8)],
        [(3, 4), (4, 4)],
        [(4, 8)],
        [(5, 8)],
        [(6, 8)],
        [(7, 4), (6, 4)],
    ],
}


def valid_ones(valid: Sequence[Sequence[int]], size: int = 16) -> List[Tuple[int, int, int]]:
    return [
        (rank, number, k)
        for rank in range(len(valid[0]))
        for number, row in enumerate(valid)
        for k in range(size - row[rank], size)
    ]


@pytest.mark.parametrize('scenario', FILLED)
def test_one_resample_fills_every_rank_in_the_order_of_the_global_pool(
    scenario: str, answers: Answers
) -> None:
    valid, settings, (_, _, missing) = FILLED[scenario]
    every, size = answers.of(scenario), settings.get('local_target', 16)
    # a rank uses its own in the order they were found, and gives the last ones
    found = valid_ones(valid, size)
    theirs = {rank: iter([each for each in found if each[0] == rank]) for rank in range(len(every))}
    kept = [
        [next(theirs[rank]) for _ in range(parts[0][1])]
        for rank, parts in enumerate(ORDER[scenario])
    ]
    arrived = [
        [next(theirs[source]) for source, count in parts[1:] for _ in range(count)]
        for parts in ORDER[scenario]
    ]
    assert [each['ids'] for each in every] == [a + b for a, b in zip(kept, arrived)]
    assert sorted(each for batch in kept + arrived for each in batch) == found  # each of them once
    for each, more in zip(every, arrived):
        for begin in range(0, size, 4):  # groups are together
            source, number, k = each['ids'][begin]
            assert each['ids'][begin : begin + 4] == [(source, number, k + j) for j in range(4)]
            assert k % 4 == 0
        assert each['statistics'].moved_samples == (missing if len(every) > 1 else 0)
        assert each['statistics'].received == len(more)


@pytest.mark.parametrize('scenario', FILLED)
def test_the_log_of_one_resample_has_the_literal_lines(scenario: str, answers: Answers) -> None:
    _, settings, (first, filled, missing) = FILLED[scenario]
    size = settings.get('local_target', 16)
    for rank, each in enumerate(answers.of(scenario)):
        level = 'DEBUG' if rank else 'INFO'
        begin, end = size * rank, size * (rank + 1)
        assert each['lines'] == [
            (level, line)
            for line in (
                f'[DynSample] Initial batch: collected {first} valid samples globally',
                f'[DynSample] Resample #1/3: global_collected={first}, need {missing} more',
                f'[DynSample-SYNC] Rank {rank}: Fetching new batch for resample #1',
                f'[DynSample-SYNC] Rank {rank}: After resample #1, global_pool={filled}',
                f'[DynSample-FINAL] Rank {rank}: Slicing global pool [{begin}:{end}], got {size} '
                f'samples',
                f'[DynSample] Rank {rank}: Using {size} valid samples ({size // 4} groups) from global '
                f'pool after 1 resample(s)',
            )
        ]


def test_the_lines_of_a_rank_of_eight_letter_by_letter(answers: Answers) -> None:
    assert [line for _, line in answers.of('8 ranks of 16')[5]['lines']] == [
        '[DynSample] Initial batch: collected 120/128 valid samples globally',
        '[DynSample] Resample #1/3: global_collected=120/128, need 8 more',
        '[DynSample-SYNC] Rank 5: Fetching new batch for resample #1',
        '[DynSample-SYNC] Rank 5: After resample #1, global_pool=128/128',
        '[DynSample-FINAL] Rank 5: Slicing global pool [80:96], got 16 samples',
        '[DynSample] Rank 5: Using 16 valid samples (4 groups) from global pool after 1 '
        'resample(s)',
    ]


# Valid samples by batch and rank, settings, and the counts in the log. It stays short.
SHORT: Dict[str, Tuple[List[List[int]], dict, List[int]]] = {
    'short in pairs': (
        [[16, 16, 16, 0], [0, 4, 0, 4], [4, 0, 0, 0], [0, 0, 0, 2]],
        PAIRS,
        [48, 56, 60, 62],
    ),
    'short in fours': (
        [[16, 16, 16, 0], [0, 4, 0, 4], [4, 0, 0, 0], [0, 0, 0, 0]],
        FOURS,
        [48, 56, 60, 60],
    ),
    'short without resamples': ([[16, 16, 16, 0]], dict(FOURS, max_resample_times=0), [48]),
}
NOTHING = ([[0] * 4] * 4, FOURS, [0] * 4)


@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize('scenario', SHORT)
def test_resamples_that_fall_short_are_told_and_take_the_policy(
    scenario: str, policy: str, answers: Answers
) -> None:
    counts = SHORT[scenario][2]
    told = [line for _, line in answers.of(f'{scenario}, {policy}')[0]['lines']]
    assert [line for line in told if 'Initial' in line or 'global_pool=' in line] == [
        f'[DynSample] Initial batch: collected {counts[0]}/64 valid samples globally'
    ] + [
        f'[DynSample-SYNC] Rank 0: After resample #{number}, global_pool={count}/64'
        for number, count in enumerate(counts)
        if number
    ]
    assert [line for line in told if 'need' in line] == [
        f'[DynSample] Resample #{number}/3: global_collected={count}/64, need {64 - count} more'
        for number, count in enumerate(counts[:-1], 1)
    ]
    assert f'[DynSample] Shortage: {64 - counts[-1]}/64 samples missing' in told
    repeats = 64 - counts[-1] if policy in ('pad', 'mask') else 0
    # the initial batch has 48 valid samples, in groups of group_size
    invalid = 16 // SHORT[scenario][1]['group_size'] if policy == 'fallback' else 0
    warnings = [
        [line for level, line in each['lines'] if level == 'WARNING']
        for each in answers.of(f'{scenario}, {policy}')
    ]
    expected = (
        []
        if policy == 'raise'
        else [
            f'[DynSample] Step 1 fell short: {counts[-1]}/64 valid samples after {len(counts) - 1} '
            f'resample(s), shortfall={policy}. Of the samples it trains on {repeats} repeat others, '
            f'and {invalid} group(s) are not valid.'
        ]
    )
    assert warnings == [expected, [], [], []]


def test_fallback_uses_every_ranks_original_batch(answers: Answers) -> None:
    for scenario in [f'{short}, fallback' for short in SHORT] + [
        'nothing valid, fallback',
        'nothing valid, pad',
        'nothing valid, shrink',
    ]:
        for rank, each in enumerate(answers.of(scenario)):
            assert each['ids'] == [(rank, 0, k) for k in range(16)]
            assert each['statistics'].outcome == 'fallback'
            assert each['weight'] == 1
    # what was found in vain waits for the next step
    for scenario, surplus in (
        ('short in pairs', [4, 4, 0, 6]),
        ('short in fours', [4, 4, 0, 4]),
        ('short without resamples', [0] * 4),
    ):
        assert [
            each['statistics'].surplus for each in answers.of(f'{scenario}, fallback')
        ] == surplus
    told = [line for _, line in answers.of('nothing valid, fallback')[0]['lines']]
    assert '[DynSample] Shortage: 64/64 samples missing' in told


@pytest.mark.parametrize(
    'scenario, sizes',
    [
        ('short in pairs', [14, 16, 16, 16]),
        ('short in fours', [12, 16, 16, 16]),
        ('short without resamples', [12] * 4),
    ],
)
def test_pad_mask_and_shrink_use_every_valid_sample(
    scenario: str, sizes: List[int], answers: Answers
) -> None:
    valid, settings, counts = SHORT[scenario]
    padded, masked = answers.of(f'{scenario}, pad'), answers.of(f'{scenario}, mask')
    times = Counter(sample for each in padded for sample in each['ids'])
    assert set(times) == set(valid_ones(valid))
    assert [len(each['ids']) for each in padded] == [16] * 4
    twice = 64 - counts[-1]
    assert sorted(times.values()) == [1] * (counts[-1] - twice) + [2] * twice
    assert [each['ids'] for each in masked] == [each['ids'] for each in padded]
    weights = [pair for each in masked for pair in zip(each['ids'], each['weights'])]
    live = [sample for sample, weight in weights if weight]
    assert sorted(live) == valid_ones(valid)  # each of them once
    assert {weight for _, weight in weights if weight} == {64 / counts[-1]}
    shrunk = answers.of(f'{scenario}, shrink')
    assert sorted(sample for each in shrunk for sample in each['ids']) == valid_ones(valid)
    assert sorted(len(each['ids']) for each in shrunk) == sizes
    assert [each['weight'] for each in shrunk] == pytest.approx(
        [4 * len(each['ids']) / counts[-1] for each in shrunk]
    )
    size = settings['group_size']
    for each in padded + shrunk:
        for begin in range(0, len(each['ids']), size):
            source, number, k = each['ids'][begin]
            assert each['ids'][begin : begin + size] == [
                (source, number, k + j) for j in range(size)
            ]


def test_raise_ends_all_ranks_with_the_same_error(answers: Answers) -> None:
    for scenario, count in (
        ('short in pairs', 62),
        ('short in fours', 60),
        ('short without resamples', 48),
        ('nothing valid', 0),
    ):
        errors = {each['error'] for each in answers.of(f'{scenario}, raise')}
        assert len(errors) == 1
        assert f'{count}/64 valid samples' in errors.pop()


STEPS_WITH_NOTHING = 5


def steps_with_nothing_valid(policy: str) -> Any:
    """Walk steps of a loader in which no sample is ever valid."""
    rank = start()
    sampler = sampler_of(
        batches(rank, [0] * 100, 4), local_target=4, group_size=2, shortfall=policy
    )
    answer: List[Any] = []
    for _ in range(STEPS_WITH_NOTHING):
        try:
            batch = sampler.sample()
        except ShortfallError as error:
            answer.append(str(error))
        else:
            answer.append(([sample['id'] for sample in batch.samples], batch.loss_weight))
    return answer, sampler.totals, sampler.state_dict()['pool']


@pytest.mark.parametrize('policy', POLICIES)
@pytest.mark.parametrize('world', [1, 4])
def test_a_loader_without_any_valid_sample_is_accounted_for(
    world: int, policy: str, answers: Answers
) -> None:
    for rank, (steps, totals, pool) in enumerate(answers.of(f'never valid {world}, {policy}')):
        assert not pool
        assert totals.steps == STEPS_WITH_NOTHING
        assert totals.attempts == 3 * STEPS_WITH_NOTHING
        assert totals.wanted == 12 * world * STEPS_WITH_NOTHING
        assert totals.judged == 16 * STEPS_WITH_NOTHING * world
        assert totals.passed == totals.moved_samples == totals.surplus == 0
        assert totals.missing == 4 * world * STEPS_WITH_NOTHING
        assert totals.fetched == 16 * STEPS_WITH_NOTHING
        used = 0 if policy == 'raise' else 4 * STEPS_WITH_NOTHING
        assert totals.used == used
        assert totals.dropped == {'too_low': totals.fetched - used}
        assert totals.shortfalls == {
            'raise' if policy == 'raise' else 'fallback': STEPS_WITH_NOTHING
        }
        for step, answer in enumerate(steps):
            if policy == 'raise':
                assert answer.startswith(f'0/{4 * world} valid samples after all attempts')
            else:  # the batch that the step began with, before three resamples
                assert answer == ([(rank, 4 * step, k) for k in range(4)], 1)


def gradient_of_a_shrunk_step() -> Any:
    rank = start()
    source = iter(
        [
            [
                dict(id=k, x=torch.tensor([10.0 * rank + k, k**2, 1.0]), score=float(k < 5 - rank))
                for k in range(6)
            ]
        ]
    )
    batch = sampler_of(source, local_target=6, max_resample_times=0, shortfall='shrink').sample()
    weights = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    inputs = torch.stack([sample['x'] for sample in batch.samples])
    (torch.tanh(inputs @ weights / 10).mean() * batch.loss_weight).backward()
    assert weights.grad is not None
    dist.all_reduce(weights.grad)
    return weights.grad / dist.get_world_size(), len(batch.samples)


def test_shrink_gives_the_gradient_of_the_mean_over_all_samples(answers: Answers) -> None:
    every = answers.of('shrunk gradient')
    inputs = torch.stack(
        [torch.tensor([10.0 * rank + k, k**2, 1.0]) for rank in range(4) for k in range(5 - rank)]
    )
    weights = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    torch.tanh(inputs @ weights / 10).mean().backward()
    assert sorted(count for _, count in every) == [3, 3, 4, 4]
    for gradient, _ in every:
        torch.testing.assert_close(gradient, weights.grad)


def scenarios() -> Dict[str, Any]:
    named: Dict[str, Any] = {'shrunk gradient': (gradient_of_a_shrunk_step, 4)}
    for scenario, (valid, settings, _) in FILLED.items():
        named[scenario] = reported, len(valid[0]), valid, settings
    for policy in POLICIES:
        for short, (valid, settings, _) in dict(SHORT, **{'nothing valid': NOTHING}).items():
            named[f'{short}, {policy}'] = reported, 4, valid, dict(settings, shortfall=policy)
        for world in (1, 4):
            named[f'never valid {world}, {policy}'] = steps_with_nothing_valid, world, policy
    return named
