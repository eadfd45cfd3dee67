"""What happens when valid samples are missing."""
from __future__ import annotations

from collections import Counter
from typing import List, Tuple

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from test_plan import carried_out

from mapsage.sampling import Decision, ShortfallError, decide_shortfall

cases = st.tuples(st.lists(st.integers(0, 6), min_size=1, max_size=8), st.integers(1, 5),
                  st.integers(1, 3))


def batches(decision: Decision) -> List[List[Tuple[int, int]]]:
    """Return each rank's batch as (source rank, index of a valid sample)."""
    assert decision.plan is not None
    return [[(rank, decision.supplies[rank][index]) for rank, index in batch]
            for batch in carried_out(decision.plan)]


def decide(policy: str, case: tuple) -> Tuple[Decision, List[int], int, int]:
    groups, target, size = case
    counts = [count * size for count in groups]
    assume(0 < sum(groups) < target * len(groups))
    return (decide_shortfall(policy, counts, counts, target * size, size), counts, target * size,
            size)


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
            assert batch[begin:begin + size] == [(rank, first + k) for k in range(size)]


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
    assert decision.plan is not None
    assert len(decision.plan.moves) == least * size


@given(cases)
def test_enough_valid_samples_need_no_policy(case: tuple) -> None:
    groups, target, size = case
    assume(sum(groups) >= target * len(groups))
    counts = [count * size for count in groups]
    decisions = [decide_shortfall(policy, counts, [0] * len(counts), target * size, size)
                 for policy in ('fallback', 'pad', 'shrink', 'raise')]
    assert all(decision == decisions[0] for decision in decisions)
    assert decisions[0].outcome == 'valid'
    assert batches(decisions[0]) == carried_out(decisions[0].plan)


def test_fallback_and_no_valid_sample_at_all_take_the_original_batch() -> None:
    for policy, counts in (('fallback', [16, 16, 16, 14]), ('fallback', [0] * 4), ('pad', [0] * 4),
                           ('shrink', [0] * 4)):
        decision = decide_shortfall(policy, counts, [16] * 4, 16, 2)
        assert (decision.outcome, decision.plan) == ('fallback', None)
        assert decision.loss_weights == (1.0,) * 4


def test_raise_and_no_original_batch_are_errors_that_say_what_to_do() -> None:
    with pytest.raises(ShortfallError, match='62/64 valid .*max_resample_times'):
        decide_shortfall('raise', [16, 16, 16, 14], [16] * 4, 16, 2)
    with pytest.raises(ShortfallError, match=r'0/64 valid .* rank\(s\) \[2\]'):
        decide_shortfall('pad', [0] * 4, [16, 16, 0, 16], 16)
    with pytest.raises(ValueError, match="'fall back', expected one of fallback, pad"):
        decide_shortfall('fall back', [1], [1], 1)
