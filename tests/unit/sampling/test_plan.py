"""The plan of an exchange: right, minimal, in order, level."""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mapsage.sampling import ExchangePlan, plan_exchange


def carried_out(plan: ExchangePlan) -> List[List[Tuple[int, int]]]:
    """Return each rank's batch as (source rank, source index), from kept and moves alone."""
    batches: List[Dict[int, Tuple[int, int]]] = [
        {k: (rank, k) for k in range(plan.kept(rank))} for rank in range(len(plan.targets))
    ]
    for move in plan.moves:
        assert move.destination_index not in batches[move.destination_rank]
        batches[move.destination_rank][move.destination_index] = move[:2]
    return [[batch[k] for k in range(target)] for batch, target in zip(batches, plan.targets)]


def fewest_moves(counts: Sequence[int], targets: Sequence[int]) -> int:
    """Return the fewest single moves after which every rank has enough, by breadth-first search."""
    states, moves = {tuple(counts)}, 0
    while not any(all(c >= t for c, t in zip(state, targets)) for state in states):
        states = {
            tuple(c - (k == a) + (k == b) for k, c in enumerate(state))
            for state in states
            for a, c in enumerate(state)
            if c
            for b in range(len(state))
            if b != a
        }
        moves += 1
    return moves


counts_and_targets = st.integers(1, 6).flatmap(
    lambda world: st.tuples(
        st.lists(st.integers(0, 9), min_size=world, max_size=world),
        st.lists(st.integers(0, 6), min_size=world, max_size=world),
    )
)


@given(counts_and_targets, st.integers(1, 4))
def test_every_rank_gets_its_target_in_order(case: tuple, size: int) -> None:
    counts, targets = ([number * size for number in numbers] for numbers in case)
    assume(sum(counts) >= sum(targets))
    plan = plan_exchange(counts, targets, size)
    batches = carried_out(plan)
    assert [len(batch) for batch in batches] == targets
    used = [sample for batch in batches for sample in batch]
    assert len(set(used)) == len(used)
    for rank, batch in enumerate(batches):
        own = [sample for sample in batch if sample[0] == rank]
        arrived = [sample for sample in batch if sample[0] != rank]
        assert batch == own + arrived
        assert own == [(rank, k) for k in range(len(own))]
        assert arrived == sorted(arrived)
        for begin in range(0, len(batch), size):  # groups arrive whole
            assert [k - batch[begin][1] for _, k in batch[begin : begin + size]] == list(
                range(size)
            )
            assert batch[begin][1] % size == 0
        # used and left over are all there is
        gone = {k for source, k in used if source == rank}
        assert sorted(gone | set(plan.leftover(rank))) == list(range(counts[rank]))
        assert not gone & set(plan.leftover(rank))
        assert plan.given[rank] == sum(move.source_rank == rank for move in plan.moves)
    assert list(plan.moves) == sorted(
        plan.moves, key=lambda m: (m.destination_rank, m.destination_index)
    )


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4).flatmap(
        lambda world: st.tuples(
            st.lists(st.integers(0, 4), min_size=world, max_size=world),
            st.lists(st.integers(0, 3), min_size=world, max_size=world),
        )
    )
)
def test_no_plan_has_fewer_moves(case: tuple) -> None:
    counts, targets = case
    assume(sum(counts) >= sum(targets))
    assert len(plan_exchange(counts, targets).moves) == fewest_moves(counts, targets)


@given(counts_and_targets)
def test_what_is_left_is_level(case: tuple) -> None:
    counts, targets = case
    assume(sum(counts) >= sum(targets))
    plan = plan_exchange(counts, targets)
    left = [len(plan.leftover(rank)) for rank in range(len(counts))]
    givers = [left[rank] for rank, given in enumerate(plan.given) if given]
    if givers:
        assert max(left) <= min(givers) + 1


def test_full_ranks_move_nothing_and_slices_are_those_of_the_reports() -> None:
    plan = plan_exchange([16] * 4, 16, 4)
    assert plan.moves == ()
    assert [plan.slice_of(rank) for rank in range(4)] == [(0, 16), (16, 32), (32, 48), (48, 64)]


def test_moves_are_the_tuples_of_the_contract() -> None:
    plan = plan_exchange([5, 1, 4, 2], 3)
    assert plan.moves == ((0, 3, 1, 1), (0, 4, 1, 2), (2, 3, 3, 2))
    assert plan.moves[0].source_rank == 0


@pytest.mark.parametrize(
    'arguments, message',
    [
        (([3, 3], 4), '6 valid samples for targets of 8'),
        (([4, -4], 0), 'valid_counts has -4'),
        (([4, 6], 4, 4), 'valid_counts has 6'),
        (([8, 8], 6, 4), 'target has 6'),
        (([4], 4, 0), 'group_size=0'),
        (([4, 4], [4]), '2 counts and 1 targets'),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        plan_exchange(*arguments)
