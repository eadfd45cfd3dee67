"""Groups by key: of any size, on several ranks, judged where their parts meet."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any, Dict, List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling import BlockSampler, DynamicSampler, SampledBatch, Validity
from mapsage.sampling.judging import key_number


def walk(
    rounds: List[Dict[int, List[Tuple[str, float]]]], ranks: int, target: int, **settings: Any
) -> List[SampledBatch]:
    """Walk one step; ``rounds[k][rank]`` are the keys and scores of a rank's k-th fetch."""
    calls = [0] * ranks

    def fetch(rank: int, wanted: int) -> List[dict]:
        drawn = rounds[calls[rank]].get(rank, [])
        calls[rank] += 1
        return [
            dict(id=(rank, calls[rank] - 1, index), key=key, score=score)
            for index, (key, score) in enumerate(drawn)
        ]

    options: Dict[str, Any] = dict(validity=Validity(eps=0.1), max_resample_times=len(rounds) - 1)
    options.update(settings)
    sampler = BlockSampler(
        fetch,
        lambda rank, samples: [sample['score'] for sample in samples],
        local_target=target,
        ranks=VirtualRanks(ranks, 1),
        group_key=lambda sample: sample['key'],
        **options,
    )
    return sampler.sample_block()


def test_a_group_of_four_on_two_ranks_of_two() -> None:
    """Neither rank sees a spread in its half."""
    first, second = walk([{0: [('a', 1.0), ('a', 1.0)], 1: [('a', 0.0), ('a', 0.0)]}], 2, 2)
    assert first.statistics.outcome == 'valid'
    assert [sample['id'][0] for sample in first.samples + second.samples] == [0, 0, 1, 1]
    assert first.group_scores == second.group_scores == ((1.0, 1.0, 0.0, 0.0),) * 2


def test_three_ranks_with_one_sample_each_of_a_group_of_three() -> None:
    batches = walk(
        [
            {rank: [('a', 0.5)] for rank in range(3)},
            {rank: [('b', float(rank == 1))] for rank in range(3)},
        ],
        3,
        1,
    )
    assert [batch.samples[0]['key'] for batch in batches] == ['b'] * 3
    assert {batch.statistics.outcome for batch in batches} == {'valid'}
    assert batches[0].statistics.dropped == {'no_spread': 3}


def test_groups_of_several_sizes() -> None:
    fan_out = {
        0: [('a', 0.0), ('b', 1.0), ('b', 1.0), ('c', 0.3)],
        1: [('a', 1.0), ('d', 0.0)],
        2: [('a', 0.5), ('d', 1.0), ('d', 1.0)],
    }
    batches = walk([fan_out], 3, 2)
    used = sorted(
        (sample['key'], scores)
        for batch in batches
        for sample, scores in zip(batch.samples, batch.group_scores)
    )
    # The groups of one member and of equal scores are dropped.
    assert used == [('a', (0.0, 1.0, 0.5))] * 3 + [('d', (0.0, 1.0, 1.0))] * 3
    # A sample of rank 2 moved to rank 0.
    assert batches[0].statistics.moved_samples == 1


def test_what_is_missing_is_masked() -> None:
    batches = walk(
        [{0: [('a', 0.0), ('b', 1.0)], 1: [('a', 1.0), ('b', 1.0)]}], 2, 2, shortfall='mask'
    )
    assert [batch.weights for batch in batches] == [(2.0, 0.0), (2.0, 0.0)]
    assert {sample['key'] for batch in batches for sample in batch.samples} == {'a'}


def test_a_score_that_is_not_finite_drops_its_group_on_all_ranks() -> None:
    batches = walk(
        [{0: [('a', 0.0), ('b', 1.0)], 1: [('a', math.nan), ('b', 0.0)]}], 2, 2, shortfall='mask'
    )
    assert batches[0].statistics.not_finite == 2
    assert {sample['key'] for batch in batches for sample in batch.samples} == {'b'}


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from([0.0, 0.5, 1.0])),
        min_size=1,
        max_size=30,
    )
)
def test_every_sample_follows_its_whole_group(drawn: List[Tuple[int, int, float]]) -> None:
    fetched: Dict[int, List[Tuple[str, float]]] = {rank: [] for rank in range(3)}
    scores: Dict[str, List[float]] = {}
    for rank, key, score in drawn:
        fetched[rank].append((str(key), score))
        scores.setdefault(str(key), []).append(score)
    valid = {key for key, group in scores.items() if max(group) - min(group) > 0.1}
    batches = walk([fetched], 3, 2, shortfall='mask')
    if not any(key in valid for key in scores):
        assert batches[0].statistics.outcome == 'fallback'
        return
    for batch in batches:
        assert len(batch.samples) == 2
        for sample, group in zip(batch.samples, batch.group_scores):
            assert sample['key'] in valid and sorted(group) == sorted(scores[sample['key']])
    live = sum(map(bool, (weight for batch in batches for weight in batch.weights)))
    assert live == min(6, sum(len(scores[key]) for key in valid))


def test_all_processes_number_a_key_alike() -> None:
    program = 'from mapsage.sampling.judging import key_number as n; print(n(("é", 3)))'
    assert key_number(('é', 3)) == int(
        subprocess.run(
            [sys.executable, '-c', program], stdout=subprocess.PIPE, check=True
        ).stdout.split()[-1]
    )
    assert 0 <= key_number('a') != key_number('b') < 2**63


def test_an_object_without_a_text_is_no_key() -> None:
    """Its address would be another key in every process, and no group would ever be whole."""
    with pytest.raises(TypeError, match='group_key returned <object object at .* differs between'):
        key_number(object())


def test_a_fetch_asks_all_ranks_for_the_same_number() -> None:
    """Two of three groups pass, so a third one takes 4.5 samples: 2 on each of three ranks."""
    asked: List[List[int]] = [[], [], []]

    def fetch(rank: int, wanted: int) -> List[Tuple[str, float]]:
        first = 10 * len(asked[rank])
        asked[rank].append(wanted)
        return [
            (str(first + group), float(rank) if first + group != 2 else 0.0)
            for group in range(wanted)
        ]

    sampler = BlockSampler(
        fetch,
        lambda rank, samples: [score for _, score in samples],
        Validity(eps=0.1),
        3,
        ranks=VirtualRanks(3, 1),
        group_key=lambda sample: sample[0],
        max_resample_times=1,
    )
    assert {batch.statistics.outcome for batch in sampler.sample_block()} == {'valid'}
    assert asked == [[3, 2]] * 3


@pytest.mark.parametrize('settings', [dict(group_size=2), dict(max_age=1), dict(keep_fraction=0.5)])
def test_what_does_not_go_together_is_refused(settings: Dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f'group_key with {next(iter(settings))}='):
        DynamicSampler(
            lambda wanted: [],
            lambda samples: [],
            Validity(eps=0.1),
            2,
            group_key=lambda sample: sample,
            **settings,
        )
