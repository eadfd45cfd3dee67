"""Encoders, and heads of several ranks each: trained as one process trains, to the end."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any, Dict, List

import pytest
import torch
import torch.distributed as dist
from forked import fork_scenarios
from ranks import run_ranks
from streaming_ranks import encode, item
from support import main_leg
from torch import nn

from mapsage.extras.streaming import (
    BlockPool,
    ReplicaFeatures,
    Replicated,
    Streamed,
    open_links,
    serve,
)

pytestmark = main_leg
CPU = torch.device('cpu')
STEPS = 6
# replicas, ranks of each, encoders
JOBS = [(1, 1, 1), (1, 2, 2), (2, 2, 1), (1, 4, 2), (2, 1, 2)]
# In float64 splitting changes the order of sums only.
CLOSE = dict(rtol=1e-9, atol=1e-11)


class Head(nn.Module):
    """Takes the first of the two levels that the encoder gives."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(6, 10, 3, padding=1), nn.Conv2d(10, 7, 1)

    def forward(self, features: Any) -> torch.Tensor:
        return self.last(self.first(features[0].double()).relu()).square().mean()


def make_head() -> nn.Module:
    torch.manual_seed(3)
    return Head().double()


def alone(replicas: int) -> List[Any]:
    """Return losses and weights of one process that computes what all replicas do."""
    head = make_head()
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        each = [head(encode(item(step * replicas + replica).images)) for replica in range(replicas)]
        (sum(each) / replicas).backward()
        optimizer.step()
        losses.append([float(loss.detach()) for loss in each])
    return [losses, {name: value.detach().clone() for name, value in head.state_dict().items()}]


def take_part(replicas: int, size: int, encoders: int, folder: Path) -> Any:
    """Be a head rank or an encoder of a job."""
    torch.set_num_threads(1)
    rank, heads = int(os.environ['RANK']), replicas * size
    leaders = range(0, heads, size)
    links_store = dist.FileStore(str(folder / 'links'), -1)
    if rank >= heads:
        links = open_links(links_store, rank, range(heads, heads + encoders), leaders, 30, 20)
        return serve(list(links.values()), encode, CPU)
    dist.init_process_group(
        'gloo',
        store=dist.FileStore(str(folder / 'heads'), heads),
        rank=rank,
        world_size=heads,
        timeout=timedelta(seconds=60),
    )
    groups = [dist.new_group(list(range(first, first + size))) for first in leaders]
    peers = [dist.new_group(list(range(place, heads, size))) for place in range(size)]
    replica, place = divmod(rank, size)
    source = None
    if place == 0:
        links = open_links(links_store, rank, range(heads, heads + encoders), leaders, 30, 20)
        # fewer blocks than the items under way need
        source = Streamed(
            [links[peer] for peer in sorted(links)],
            CPU,
            encode,
            block_bytes=4096,
            pool_bytes=14 * 4096,
            timeout=30,
        )
    pool = BlockPool(3 + rank, 4096)
    features = Replicated(ReplicaFeatures(groups[replica], pool, CPU, 30), source, ahead=2)
    told = train(replicas, replica, features, groups[replica], peers[place])
    features.close()
    pool.close()  # asserts that all blocks came back
    return told


def train(replicas: int, replica: int, source: Replicated, group: Any, peers: Any) -> Any:
    """Return losses, weights, ticks, and whether features are what is computed here."""
    from mapsage.extras.streaming import parallelize_head

    head = make_head()
    split = parallelize_head(head, group)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    items = [item(step * replicas + replica) for step in range(STEPS)]
    losses: List[float] = []
    equal = True
    for position in range(STEPS + source.ahead):
        if position < STEPS:
            source.request(items[position])
        if position < source.ahead:
            continue
        each = items[position - source.ahead]
        features = source.features(each)
        equal &= all(torch.equal(got, right) for got, right in zip(features, encode(each.images)))
        optimizer.zero_grad()
        loss = head(features)
        loss.backward()
        for parameter in head.parameters():  # data parallel, over the replicas
            grad: Any = parameter.grad
            local = grad.to_local() if hasattr(grad, 'to_local') else grad
            dist.all_reduce(local, group=peers)
            local /= replicas
        optimizer.step()
        losses.append(float(loss.detach()))
    return dict(
        losses=losses,
        weights=split.gather_state_dict(),
        equal=equal,
        ticks=source.report()['ticks'],
    )


def run_jobs(folder: Path) -> Dict[Any, Any]:
    return fork_scenarios(
        {job: (take_part, job[0] * job[1] + job[2], *job, Path) for job in JOBS}, folder
    )


@pytest.fixture(scope='module')
def answers(tmp_path_factory: pytest.TempPathFactory) -> Dict[Any, Any]:
    folder = tmp_path_factory.mktemp('replicated')
    return run_ranks(run_jobs, 1, folder, folder, timeout=600)[0]


@pytest.mark.parametrize('job', JOBS, ids=lambda job: '{}x{} heads, {} encoder(s)'.format(*job))
def test_split_heads_learn_what_one_process_learns(job: Any, answers: Dict[Any, Any]) -> None:
    assert isinstance(answers[job], list), answers[job]
    replicas, size, _ = job
    losses, weights = alone(replicas)
    for rank, told in enumerate(answers[job][: replicas * size]):
        assert told['equal']  # bit for bit, on ranks that hold no data as well
        mine = [each[rank // size] for each in losses]
        assert torch.allclose(
            torch.tensor(told['losses'], dtype=torch.float64),
            torch.tensor(mine, dtype=torch.float64),
            **CLOSE,
        )
        for name, weight in weights.items():
            assert torch.allclose(told['weights'][name], weight, **CLOSE), name
    encoded = sum(told['items'] for told in answers[job][replicas * size :])
    assert encoded == STEPS * replicas
