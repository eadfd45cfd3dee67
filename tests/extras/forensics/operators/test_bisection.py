"""Faults that only an undisturbed step shows are found in few runs."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Callable

import pytest
import torch
from planted_steps import SmallStep
from support import no_simulated_cards
from test_operator_comparison import compare

from mapsage.accelerator import resolve_accelerator
from mapsage.extras.forensics.operators.bisection import Bisection, wrong_results

with_cards = pytest.mark.skipif(no_simulated_cards() is not None, reason='no simulated cards here')


def _stray() -> AbstractContextManager:
    from _planted_kernels import stray_write

    return stray_write('native_batch_norm')


def _late() -> AbstractContextManager:
    from _planted_kernels import late_result

    return late_result('hardtanh_backward')


def _after() -> AbstractContextManager:
    from _planted_kernels import wrong_after

    return wrong_after('convolution_backward', 'native_batch_norm_backward')


@with_cards
@pytest.mark.parametrize(
    'fault, operator',
    [(_stray, 'native_batch_norm'), (_late, 'hardtanh_backward'), (_after, 'convolution_backward')],
)
def test_a_fault_in_the_sequence_is_found(
    fault: Callable[[], AbstractContextManager], operator: str
) -> None:
    step = SmallStep()
    with fault():
        assert not compare(step).wrong
        bisection = Bisection(step.gradients, step.accelerator.synchronize)
        assert bisection.whole_step()
        culprit = bisection.find()
    if fault is _late:
        # The operator that reads the result too early is named with the one that was late.
        assert operator in culprit.sources and culprit.name == 'native_batch_norm_backward'
    else:
        assert culprit.name == operator
    assert culprit.runs <= 2 * math.ceil(math.log2(bisection.operators))
    assert 1 <= culprit.number <= bisection.operators > 30 and culprit.results


@with_cards
def test_a_late_result_is_named_behind_a_view() -> None:
    from _planted_kernels import late_result

    accelerator = resolve_accelerator('sim')

    def step() -> dict:
        tensor = torch.ones(4, 4).to('gcu:0').mul(3).exp()
        return dict(loss=tensor.t().reshape(16)[:8].sum())

    with late_result('exp'):
        bisection = Bisection(step, accelerator.synchronize)
        assert bisection.whole_step() == ['loss']
        culprit = bisection.find()
    assert 'exp' in culprit.sources and culprit.name not in ('t', 'exp')


@with_cards
def test_a_right_step_is_right_with_dropout_in_it() -> None:
    step = SmallStep()
    bisection = Bisection(step.gradients, step.accelerator.synchronize)
    assert bisection.whole_step() == []


@with_cards
def test_random_numbers_are_drawn_by_the_cpu_in_all_runs() -> None:
    from _planted_kernels import one_nan, planted

    step = SmallStep()
    draws = [name for name in compare(step).operators if 'bernoulli' in name or 'dropout' in name]
    with planted(draws[0], one_nan):
        bisection = Bisection(step.gradients, step.accelerator.synchronize)
        assert bisection.whole_step() == []


@pytest.mark.parametrize(
    'change, wrong',
    [
        (lambda results: None, []),
        (lambda results: results['weight'].mul_(1 + 1e-5), []),
        (lambda results: results['weight'].mul_(1 + 1e-2), ['weight']),
        (lambda results: results['weight'].fill_(math.nan), ['weight']),
        (lambda results: results['loss'].add_(0.01), ['loss']),
        # The gradient of a bias before BatchNorm is rounding.
        (lambda results: results['bias'].mul_(-7), []),
        (lambda results: results['bias'].add_(1), ['bias']),
        (lambda results: results.pop('weight'), ['weight']),
    ],
)
def test_results_differ_by_rounding_or_are_wrong(change, wrong) -> None:
    expected = dict(
        loss=torch.tensor(2.0), weight=torch.linspace(-1, 1, 50), bias=torch.full((4,), 1e-9)
    )
    results = {name: tensor.clone() for name, tensor in expected.items()}
    change(results)
    assert wrong_results(results, expected) == wrong
