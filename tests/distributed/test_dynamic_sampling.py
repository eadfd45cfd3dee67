"""The scenarios of the reports, between real processes, with the lines users know."""
from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

import pytest
import torch
import torch.distributed as dist
from sampling_ranks import (
    PATIENT,
    Answers,
    Lines,
    answers_of,
    batches,
    fork_scenarios,
    logger_with,
    sampler_of,
    start,
)

from mapsage.sampling import ShortfallError


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('sampling'))


def run_scenarios(folder: Path) -> Dict[str, Any]:
    return fork_scenarios(folder, scenarios(), PATIENT - 10)


def reported(valid: Sequence[Sequence[int]], settings: dict) -> Dict[str, Any]:
    """Walk one step; ``valid[k][rank]`` samples of a rank's k-th batch are valid."""
    rank, lines = start(), Lines()
    sampler = sampler_of(batches(rank, [row[rank] for row in valid]), logger=logger_with(lines),
                         **settings)
    try:
        batch = sampler.sample()
    except ShortfallError as error:
        return dict(error=str(error), lines=lines.lines)
    assert all(torch.equal(sample['x'], torch.full((sample['id'][2] % 3 + 1, 2),
                                                   float(sample['id'][0])))
               for sample in batch.samples)
    return dict(ids=[sample['id'] for sample in batch.samples], weight=batch.loss_weight,
                statistics=batch.statistics, lines=lines.lines)


# 56/64, then 8 more; in groups of 4
ONE_RESAMPLE = [[16, 8, 16, 16], [4, 0, 4, 0]]
# 48, 56, 60, 62; in groups of 2
SHORT = [[16, 16, 16, 0], [0, 4, 0, 4], [4, 0, 0, 0], [0, 0, 0, 2]]


def test_56_of_64_then_one_resample_fills_every_rank(answers: Answers) -> None:
    every = answers.of('one resample')
    used = [sample for each in every for sample in each['ids']]
    assert len(used) == len(set(used)) == 64
    expected = {(rank, number, k) for number, row in enumerate(ONE_RESAMPLE)
                for rank, count in enumerate(row) for k in range(16 - count, 16)}
    assert set(used) == expected
    for rank, each in enumerate(every):
        assert len(each['ids']) == 16
        for begin in range(0, 16, 4):  # groups are together
            source, number, k = each['ids'][begin]
            assert each['ids'][begin:begin + 4] == [(source, number, k + j) for j in range(4)]
            assert k % 4 == 0
        assert each['statistics'].moved_samples == 8
        assert each['statistics'].received == (8 if rank == 1 else 0)


def test_the_log_of_one_resample_has_the_literal_lines(answers: Answers) -> None:
    for rank, each in enumerate(answers.of('one resample')):
        level = 'DEBUG' if rank else 'INFO'
        begin, end = 16 * rank, 16 * (rank + 1)
        assert each['lines'] == [(level, line) for line in (
            '[DynSample] Initial batch: collected 56/64 valid samples globally',
            '[DynSample] Resample #1/3: global_collected=56/64, need 8 more',
            f'[DynSample-SYNC] Rank {rank}: Fetching new batch for resample #1',
            f'[DynSample-SYNC] Rank {rank}: After resample #1, global_pool=64/64',
            f'[DynSample-FINAL] Rank {rank}: Slicing global pool [{begin}:{end}], got 16 samples',
            f'[DynSample] Rank {rank}: Using 16 valid samples (4 groups) from global pool after 1 '
            f'resample(s)')]


def test_three_resamples_that_fall_short_take_the_policy(answers: Answers) -> None:
    for policy in ('fallback', 'pad', 'shrink', 'raise'):
        every = answers.of(f'short, {policy}')
        told = [line for _, line in every[0]['lines']]
        assert [line for line in told if 'Initial' in line or 'global_pool=' in line] == [
            '[DynSample] Initial batch: collected 48/64 valid samples globally',
            '[DynSample-SYNC] Rank 0: After resample #1, global_pool=56/64',
            '[DynSample-SYNC] Rank 0: After resample #2, global_pool=60/64',
            '[DynSample-SYNC] Rank 0: After resample #3, global_pool=62/64']
        assert '[DynSample] Resample #3/3: global_collected=60/64, need 4 more' in told
        assert '[DynSample] Shortage: 2/64 samples missing' in told


def valid_ones(valid: Sequence[Sequence[int]]) -> List[Tuple[int, int, int]]:
    return [(rank, number, k) for number, row in enumerate(valid)
            for rank, count in enumerate(row) for k in range(16 - count, 16)]


def test_fallback_uses_every_ranks_original_batch(answers: Answers) -> None:
    for scenario in ('short, fallback', 'nothing valid, fallback', 'nothing valid, pad',
                     'nothing valid, shrink'):
        for rank, each in enumerate(answers.of(scenario)):
            assert each['ids'] == [(rank, 0, k) for k in range(16)]
            assert each['statistics'].outcome == 'fallback'
            assert each['weight'] == 1
    # what was found in vain waits for the next step
    assert [each['statistics'].surplus for each in answers.of('short, fallback')] == [4, 4, 0, 6]
    told = [line for _, line in answers.of('nothing valid, fallback')[0]['lines']]
    assert '[DynSample] Shortage: 64/64 samples missing' in told


def test_pad_and_shrink_use_every_valid_sample(answers: Answers) -> None:
    padded = answers.of('short, pad')
    times = Counter(sample for each in padded for sample in each['ids'])
    assert set(times) == set(valid_ones(SHORT))
    assert [len(each['ids']) for each in padded] == [16] * 4
    assert sorted(times.values()) == [1] * 60 + [2] * 2
    shrunk = answers.of('short, shrink')
    assert sorted(sample for each in shrunk for sample in each['ids']) == sorted(valid_ones(SHORT))
    assert sorted(len(each['ids']) for each in shrunk) == [14, 16, 16, 16]
    assert sum(each['weight'] for each in shrunk) == pytest.approx(4)


def test_raise_ends_all_ranks_with_the_same_error(answers: Answers) -> None:
    for scenario, count in (('short, raise', 62), ('nothing valid, raise', 0)):
        errors = {each['error'] for each in answers.of(scenario)}
        assert len(errors) == 1
        assert f'{count}/64 valid samples' in errors.pop()


def gradient_of_a_shrunk_step() -> Any:
    rank = start()
    source = iter([[dict(id=k, x=torch.tensor([10.0 * rank + k, k ** 2, 1.0]), score=float(
        k < 5 - rank)) for k in range(6)]])
    batch = sampler_of(source, local_target=6, max_resample_times=0, shortfall='shrink').sample()
    weights = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    inputs = torch.stack([sample['x'] for sample in batch.samples])
    (torch.tanh(inputs @ weights / 10).mean() * batch.loss_weight).backward()
    assert weights.grad is not None
    dist.all_reduce(weights.grad)
    return weights.grad / dist.get_world_size(), len(batch.samples)


def test_shrink_gives_the_gradient_of_the_mean_over_all_samples(answers: Answers) -> None:
    every = answers.of('shrunk gradient')
    inputs = torch.stack([torch.tensor([10.0 * rank + k, k ** 2, 1.0])
                          for rank in range(4) for k in range(5 - rank)])
    weights = torch.tensor([0.3, -0.2, 0.1], requires_grad=True)
    torch.tanh(inputs @ weights / 10).mean().backward()
    assert sorted(count for _, count in every) == [3, 3, 4, 4]
    for gradient, _ in every:
        torch.testing.assert_close(gradient, weights.grad)


def scenarios() -> Dict[str, Any]:
    nothing = [[0] * 4] * 4
    groups, pairs = dict(group_size=4), dict(group_size=2)
    named: Dict[str, Any] = {'one resample': (reported, 4, ONE_RESAMPLE, groups),
                             'shrunk gradient': (gradient_of_a_shrunk_step, 4)}
    for policy in ('fallback', 'pad', 'shrink', 'raise'):
        named[f'short, {policy}'] = reported, 4, SHORT, dict(pairs, shortfall=policy)
        named[f'nothing valid, {policy}'] = reported, 4, nothing, dict(groups, shortfall=policy)
    return named
