"""Groups by key whose parts lie on three processes: as in one process, and with an error on one."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from forked import fork_scenarios
from sampling_ranks import Answers, answers_of, start
from support import main_leg

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling import BlockSampler, DynamicSampler, OtherRankError, SampledBatch, Validity

pytestmark = main_leg
RANKS = 3

Sample = Dict[str, Any]


def rollouts() -> Callable[[int, int], List[Sample]]:
    """Return a fetch of six samples of each rollout, two on each rank; ranks lag in some rounds."""
    rounds = [0] * RANKS

    def fetch(rank: int, wanted: int) -> List[Sample]:
        rounds[rank] += 1
        # Rank 1 has no part of the groups of the first round.
        if rounds[rank] == 1 and rank == 1:
            return []
        return [
            dict(rollout=f'{rounds[rank]} {group}', id=(rank, rounds[rank], group, part))
            for group in range(wanted // 2)
            for part in range(2)
        ]

    return fetch


def score(rank: int, samples: List[Sample]) -> List[float]:
    """Return two scores for each sample; of every third rollout they are all equal."""
    return [
        number
        for sample in samples
        for number in (
            (0.5, 0.5) if sample['id'][2] % 3 == 2 else (float(rank), float(sample['id'][3]))
        )
    ]


SETTINGS: Dict[str, Any] = dict(
    validity=Validity(eps=1e-6),
    local_target=6,
    scores_per_sample=2,
    shortfall='mask',
    group_key=lambda sample: sample['rollout'],
)


def facts(batch: SampledBatch) -> Tuple[Any, ...]:
    return (
        [sample['id'] for sample in batch.samples],
        batch.weights,
        batch.group_scores,
        batch.statistics.outcome,
    )


def sample_steps() -> List[Any]:
    rank, fetch = start(), rollouts()
    sampler = DynamicSampler(
        lambda wanted: fetch(rank, wanted), lambda samples: score(rank, samples), **SETTINGS
    )
    return [facts(sampler.sample()) for _ in range(3)]


def fail_on_one_rank() -> Tuple[str, str]:
    rank, fetch = start(), rollouts()

    def grade(samples: List[Sample]) -> List[float]:
        if rank == 1 and samples:
            raise OSError('the grader has no disk: 磁盘')
        return score(rank, samples)

    sampler = DynamicSampler(lambda wanted: fetch(rank, wanted), grade, **SETTINGS)
    try:
        sampler.sample()
    except (OSError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return 'no error', ''


def load_states() -> List[str]:
    """Load the states of all ranks on this one, as torch reads them without pickled classes."""
    rank = start()
    sampler = DynamicSampler(
        lambda wanted: [torch.tensor([rank, index]) for index in range(2 * wanted)],
        lambda samples: [1.0] * len(samples),
        Validity(low=0.5),
        2,
    )
    sampler.sample()
    answers = []
    for saved in range(RANKS):
        file = io.BytesIO()
        torch.save(dict(sampler.state_dict(), ranks=[saved, saved + 1, RANKS]), file)
        file.seek(0)
        try:
            sampler.load_state_dict(torch.load(file, weights_only=True))
            answers.append('loaded')
        except OtherRankError as error:
            answers.append(str(error).split(':')[0])
    pool = sampler.state_dict()['pool']
    assert len(pool) == 2 and int(pool[0]['samples'][0][0]) == rank
    return answers


def run_scenarios(folder: Path) -> Dict[str, Any]:
    return fork_scenarios(
        {
            function.__name__: (function, RANKS)
            for function in (sample_steps, fail_on_one_rank, load_states)
        },
        folder,
    )


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    return answers_of(run_scenarios, tmp_path_factory.mktemp('keyed'))


def test_three_processes_sample_as_three_virtual_ranks(answers: Answers) -> None:
    sampler = BlockSampler(rollouts(), score, ranks=VirtualRanks(RANKS, 1), **SETTINGS)
    expected = [[facts(batch) for batch in sampler.sample_block()] for _ in range(3)]
    steps = list(zip(*answers.of('sample_steps')))
    assert [list(step) for step in steps] == expected
    for _, weights, group_scores, outcome in steps[1]:
        assert outcome == 'valid' and set(weights) == {1.0}
        assert {len(scores) for scores in group_scores} == {2 * 2 * RANKS}


def test_an_error_of_one_rank_reaches_all(answers: Answers) -> None:
    first, second, third = answers.of('fail_on_one_rank')
    assert second == ('OSError', 'the grader has no disk: 磁盘')
    assert first == third and first[0] == 'RankError'
    assert (
        'rank 1 failed in fetching or scoring samples: OSError: the grader has no disk: 磁盘'
        in first[1]
    )


def test_a_state_is_loaded_by_its_own_rank_only(answers: Answers) -> None:
    for rank, loaded in enumerate(answers.of('load_states')):
        assert loaded == [
            'loaded'
            if saved == rank
            else f'the state is of rank {saved} of 3, and this is rank {rank} of 3'
            for saved in range(RANKS)
        ]
