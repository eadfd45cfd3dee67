"""Indices of equal values and random numbers: right ones pass, whatever a kernel chose."""

from __future__ import annotations

import pytest
import torch

from mapsage.extras.forensics.operators.undetermined import (
    indices_mistake,
    random_mistake,
    returns_indices,
)

SOURCE = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])


def test_any_of_several_maxima_is_right() -> None:
    values, indices = SOURCE.max(1)
    cpu = [values, indices]
    for choice in ([1, 0], [2, 3]):
        assert indices_mistake('max.dim', (SOURCE, 1), [values, torch.tensor(choice)], cpu) is None
    assert 'other values' in indices_mistake(
        'max.dim', (SOURCE, 1), [values, torch.tensor([0, 0])], cpu
    )
    assert 'outside 0 to 3' in indices_mistake(
        'max.dim', (SOURCE, 1), [values, torch.tensor([4, 0])], cpu
    )


def test_argmax_with_and_without_a_dimension() -> None:
    indices = SOURCE.argmax(1)
    assert indices_mistake('argmax', (SOURCE, 1), [torch.tensor([2, 1])], [indices]) is None
    assert indices_mistake('argmax', (SOURCE,), [torch.tensor(2)], [SOURCE.argmax()]) is None
    assert indices_mistake('argmax', (SOURCE,), [torch.tensor(4)], [SOURCE.argmax()])
    assert (
        indices_mistake('argmin', (SOURCE, 0), [torch.tensor([0, 1, 1, 0])], [SOURCE.argmin(0)])
        is None
    )


def test_a_sort_may_exchange_equal_values_and_not_repeat_them() -> None:
    values, indices = SOURCE.sort(stable=True, dim=1)
    exchanged = indices.clone()
    exchanged[1] = torch.tensor([3, 2, 1, 0])
    repeated = indices.clone()
    repeated[1] = 0
    args = (SOURCE, True, 1)
    assert indices_mistake('sort.stable', args, [values, exchanged], [values, indices]) is None
    assert 'twice' in indices_mistake('sort.stable', args, [values, repeated], [values, indices])
    values, indices = SOURCE.topk(2, dim=1)
    assert (
        indices_mistake(
            'topk', (SOURCE, 2, 1), [values, torch.tensor([[2, 1], [3, 0]])], [values, indices]
        )
        is None
    )


def test_pooling_indices_lead_to_the_maxima() -> None:
    image = torch.ones(1, 1, 4, 4)
    values, indices = torch.nn.functional.max_pool2d(image, 2, return_indices=True)
    name = 'max_pool2d_with_indices'
    assert returns_indices(name) and not returns_indices('max') and not returns_indices('relu')
    assert indices_mistake(name, (image, [2, 2]), [values, indices + 1], [values, indices]) is None
    image[0, 0, 0, 1] = 5
    values, indices = torch.nn.functional.max_pool2d(image, 2, return_indices=True)
    assert indices_mistake(name, (image, [2, 2]), [values, indices + 1], [values, indices])


@pytest.mark.parametrize(
    'result, text',
    [
        (lambda source, mask: source * mask / 0.75, None),
        (lambda source, mask: source * mask, 'do not fit the mask'),
        (lambda source, mask: (source * mask / 0.75).double(), 'float64'),
        (lambda source, mask: source * float('nan'), 'not finite'),
    ],
)
def test_dropout_fits_its_mask_whatever_it_drew(result, text) -> None:
    source = torch.randn(50, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(50) % 4 != 0
    mistake = random_mistake(
        'native_dropout', (source, 0.25, True), [result(source, mask), mask], [source, ~mask]
    )
    assert mistake is None if text is None else text in mistake


def test_a_draw_of_zeros_and_ones() -> None:
    draw = torch.tensor([0.0, 1.0, 1.0])
    assert random_mistake('bernoulli_.float', (draw, 0.5), [draw], [draw]) is None
    assert random_mistake('bernoulli_.float', (draw, 0.5), [draw / 2], [draw])
