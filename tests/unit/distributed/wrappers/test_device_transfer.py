"""Moves of tensors when a module is entered; the meta device stands for the other one."""

from __future__ import annotations

import copy
from typing import Any, List

import torch
from torch import nn

from mapsage.distributed.wrappers.device_transfer import (
    TransferredFeatures,
    bring_inputs,
    bring_outputs,
    bring_together,
)

META = torch.device('meta')


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: List[Any] = []

    def loss(self, inputs: Any, labels: Any = None) -> Any:
        self.seen = [type(inputs), inputs[1].device.type, labels.device.type]
        return labels


def test_features_move_when_they_are_read() -> None:
    maps = [torch.zeros(2), torch.ones(2)]
    features = TransferredFeatures.on(maps, META)
    assert [each.device.type for each in tuple.__iter__(features)] == ['cpu', 'cpu']
    assert features[0].device == META and all(each.device == META for each in features)
    again = TransferredFeatures.on(features, torch.device('cpu'))
    assert [each.device.type for each in tuple.__iter__(again)] == ['cpu', 'cpu']


def test_arguments_and_results_move_and_a_copy_does_the_same() -> None:
    head = Head()
    bring_inputs(head, 'loss', META, lazily=True)
    bring_inputs(head, 'loss', META, lazily=True)  # a second time replaces the first
    for module in (head, copy.deepcopy(head)):
        module.seen = []
        result = module.loss([torch.zeros(1), torch.zeros(1)], labels=torch.zeros(3))
        assert module.seen == [TransferredFeatures, 'meta', 'meta'] and result.device == META
    other = Head()
    bring_outputs(other, 'loss', META)
    assert other.loss([0, torch.zeros(1)], torch.zeros(3)).device == META
    assert other.seen[1:] == ['cpu', 'cpu']


def test_arguments_meet_where_the_first_tensor_is() -> None:
    head = Head()
    bring_together(head, 'loss')
    head.loss([torch.zeros(1, device=META), torch.zeros(1)], labels=torch.zeros(3))
    assert head.seen[1:] == ['meta', 'meta']
