"""Bounds for the error of a right kernel: other orders of additions pass, mistakes do not."""

from __future__ import annotations

import math
import re
from typing import Callable

import pytest
import torch

from mapsage.extras.forensics.operators.error_bounds import compare_results, rounding_bound


@pytest.mark.parametrize('length', [10, 1000, 20000])
@pytest.mark.parametrize('offset', [0.0, 3.0])
def test_sums_in_any_order_are_right(length: int, offset: float) -> None:
    generator = torch.Generator().manual_seed(length)
    terms = torch.randn(20, length, generator=generator) + offset
    reference = terms.double().sum(1)
    for order in (terms.flip(1), terms[:, torch.randperm(length, generator=generator)]):
        one_by_one = order.cumsum(1)[:, -1]
        error = compare_results(one_by_one, terms.sum(1), reference, length)
        assert not error.is_wrong and error.error <= error.bound


def test_terms_that_cancel_are_judged_by_their_magnitude() -> None:
    terms = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    terms = torch.cat([terms, -terms])
    shuffled = terms[torch.randperm(2000, generator=torch.Generator().manual_seed(1))]
    reference = terms.double().sum()[None]
    assert abs(float(reference)) < 1e-12
    card, cpu = shuffled.sum()[None], torch.zeros(1)
    # This CPU happened to be exact.
    assert compare_results(card, cpu, reference, 2000).is_wrong
    magnitude = terms.abs().sum()[None]
    assert not compare_results(card, cpu, reference, 2000, magnitude=magnitude).is_wrong
    assert compare_results(card + 0.1, cpu, reference, 2000, magnitude=magnitude).is_wrong


def test_the_bound_is_the_formula() -> None:
    unit = 2.0**-24
    assert rounding_bound(torch.float32, 100.0, 2.0, 1e-6) == pytest.approx(
        4 * ((unit + 10 * unit) * 2 + 1e-6)
    )
    # Sums of half-precision products are accumulated in float32.
    assert rounding_bound(torch.bfloat16, 100.0, 1.0, 0.0) == pytest.approx(
        4 * (2.0**-8 + 10 * unit), rel=1e-3
    )


@pytest.mark.parametrize(
    'change, text',
    [
        (lambda tensor: tensor.roll(1), 'differ by more than rounding'),
        (lambda tensor: tensor.bfloat16().float(), 'differ by more than rounding'),
        (lambda tensor: tensor.index_fill(0, torch.tensor([3]), math.nan), 'NaN'),
        (lambda tensor: tensor.index_fill(0, torch.tensor([3]), math.inf), 'infinite values'),
        (lambda tensor: tensor[:-1], r'float32 \(99,\) instead of float32 \(100,\)'),
        (lambda tensor: tensor.double(), 'float64'),
    ],
)
def test_mistakes_are_wrong(change: Callable[[torch.Tensor], torch.Tensor], text: str) -> None:
    right = torch.linspace(1, 2, 100)
    error = compare_results(change(right), right, right.double())
    assert error.is_wrong and re.search(text, error.text)
    assert not compare_results(right, right, right.double()).is_wrong


def test_nan_and_infinity_of_the_cpu_are_expected() -> None:
    right = torch.tensor([1.0, math.nan, math.inf, -math.inf])
    assert not compare_results(right.clone(), right, right.double()).is_wrong
    for position in (1, 2, 3):
        card = right.clone()
        card[position] = 0
        assert compare_results(card, right, right.double()).is_wrong
    swapped = torch.tensor([1.0, math.nan, -math.inf, math.inf])
    assert compare_results(swapped, right, right.double()).is_wrong


def test_a_card_may_round_subnormal_numbers_to_zero() -> None:
    right = torch.tensor([1e-40])
    assert not compare_results(torch.zeros(1), right, right.double()).is_wrong
    assert compare_results(torch.full((1,), 1e-37), right, right.double()).is_wrong


def test_integers_must_be_equal() -> None:
    right = torch.arange(5)
    assert not compare_results(right.clone(), right, None).is_wrong
    error = compare_results(right + (right == 2).long(), right, None)
    assert error.text == '1 of 5 values differ' and error.error == 1
    assert not compare_results(torch.tensor([True]), torch.tensor([True]), None).is_wrong


def test_float64_in_float32_is_right_only_where_the_card_computes_so() -> None:
    right = torch.linspace(1, 2, 100, dtype=torch.float64) ** 0.5
    card = right.float().double()
    assert compare_results(card, right, right).is_wrong
    assert not compare_results(card, right, right, float64_as_float32=True).is_wrong
