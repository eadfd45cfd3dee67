"""What a sampler saves, who may load it, and how old its samples may be."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import pytest
import torch

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling import BlockSampler, Candidate, DynamicSampler, OtherRankError, Validity


def block(rank: int, world: int = 4, **settings: Any) -> BlockSampler:
    """Return the sampler of one process of several, which is never asked for a step."""
    sampler = BlockSampler(
        lambda rank, wanted: [], lambda rank, samples: [], Validity(low=0), 2, **settings
    )
    sampler._block, sampler._world = range(rank, rank + 1), world
    return sampler


def sampler_with_a_pool() -> DynamicSampler:
    sampler = DynamicSampler(
        lambda wanted: [
            dict(id=k, x=torch.tensor([float(k)]), text='tile', tags=('a', 1)) for k in range(6)
        ],
        lambda samples: [1.0] * len(samples),
        Validity(low=0),
        4,
    )
    sampler.sample()
    return sampler


def test_a_state_of_another_rank_is_refused() -> None:
    state = block(0).state_dict()
    with pytest.raises(
        OtherRankError, match='state is of rank 0 of 4, and this is rank 1 of 4'
    ) as error:
        block(1).load_state_dict(state)
    assert 'register_for_checkpointing saves that of rank 0 only' in str(error.value)
    with pytest.raises(OtherRankError, match='rank 0 of 4, and this is rank 0 of 2'):
        block(0, 2).load_state_dict(state)
    block(0).load_state_dict(state)
    # As the message says.
    del state['ranks']
    block(1).load_state_dict(state)


def test_a_state_names_a_block_of_virtual_ranks() -> None:
    sampler = BlockSampler(
        lambda rank, wanted: [],
        lambda rank, samples: [],
        Validity(low=0),
        2,
        ranks=VirtualRanks(3, 1),
    )
    with pytest.raises(OtherRankError, match='of rank 0 of 4, and this is ranks 0 to 2 of 3'):
        sampler.load_state_dict(block(0).state_dict())


def test_a_state_needs_no_pickled_classes(tmp_path: Path) -> None:
    sampler = sampler_with_a_pool()
    torch.save(sampler.state_dict(), str(tmp_path / 'state.pt'))
    if 'weights_only' not in torch.load.__code__.co_varnames:
        pytest.skip('this torch has no weights_only')
    state = torch.load(str(tmp_path / 'state.pt'), weights_only=True)
    resumed = sampler_with_a_pool()
    resumed.load_state_dict(state)
    assert [sample['id'] for sample in resumed.sample().samples] == [4, 5, 0, 1]


def test_a_batch_tells_the_age_of_its_samples() -> None:
    number = iter(range(100))

    def fetch(wanted: int) -> List[dict]:
        return [dict(id=next(number)) for _ in range(6)]

    sampler = DynamicSampler(
        fetch, lambda samples: [1.0] * len(samples), Validity(low=0), 4, max_age=2
    )
    steps = [sampler.sample() for _ in range(4)]
    assert [[sample['id'] for sample in step.samples] for step in steps] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, 10, 11],
        [12, 13, 14, 15],
    ]
    assert [step.ages for step in steps] == [(0,) * 4, (1, 1, 0, 0), (1,) * 4, (1,) * 4]


@pytest.mark.parametrize(
    'validity, ages',
    [
        (Validity(low=0), [(0, 0), (1, 1)]),
        (Validity(eps=0.1), [(0, 0), (0, 0)]),
        (Validity(eps=0.1, low=0), [(0, 0), (0, 0)]),
    ],
)
def test_groups_that_are_judged_by_their_spread_do_not_wait(
    validity: Validity, ages: List[tuple]
) -> None:
    sampler = DynamicSampler(
        lambda wanted: [1.0, 2.0] * 2, lambda samples: samples, validity, 2, group_size=2
    )
    assert [sampler.sample().ages for _ in range(2)] == ages


def test_candidates_keep_their_score_on_the_way() -> None:
    sampler = DynamicSampler(
        lambda wanted: [Candidate(k, score=1.0) for k in range(wanted)],
        lambda samples: [sample.score for sample in samples],
        Validity(low=0),
        2,
    )
    assert [sample.sample for sample in sampler.sample().samples] == [0, 1]
