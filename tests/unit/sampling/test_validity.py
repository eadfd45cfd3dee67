"""Which groups carry a signal."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mapsage.sampling import Validity

finite = st.floats(-1e6, 1e6, allow_nan=False, width=32)


@given(finite, st.integers(2, 16))
def test_a_constant_group_has_no_spread(value: float, size: int) -> None:
    for dtype in (torch.float32, torch.float64):
        verdict = Validity(eps=0.0).judge(torch.full((size,), value, dtype=dtype), size)
        assert verdict.reasons == ['no_spread']


def test_float32_std_calls_constant_groups_valid_and_the_range_does_not() -> None:
    constants = [k / 100 for k in range(101)]
    fooled = sum(
        bool(torch.full((size,), value).std() > 0)
        for value in constants
        for size in (4, 5, 8, 12, 16)
    )
    assert fooled > 0  # what this guards against is still true of this torch
    for size in (4, 5, 8, 12, 16):
        scores = torch.tensor(constants)[:, None].expand(-1, size)
        assert not Validity(eps=0.0).judge(scores, size).valid.any()


@given(st.lists(finite, min_size=12, max_size=12), st.floats(0, 10), finite, finite)
def test_equals_plain_python(scores: list, eps: float, one: float, other: float) -> None:
    low, high = min(one, other), max(one, other) + 1
    verdict = Validity(eps=eps, low=low, high=high).judge(scores, 4)
    for index in range(3):
        group = scores[4 * index : 4 * index + 4]
        mean = math.fsum(group) / 4
        if any(abs(a - b) < 1e-6 for a, b in ((mean, low), (mean, high))):
            continue  # the last bit may fall either way
        expected = (
            'no_spread'
            if not max(group) - min(group) > eps
            else 'too_low'
            if not mean > low
            else 'too_high'
            if not mean < high
            else ''
        )
        assert verdict.reasons[index] == expected
        assert bool(verdict.valid[index]) == (not expected)


@pytest.mark.parametrize('size', [1, 3, 7])
def test_a_score_on_the_edge_of_the_band_is_outside_at_any_group_size(size: int) -> None:
    # the float64 mean of three times 0.1 is larger than 0.1
    assert Validity(low=0.1).judge([0.1] * size, size).reasons == ['too_low']
    assert Validity(high=0.1).judge([0.1] * size, size).reasons == ['too_high']


@pytest.mark.parametrize('bad', [math.nan, math.inf, -math.inf])
def test_scores_that_are_not_finite_are_never_valid(bad: float) -> None:
    for validity in (Validity(eps=0.0), Validity(low=-10.0), Validity(high=10.0)):
        verdict = validity.judge([1.0, bad, 1.0, 2.0], 2)
        assert verdict.reasons[0] == 'not_finite'
        assert verdict.valid.tolist() == [False, True]


@pytest.mark.parametrize(
    'scores',
    [
        torch.tensor([[0, 1], [1, 1]]),
        torch.tensor([False, True, True, True]),
        torch.tensor([0.0, 1, 1, 1], dtype=torch.bfloat16, requires_grad=True),
        [torch.tensor(0.0), 1, torch.tensor(1), True],
        (0.0, 1.0, 1.0, 1.0),
    ],
)
def test_takes_any_numbers(scores: object) -> None:
    assert Validity(eps=1e-6).judge(scores, 2).valid.tolist() == [True, False]


def test_an_empty_batch_has_no_groups() -> None:
    verdict = Validity(eps=1e-6, low=0.0).judge([], 4)
    assert verdict.reasons == []
    assert verdict.valid.shape == (0,)


def test_what_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ValueError, match='no criterion'):
        Validity()
    with pytest.raises(ValueError, match='low=1, high=1'):
        Validity(low=1, high=1)
    with pytest.raises(ValueError, match='eps=-1'):
        Validity(eps=-1)
    with pytest.raises(ValueError, match='group_size=1'):
        Validity(eps=0.1).check_group_size(1)
    Validity(low=0.1).check_group_size(1)
    with pytest.raises(ValueError, match='whole groups of 4'):
        Validity(low=0).judge([1, 2, 3, 4, 5], 4)
