"""Wrong kernels on a simulated card are named, one by one, and right ones are not."""

from __future__ import annotations

from typing import Iterator

import pytest
import torch
from planted_steps import SmallStep
from support import no_simulated_cards

from mapsage.extras.forensics.operators.comparison import OperatorComparison
from mapsage.extras.simulator.accelerator import SimAccelerator

pytestmark = pytest.mark.skipif(no_simulated_cards() is not None, reason='no simulated cards here')


def compare(step: SmallStep) -> OperatorComparison:
    comparison = OperatorComparison('gcu', step.accelerator.synchronize, float64_as_float32=True)
    with comparison:
        step.gradients()
    return comparison


@pytest.fixture(scope='module')
def step() -> Iterator[SmallStep]:
    yield SmallStep()


@pytest.mark.parametrize(
    'kind, operator, calls',
    [
        ('off by one', 'native_batch_norm', 2),
        ('wrong stride', 'convolution_backward', 3),
        ('NaN', 'hardtanh', 2),
        ('stale buffer', '_log_softmax', 1),
        ('wrong dtype', 'convolution', 3),
        ('above a size', 'hardtanh_backward', 2),
    ],
)
def test_a_wrong_kernel_is_named(kind: str, operator: str, calls: int, step: SmallStep) -> None:
    from _planted_kernels import KINDS, planted

    with planted(operator, KINDS[kind]()):
        comparison = compare(step)
    assert list(comparison.wrong) == [operator]
    wrong = comparison.wrong[operator]
    assert wrong.calls == calls and 1 <= wrong.wrong_calls <= calls
    assert wrong.worst.text and wrong.worst.excess > 1 and len(wrong.shapes) >= 1


def test_right_kernels_are_not_accused(step: SmallStep) -> None:
    from _planted_kernels import other_rounding, planted

    comparison = compare(step)
    assert not comparison.wrong and comparison.operators['convolution'].calls == 3
    # Views and uninitialized tensors are not compared; random numbers are, by what must hold.
    assert 'transpose.int' not in comparison.operators
    assert any('bernoulli' in name or 'native_dropout' in name for name in comparison.operators)
    with planted('convolution', other_rounding), planted('native_batch_norm', other_rounding):
        assert not compare(step).wrong


def test_terms_that_cancel_are_no_alarm() -> None:
    from _planted_kernels import planted

    # The CPU adds these exactly.
    terms = torch.tensor([1.0, -1.0] * 1000).to('gcu:0')
    for error, wrong in ((1e-5, []), (0.1, ['sum'])):
        comparison = OperatorComparison('gcu', SimAccelerator().synchronize)
        with planted('sum', lambda result, error=error: torch.full_like(result, error)), comparison:
            terms.sum()
        assert list(comparison.wrong) == wrong


def test_a_kernel_that_overwrites_its_argument_is_named(step: SmallStep) -> None:
    from _planted_kernels import _kernels

    with _kernels({'hardtanh': lambda func, args, result: args[0].mul_(2)}):
        comparison = compare(step)
    assert list(comparison.wrong) == ['hardtanh']
    assert comparison.wrong['hardtanh'].worst.text == 'it overwrites its argument self'
