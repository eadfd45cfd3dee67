"""A checkpoint is compared with the model before its weights are used."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from torch import nn

from mapsage.models.checkpoint_fit import (
    CheckpointFitError,
    check_start,
    check_whole,
    compare,
    plain_weights,
)


def build(width: int = 4) -> nn.Module:
    """Return a model of a backbone, a head and an auxiliary head."""
    model = nn.Module()
    model.backbone = nn.Sequential(*(nn.Linear(width, width) for _ in range(6)))
    model.backbone.add_module('norm', nn.BatchNorm1d(width))
    model.decode_head = nn.Linear(width, 2)
    model.auxiliary_head = nn.Linear(width, 2)
    return model


def weights_of(model: nn.Module, prefix: str = '') -> Dict[str, Any]:
    return {prefix + name: tensor for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize('training', [False, True])
def test_its_own_checkpoint_fits(training: bool) -> None:
    model = build()
    check_whole(model, weights_of(model), 'a.pth', training)
    assert compare(model, weights_of(model)).describe() == ''


def test_auxiliary_heads_count_only_where_the_model_is_trained() -> None:
    model = build()
    weights = {
        name: tensor
        for name, tensor in weights_of(model).items()
        if not name.startswith('auxiliary_head.')
    }
    check_whole(model, weights, 'a.pth')
    with pytest.raises(CheckpointFitError, match='2 missing: auxiliary_head.weight'):
        check_whole(model, weights, 'a.pth', training=True)
    weights['auxiliary_head.1.weight'] = torch.zeros(1)
    check_whole(model, weights, 'a.pth')


def test_a_checkpoint_without_counters_of_batches_fits() -> None:
    """PyTorch before 0.4.1 wrote none, and MMEngine ignores that too."""
    model = build()
    weights = weights_of(model)
    del weights['backbone.norm.num_batches_tracked']
    check_whole(model, weights, 'a.pth', training=True)


@pytest.mark.parametrize(
    'change, message',
    [
        (lambda weights: weights.pop('decode_head.bias'), '1 missing: decode_head.bias'),
        (lambda weights: weights.update(extra=torch.zeros(1)), '1 left over: extra'),
        (
            lambda weights: weights.update({'decode_head.bias': torch.zeros(3)}),
            r'1 of another shape: decode_head.bias is \(3,\), expected \(2,\)',
        ),
    ],
)
def test_a_single_weight_is_enough_to_refuse_a_test(change: Any, message: str) -> None:
    model = build()
    weights = weights_of(model)
    change(weights)
    with pytest.raises(CheckpointFitError, match=rf'a\.pth does not fit .*{message}'):
        check_whole(model, weights, 'a.pth')
    assert check_start(model, weights, 'a.pth').describe() != ''


def test_names_are_counted_and_the_first_given() -> None:
    model = build()
    with pytest.raises(
        CheckpointFitError,
        match=(
            '18 missing: backbone.0.weight, backbone.0.bias, backbone.1.weight, '
            'backbone.1.bias and 14 more; 1 left over: stem'
        ),
    ):
        check_whole(model, dict(stem=torch.zeros(1)), 'a.pth')


@pytest.mark.parametrize('prefix', ['model_ema.', 'ema_model.module.', 'module.', 'ema_'])
def test_a_prefix_that_is_in_the_way_is_named(prefix: str) -> None:
    model = build()
    weights = plain_weights(
        dict(state_dict=dict(steps=torch.zeros(1), **weights_of(model, f'module.{prefix}'))),
        'a.pth',
    )
    for check in (check_whole, check_start):
        with pytest.raises(CheckpointFitError, match=f"begin with '{prefix}', without which"):
            check(model, weights, 'a.pth')


def test_the_prefix_of_a_wrapper_is_removed() -> None:
    model = build()
    check_whole(model, plain_weights(weights_of(model, 'module.'), 'a.pth'), 'a.pth')
    wrapper = nn.Module()
    wrapper.module = model
    check_whole(wrapper, plain_weights(weights_of(model), 'a.pth'), 'a.pth')


def test_a_training_may_begin_with_a_part() -> None:
    """A backbone, adapters that are a small part of a model, a model with more heads."""
    model = build()
    backbone = {
        name: tensor for name, tensor in weights_of(model).items() if name.startswith('backbone.')
    }
    fit = check_start(model, backbone, 'a.pth')
    assert fit.fitting == len(backbone)
    check_start(model, {'decode_head.bias': torch.zeros(2)}, 'a.pth')
    more = dict(weights_of(model), **{f'neck.{number}': torch.zeros(1) for number in range(99)})
    check_start(model, more, 'a.pth')


@pytest.mark.parametrize(
    'strange',
    [
        {'conv.weight': torch.zeros(1)},
        {'decode_head.bias': torch.zeros(2), **{f'stem.{at}': torch.zeros(1) for at in range(40)}},
        {name: torch.zeros(1, 1) for name in build().state_dict()},
    ],
    ids=['no name', 'one name by chance', 'no shape'],
)
def test_a_training_does_not_begin_with_what_has_nothing_in_common(strange: Any) -> None:
    with pytest.raises(CheckpointFitError, match="load_from='a.pth' has nothing in common"):
        check_start(build(), strange, 'a.pth')


@pytest.mark.parametrize('content', [[], {}, dict(state_dict={}), dict(state_dict=[1])], ids=str)
def test_what_holds_no_weights_is_named(content: Any) -> None:
    with pytest.raises(CheckpointFitError, match='has no state_dict'):
        plain_weights(content, 'a.pth')


class Counting(nn.Linear):
    """A layer with a state that is no tensor."""

    def get_extra_state(self) -> Dict[str, int]:
        return dict(calls=3)

    def set_extra_state(self, state: Dict[str, int]) -> None:
        pass


def test_a_state_that_is_no_tensor_has_no_shape() -> None:
    model = build()
    model.decode_head = Counting(4, 2)
    check_whole(model, weights_of(model), 'a.pth', training=True)


class Renaming(nn.Linear):
    """A layer that takes the names of its old versions, as some of mmcv's do."""

    def _load_from_state_dict(self, state: Dict[str, Any], prefix: str, *args: Any) -> None:
        if f'{prefix}old' in state:
            state[f'{prefix}weight'] = state.pop(f'{prefix}old')
        super()._load_from_state_dict(state, prefix, *args)


def test_what_a_layer_of_another_package_converts_is_left_to_it() -> None:
    model = build()
    model.decode_head = Renaming(4, 2)
    weights = weights_of(model)
    weights['decode_head.old'] = weights.pop('decode_head.weight')
    check_whole(model, weights, 'a.pth', training=True)
    del weights['backbone.0.weight']
    with pytest.raises(CheckpointFitError, match='1 missing: backbone.0.weight'):
        check_whole(model, weights, 'a.pth', training=True)
