"""Every encoder ends with the weights of the head's first rank, or with an error."""

from __future__ import annotations

from typing import Any, List

import torch
import torch.distributed as dist
from link_pairs import TIMEOUT, both
from torch import nn

from mapsage.distributed import WeightsDifferError
from mapsage.extras.streaming.remote.encoder_weights import share_encoder


def encoder(seed: int, channels: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    module = nn.Sequential(nn.Conv2d(3, channels, 1), nn.BatchNorm2d(channels))
    module.register_buffer('seen', torch.rand(5) > 0.5)
    module.register_buffer('scale', torch.rand(3).bfloat16())
    module.register_buffer('empty', torch.zeros(0, 4))
    return module


def share(*encoders: nn.Module) -> List[Any]:
    store = dist.HashStore()

    def run(rank: int) -> Any:
        try:
            return share_encoder(encoders[rank], store, rank, len(encoders), TIMEOUT)
        except WeightsDifferError as error:
            return error

    return both(*(lambda rank=rank: run(rank) for rank in range(len(encoders))))


def test_encoders_get_the_weights_of_rank_0() -> None:
    modules = [encoder(seed) for seed in range(3)]
    before = {name: each.clone() for name, each in modules[0].state_dict().items()}
    digests = share(*modules)
    assert len(set(digests)) == 1 and int(digests[0], 16) >= 0
    for module in modules:
        state = module.state_dict()
        assert list(state) == list(before)
        assert all(torch.equal(state[name], each) for name, each in before.items())
    assert share(encoder(7), encoder(8))[0] != digests[0]


def test_encoders_of_another_shape_are_named_on_every_rank() -> None:
    errors = share(encoder(0), encoder(1), encoder(2, channels=4))
    for error in errors:
        assert isinstance(error, WeightsDifferError)
        assert 'encoder(s) [1] built another model.backbone' in str(error)
