"""Prints, pairs and verdicts of the cross-check, without ranks."""

from __future__ import annotations

import math
from typing import Any, Dict, List, Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mapsage.extras.forensics.gradient_prints import (
    SMALLEST_BOUND,
    Dispute,
    GradientPrint,
    Pairing,
    PrintReader,
    bound_of,
    find_disputes,
    guilty_ranks,
    largest_difference,
)


def read(exact: bool, change: float = 0.0, dtype: torch.dtype = torch.float32) -> GradientPrint:
    parameters = {
        'first': nn.Parameter(torch.ones(37, dtype=dtype)),
        'idle': nn.Parameter(torch.ones(3)),
        'frozen': nn.Parameter(torch.ones(3), requires_grad=False),
    }
    reader = PrintReader(exact)
    reader.attach(parameters)
    factors = torch.arange(37.0).to(dtype)
    factors[20] += change
    (parameters['first'] * factors).sum().backward()
    reader.detach()
    (parameters['first'] * 2).sum().backward()  # not read
    return reader.print


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.complex64])
def test_one_changed_number_changes_a_digest(dtype: torch.dtype) -> None:
    if dtype.is_complex:
        parameter = nn.Parameter(torch.ones(3, dtype=dtype))
        reader = PrintReader(False)
        reader.attach(dict(first=parameter))
        (parameter.real * 2).sum().backward()
        assert reader.print['first'][0] == pytest.approx(2 * math.sqrt(3))
        return
    assert list(read(True, dtype=dtype)) == ['first']
    assert largest_difference(read(True, dtype=dtype), read(True, dtype=dtype), True) == ('', 0.0)
    assert largest_difference(read(True, dtype=dtype), read(True, 1.0, dtype), True) == (
        'first',
        math.inf,
    )


def test_the_size_of_a_difference_is_relative_to_the_whole_gradient() -> None:
    norm = float(torch.arange(37.0).norm())
    name, drift = largest_difference(read(False), read(False, 1e-3), False)
    assert name == 'first' and drift == pytest.approx(1e-3 / norm, rel=0.01)
    # A layer without a gradient is not a small difference, and NaN is only equal to NaN.
    assert largest_difference(read(False), {}, False) == ('first', math.inf)
    assert largest_difference(dict(a=[math.nan]), dict(a=[math.nan]), False)[1] == 0.0
    assert largest_difference(dict(a=[math.nan]), dict(a=[1.0]), False)[1] == math.inf
    assert largest_difference(dict(a=[0.0]), dict(a=[1e-9]), False)[1] > 1


def test_one_faulty_card_does_not_widen_the_bound() -> None:
    assert bound_of([0.0, 0.0]) == SMALLEST_BOUND
    assert bound_of([1e-4, 2e-4, 5e-3]) == pytest.approx(2e-3)
    assert bound_of([1e-4, 5e-3]) == pytest.approx(1e-3)


@given(st.integers(1, 9), st.integers(1, 5))
def test_every_pair_meets_over_every_virtual_rank(world: int, length: int) -> None:
    block, met = range(3, 3 + length), set()
    for number in range(max(world - 1, 1) * length):
        pairing = Pairing(number, world)
        checkers = [pairing.checker(owner) for owner in range(world)]
        # Each rank checks one rank, never itself if there are others.
        assert sorted(checkers) == list(range(world))
        assert world == 1 or all(owner != checker for owner, checker in enumerate(checkers))
        for owner, checker in enumerate(checkers):
            assert pairing.owner(checker) == owner
            met.add((owner, checker, pairing.virtual_rank(block)))
    assert len(met) == world * max(world - 1, 1) * length


def verdict(world: int, number: int, faulty: Sequence[int], stable: bool = True) -> List[int]:
    """Return the ranks that are named if some ranks compute wrong numbers, always or by chance."""

    def compute(rank: int, owner: int, occasion: str) -> GradientPrint:
        wrong = (
            0.0
            if rank not in faulty
            else 10.0 * (rank + 1) + (0 if stable else occasions.index(occasion) / 10)
        )
        return dict(weight=[owner + wrong])

    occasions = ['step', 'check', 'vote']
    pairing = Pairing(number, world)
    steps = [compute(owner, owner, 'step') for owner in range(world)]
    checks = [compute(rank, pairing.owner(rank), 'check') for rank in range(world)]
    disputes = find_disputes(steps, checks, pairing, 0.0, True)
    for dispute in disputes:
        if dispute.voter is None:
            dispute.settle(False, False)
            continue
        vote = compute(dispute.voter, dispute.owner, 'vote')
        dispute.settle(vote == steps[dispute.owner], vote == checks[dispute.checker])
    return guilty_ranks(disputes)


@given(st.integers(2, 9), st.integers(0, 40), st.booleans(), st.data())
def test_one_faulty_rank_is_named(world: int, number: int, stable: bool, data: Any) -> None:
    rank = data.draw(st.integers(0, world - 1))
    assert verdict(world, number, [rank], stable) == ([0, 1] if world == 2 else [rank])
    assert verdict(world, number, []) == []


def test_three_results_name_all_three() -> None:
    dispute = Dispute(0, 1, 'weight', 1.0, 2)
    dispute.settle(False, False)
    assert dispute.suspects == [0, 1, 2]
    dispute.settle(True, True)  # within the bound of both
    assert dispute.suspects == [0, 1]
    alone = Dispute(0, 0, 'weight', 1.0)
    alone.settle(False, False)
    assert guilty_ranks([alone]) == [0]


def test_a_difference_within_the_bound_is_no_dispute() -> None:
    steps: List[Dict[str, List[float]]] = [dict(a=[1.0]), dict(a=[1.0])]
    checks = [dict(a=[1.0 + 1e-4]), dict(a=[1.0])]
    assert find_disputes(steps, checks, Pairing(0, 2), 2e-4, False) == []
    (dispute,) = find_disputes(steps, checks, Pairing(0, 2), 5e-5, False)
    assert (dispute.owner, dispute.checker, dispute.voter) == (1, 0, None)
