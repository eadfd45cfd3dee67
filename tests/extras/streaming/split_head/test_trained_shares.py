"""Optimizers that cannot train shares; test_replica_parallel.py has ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Iterator

import pytest
import torch
import torch.distributed as dist
from support import main_leg
from torch import nn

from mapsage.extras.streaming.split_head.tensor_parallel import TensorParallelError
from mapsage.extras.streaming.split_head.trained_shares import TrainedShares


class SGD(torch.optim.SGD):
    """An optimizer from outside torch.optim, under the name of one in it."""


@pytest.mark.parametrize('optimizer', [torch.optim.LBFGS, SGD])
def test_an_optimizer_that_needs_whole_weights_is_refused(optimizer: Any) -> None:
    head = nn.Conv2d(2, 4, 1)
    weights = list(head.parameters())
    group: Any = None  # never reached
    with pytest.raises(
        TensorParallelError,
        match=f'the optimizer is {optimizer.__name__}, expected one .*ranks_per_head=1',
    ):
        TrainedShares(head, group, optimizer(weights, lr=0.1))
    assert all(before is after for before, after in zip(weights, head.parameters()))


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[Any]:
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/store', rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


@main_leg
def test_a_replica_of_one_rank_trains_its_whole_head(one_rank: Any) -> None:
    head, frozen = nn.Conv2d(2, 4, 1), nn.Parameter(torch.ones(3), requires_grad=False)
    optimizer = torch.optim.AdamW([*head.parameters(), frozen], lr=0.1)
    shares = TrainedShares(head, one_rank, optimizer)
    split, whole = shares.parameters_of(optimizer)
    assert split == [] and [id(each) for each in whole] == [id(each) for each in head.parameters()]
    head(torch.ones(1, 2, 1, 1)).sum().backward()
    shares.take_gradients()
    optimizer.step()
    assert shares.gather_optimizer_state(optimizer) == {}  # all of it is in the optimizer
    copy = shares.assemble()
    assert copy is not head and torch.equal(copy.weight, head.weight)
    with pytest.raises(TensorParallelError, match='norm_type=1, expected 2'):
        shares.clip_grad_norm(whole, 1.0, norm_type=1)
