"""The estimate against the tensors that an optimizer really makes."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from mmengine.optim import OptimWrapper
from torch import nn

from mapsage.engine.training_memory import estimate_training_bytes


class Model(nn.Module):
    """A frozen layer, a float64 one, a buffer, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(3, 5).requires_grad_(False)
        self.first = nn.Linear(5, 5)
        self.second = nn.Linear(5, 5)
        self.second.weight = self.first.weight
        self.wide = nn.Linear(5, 7).double()
        self.norm = nn.BatchNorm1d(7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(self.frozen(x)))
        return self.norm(self.wide(hidden.double()).float())


def measured(optimizer: str, options: Dict[str, Any]) -> int:
    """Return the bytes of everything that one training step leaves behind."""
    model = Model()
    step = getattr(torch.optim, optimizer)(
        [p for p in model.parameters() if p.requires_grad], **options
    )
    model(torch.rand(4, 3)).sum().backward()
    step.step()
    # counters of steps are scalars
    states = [
        t
        for state in step.state.values()
        for t in state.values()
        if isinstance(t, torch.Tensor) and t.dim()
    ]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return sum(
        t.numel() * t.element_size()
        for t in [*model.parameters(), *model.buffers(), *gradients, *states]
    )


@pytest.mark.parametrize(
    'optimizer, options',
    [
        ('SGD', dict(lr=0.1)),
        ('SGD', dict(lr=0.1, momentum=0.9)),
        ('Adam', {}),
        ('AdamW', {}),
        ('AdamW', dict(amsgrad=True)),
        ('Adagrad', {}),
        ('Adadelta', {}),
        ('Adamax', {}),
        ('Rprop', {}),
        ('NAdam', {}),
        ('RAdam', {}),
        ('RMSprop', {}),
        ('RMSprop', dict(momentum=0.9, centered=True)),
        ('ASGD', {}),
    ],
)
def test_equals_what_an_optimizer_makes(optimizer: str, options: dict) -> None:
    want = measured(optimizer, options)
    config = dict(type='OptimWrapper', optimizer=dict(type=optimizer, **options))
    assert estimate_training_bytes(Model(), config) == want
    model = Model()
    built = getattr(torch.optim, optimizer)(model.parameters(), **{'lr': 0.1, **options})
    assert estimate_training_bytes(model, built) == want
    assert estimate_training_bytes(model, OptimWrapper(built)) == want
    lazy = dict(type=OptimWrapper, optimizer=dict(type=getattr(torch.optim, optimizer), **options))
    assert estimate_training_bytes(model, lazy) == want


def test_without_an_optimizer_the_weights_and_buffers() -> None:
    model = Model()
    assert estimate_training_bytes(model) == sum(
        t.numel() * t.element_size() for t in [*model.parameters(), *model.buffers()]
    )


def test_of_several_optimizers_the_largest_counts() -> None:
    adam, sgd = (dict(optimizer=dict(type=name, lr=0.1)) for name in ('Adam', 'SGD'))
    several = dict(constructor='Mine', generator=sgd, discriminator=adam)
    assert estimate_training_bytes(Model(), several) == estimate_training_bytes(Model(), adam)


def test_an_optimizer_nobody_knows_counts_as_adam() -> None:
    assert estimate_training_bytes(Model(), dict(optimizer=dict(type='Mystery'))) == measured(
        'Adam', {}
    )
