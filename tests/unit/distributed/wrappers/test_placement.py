"""A model arrives on the device of its rank as a whole, and shared parameters stay shared."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from mapsage.accelerator import AcceleratorError, resolve_accelerator
from mapsage.distributed.wrappers import PlacementError, place_module


class Pinned(nn.Linear):
    """A layer that refuses to be moved."""

    def _apply(self, *args: Any, **kwargs: Any) -> nn.Module:
        return self


def elsewhere() -> torch.device:
    """A device that is not the CPU: XLA's where there is one."""
    try:
        return resolve_accelerator('xla').device()
    except AcceleratorError:
        return torch.device('meta')


@pytest.mark.skipif(torch.__version__ < '2', reason='torch 1.10 has no modules on the meta device')
def test_a_pinned_parameter_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2), Pinned(2, 2))
    module[1].weight = nn.Parameter(torch.empty(2, 2, device=elsewhere()))
    with pytest.raises(PlacementError, match=r'1 tensor\(s\) of Sequential .*: 1.weight on '):
        place_module(module, resolve_accelerator('cpu'), 0)


def test_a_model_goes_to_the_device_of_its_rank() -> None:
    try:
        accelerator = resolve_accelerator('sim')
    except AcceleratorError as error:
        pytest.skip(str(error))
    placed = place_module(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)), accelerator, 1)
    assert {tensor.device for tensor in placed.state_dict().values()} == {accelerator.device(1)}


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 3)
        self.other.weight = self.one.weight


@pytest.mark.parametrize('name', ['cpu', 'xla'])
def test_tied_parameters_stay_tied(name: str) -> None:
    try:
        accelerator = resolve_accelerator(name)
    except AcceleratorError as error:
        pytest.skip(str(error))
    placed = place_module(Tied(), accelerator, 0)
    assert placed.one.weight is placed.other.weight
    assert len(list(placed.parameters())) == 3
