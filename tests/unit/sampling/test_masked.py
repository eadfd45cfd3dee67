"""The policy `mask`: full batches whose weighted mean is the mean over the valid samples."""

from __future__ import annotations

from typing import Any, List, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.sampling import BlockSampler, DynamicSampler, SampledBatch, Validity, decide_shortfall

LENGTHS = [1, 5, 2, 3, 1, 4, 2, 6]


def sample_of(rank: int, index: int, valid: int) -> dict:
    tokens = LENGTHS[(3 * rank + index) % len(LENGTHS)]
    generator = torch.Generator().manual_seed(100 * rank + index)
    return dict(
        id=(rank, index),
        score=float(index < valid),
        x=torch.randn(tokens, 3, dtype=torch.float64, generator=generator),
    )


def masked_step(valid: Sequence[int], target: int = 4, **settings: Any) -> List[SampledBatch]:
    """Return the batches of a step in which rank r has ``valid[r]`` valid samples."""
    sampler = BlockSampler(
        lambda rank, wanted: [sample_of(rank, index, valid[rank]) for index in range(target)],
        lambda rank, samples: [sample['score'] for sample in samples],
        Validity(low=0.5),
        target,
        ranks=VirtualRanks(len(valid), 1),
        max_resample_times=0,
        shortfall='mask',
        max_age=0,
        **settings,
    )
    return sampler.sample_block()


def token_losses(sample: dict, parameter: torch.Tensor) -> torch.Tensor:
    return torch.tanh(sample['x'] @ parameter)


def gradient(loss: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    return torch.autograd.grad(loss, parameter)[0]


def means_over_samples(batches: Sequence[SampledBatch], parameter: torch.Tensor) -> torch.Tensor:
    """The mean over ranks, as DDP takes it, of the mean over a rank's samples."""
    return sum(
        sum(
            token_losses(sample, parameter).mean() * weight
            for sample, weight in zip(batch.samples, batch.weights)
        )
        / len(batch.samples)
        * batch.loss_weight
        for batch in batches
    ) / len(batches)


def means_over_tokens(batches: Sequence[SampledBatch], parameter: torch.Tensor) -> torch.Tensor:
    """The sum over live tokens of all ranks, divided by their number."""
    pairs = [
        (sample, weight)
        for batch in batches
        for sample, weight in zip(batch.samples, batch.weights)
    ]
    total = sum(token_losses(sample, parameter).sum() * weight for sample, weight in pairs)
    return total / sum(len(sample['x']) * weight for sample, weight in pairs)


@pytest.mark.parametrize('valid', [(1, 0, 0), (4, 0, 3), (2, 3, 1), (0, 0, 2), (4, 4, 3), (3,)])
@pytest.mark.parametrize('size', [1, 2])
def test_the_gradient_is_the_mean_over_valid_samples_for_both_kinds_of_losses(
    valid: Sequence[int], size: int
) -> None:
    if any(count % size for count in valid):
        pytest.skip('no whole groups')
    batches = masked_step(valid, group_size=size)
    assert {len(batch.samples) for batch in batches} == {4}
    assert {batch.statistics.outcome for batch in batches} == {'mask'}
    parameter = torch.tensor([0.3, -0.7, 0.2], dtype=torch.float64, requires_grad=True)
    truth = [
        sample_of(rank, index, 4) for rank, count in enumerate(valid) for index in range(count)
    ]
    per_sample = sum(token_losses(sample, parameter).mean() for sample in truth) / len(truth)
    torch.testing.assert_close(
        gradient(means_over_samples(batches, parameter), parameter),
        gradient(per_sample, parameter),
        rtol=1e-12,
        atol=1e-14,
    )
    per_token = torch.cat([token_losses(sample, parameter) for sample in truth]).mean()
    torch.testing.assert_close(
        gradient(means_over_tokens(batches, parameter), parameter),
        gradient(per_token, parameter),
        rtol=1e-12,
        atol=1e-14,
    )


def test_every_rank_can_normalize_a_batch_where_shrink_leaves_one_sample() -> None:
    batches = masked_step((1, 0), 4)
    norm = nn.BatchNorm1d(3).double()
    for batch in batches:
        norm(torch.stack([sample['x'].mean(0) for sample in batch.samples]))
    shrunk = decide_shortfall('shrink', [1, 0], [4, 4], 4)
    assert max(shrunk.plan.targets) == 1


def test_repeats_are_objects_of_their_own() -> None:
    [batch] = masked_step((1,))
    assert [sample['id'] for sample in batch.samples] == [(0, 0)] * 4
    assert batch.weights == (4.0, 0.0, 0.0, 0.0)
    batch.samples[1]['x'] += 1
    assert not torch.equal(batch.samples[0]['x'], batch.samples[1]['x'])


def test_without_a_valid_sample_it_falls_back() -> None:
    batches = masked_step((0, 0))
    assert {batch.statistics.outcome for batch in batches} == {'fallback'}
    assert {batch.weights for batch in batches} == {(1.0,) * 4}


def test_random_keep_and_mask_multiply_their_weights() -> None:
    sampler = DynamicSampler(
        lambda wanted: [0.0, 1.0, 0.0, 1.0],
        lambda samples: samples,
        Validity(low=0.5),
        4,
        max_resample_times=0,
        shortfall='mask',
        keep_fraction=0.5,
        unbiased=True,
        seed=3,
    )
    kinds = set()
    for _ in range(40):
        batch = sampler.sample()
        assert sum(map(bool, batch.weights)) == min(4, batch.statistics.valid)
        live = {
            (sample, round(weight, 9))
            for sample, weight in zip(batch.samples, batch.weights)
            if weight
        }
        kinds.add(batch.statistics.outcome)
        weights = dict(live)
        # A group that was kept with probability 0.5 weighs twice as much as a valid one.
        if len(weights) == 2:
            assert weights[0.0] == pytest.approx(2 * weights[1.0])
    assert kinds == {'mask', 'valid'}


@given(st.lists(st.integers(0, 12), min_size=1, max_size=5), st.integers(1, 3), st.integers(1, 4))
def test_weights_sum_to_the_target_and_lie_on_valid_samples(
    counts: List[int], size: int, groups: int
) -> None:
    counts = [count * size for count in counts]
    target = groups * size
    if not 0 < sum(counts) < len(counts) * target:
        return
    decision = decide_shortfall('mask', counts, [target] * len(counts), target, size)
    padded = decide_shortfall('pad', counts, [target] * len(counts), target, size)
    assert (decision.plan, decision.supplies) == (padded.plan, padded.supplies)
    total = sum(sum(weights) for weights in decision.sample_weights)
    assert total == pytest.approx(len(counts) * target)
    for count, supply, weights in zip(counts, decision.supplies, decision.sample_weights):
        assert len(supply) == len(weights)
        assert [index for index, weight in zip(supply, weights) if weight] == list(range(count))
