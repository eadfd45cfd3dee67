"""What happens when valid samples are missing."""

from __future__ import annotations

from collections import Counter
from typing import List, Tuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_plan import carried_out

from mapsage.sampling import Decision, ShortfallError, decide_shortfall

cases = st.tuples(
    st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 5), st.integers(1, 3)
)


def batches(decision: Decision) -> List[List[Tuple[int, int]]]:
    """Return each rank's batch as (source rank, index of a valid sample)."""
    return [
        [(rank, decision.supplies[rank][index]) for rank, index in batch]
        for batch in carried_out(decision.plan)
    ]


def decide(policy: str, case: tuple) -> Tuple[Decision, List[int], int, int]:
    groups, target, size = case
    counts = [count * size for count in groups]
    assume(0 < sum(groups) < target * len(groups))
    return (
        decide_shortfall(policy, counts, counts, target * size, size),
        counts,
        target * size,
        size,
    )


@given(cases)
def test_pad_uses_every_sample_evenly(case: tuple) -> None:
    decision, counts, target, size = decide('pad', case)
    ranks = batches(decision)
    assert [len(batch) for batch in ranks] == [target] * len(counts)
    times = Counter(sample for batch in ranks for sample in batch)
    assert set(times) == {(rank, k) for rank, count in enumerate(counts) for k in range(count)}
    assert max(times.values()) - min(times.values()) <= 1
    assert decision.loss_weights == (1.0,) * len(counts)
    for batch in ranks:
        for begin in range(0, len(batch), size):
            rank, first = batch[begin]
            assert batch[begin : begin + size] == [(rank, first + k) for k in range(size)]


@given(cases)
def test_shrink_is_even_and_its_gradient_the_mean_over_samples(case: tuple) -> None:
    decision, counts, _, size = decide('shrink', case)
    ranks, world = batches(decision), len(counts)
    lengths = [len(batch) for batch in ranks]
    assert max(lengths) - min(lengths) <= size
    assert min(lengths) >= size  # no rank is missing from a collective
    # Ranks average the gradients of their weighted means: what does each sample weigh in that?
    weighs: Counter = Counter()
    for batch, weight in zip(ranks, decision.loss_weights):
        for sample in batch:
            weighs[sample] += weight / len(batch) / world
    assert set(weighs) == {(rank, k) for rank, count in enumerate(counts) for k in range(count)}
    assert list(weighs.values()) == pytest.approx([1 / sum(counts)] * sum(counts))


@given(cases)
def test_shrink_moves_as_little_as_equal_shares_allow(case: tuple) -> None:
    decision, counts, _, size = decide('shrink', case)
    world, total = len(counts), sum(counts) // size
    assume(total >= world)
    each, more = divmod(total, world)
    groups = sorted((count // size for count in counts), reverse=True)
    least = sum(max(0, each + (k < more) - count) for k, count in enumerate(groups))
    assert len(decision.plan.moves) == least * size


@given(cases)
def test_enough_valid_samples_need_no_policy(case: tuple) -> None:
    groups, target, size = case
    assume(sum(groups) >= target * len(groups))
    counts = [count * size for count in groups]
    decisions = [
        decide_shortfall(policy, counts, [0] * len(counts), target * size, size)
        for policy in ('fallback', 'pad', 'shrink', 'raise')
    ]
    assert all(decision == decisions[0] for decision in decisions)
    assert decisions[0].outcome == 'valid'
    assert batches(decisions[0]) == carried_out(decisions[0].plan)


def test_fallback_and_no_valid_sample_at_all_take_the_original_batch() -> None:
    for policy, counts in (
        ('fallback', [16, 16, 16, 14]),
        ('fallback', [0] * 4),
        ('pad', [0] * 4),
        ('shrink', [0] * 4),
    ):
        decision = decide_shortfall(policy, counts, [16] * 4, 16, 2)
        assert (decision.outcome, decision.plan.moves) == ('fallback', ())
        assert batches(decision) == [[(rank, k) for k in range(16)] for rank in range(4)]
        assert decision.loss_weights == (1.0,) * 4


@pytest.mark.parametrize('world', [1, 2, 3, 5])
@pytest.mark.parametrize('drawn', [(24,), (8,), (3,), (0, 24), (24, 8, 3), (5, 0)])
@pytest.mark.parametrize('size', [1, 2])
def test_a_fallback_trains_on_the_target_whatever_was_drawn(
    world: int, drawn: Tuple[int, ...], size: int
) -> None:
    counts = [drawn[rank % len(drawn)] * size for rank in range(world)]
    if not sum(counts):
        counts[0] = size
    decision = decide_shortfall('fallback', [0] * world, counts, 8 * size, size)
    ranks = batches(decision)
    assert [len(batch) for batch in ranks] == [8 * size] * world
    for rank, batch in enumerate(ranks):  # its own first, in the order in which they were drawn
        own = min(counts[rank], 8 * size)
        assert batch[:own] == [(rank, k) for k in range(own)]
    times = Counter(sample for batch in ranks for sample in batch)
    assert max(times.values()) - min(times.values()) <= 1
    if sum(counts) >= 8 * size * world:
        assert set(times.values()) == {1}
    assert decision.loss_weights == (1.0,) * world


def test_raise_and_no_original_batch_are_errors_that_say_what_to_do() -> None:
    with pytest.raises(ShortfallError, match='62/64 valid .*max_resample_times'):
        decide_shortfall('raise', [16, 16, 16, 14], [16] * 4, 16, 2)
    with pytest.raises(ShortfallError, match='0/64 valid .*drop_last'):
        decide_shortfall('pad', [0] * 4, [0] * 4, 16)
    with pytest.raises(ValueError, match="'fall back', expected one of fallback, pad"):
        decide_shortfall('fall back', [1], [1], 1)
