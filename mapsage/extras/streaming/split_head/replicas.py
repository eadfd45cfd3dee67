"""Replicas of a head: each copy of the head is trained by a group of ranks.

A rank belongs to two process groups: its replica (the ranks that share one copy) and its peers (the
ranks at the same position of the other copies). ``replica_parallel.py`` decides which
gradients are averaged over which group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Dict, List, Optional, Sequence

import torch
import torch.distributed as dist

from mapsage.accelerator import current_accelerator
from mapsage.distributed.groups.process_group import new_group


@dataclass(frozen=True)
class Replicas:
    """The head replicas of a job, and the position of this rank in them.

    Neighboring ranks form a replica: with 2 ranks per replica, ranks 0 and 1 are replica 0.

    Attributes:
        size: Number of ranks in each replica.
        count: Number of replicas in the job, which is the size of the data-parallel world.
        index: Index of this rank's replica.
        position: Position of this rank in its replica. The rank at position 0, the leader,
            communicates with the encoders.
        group: Process group of the ranks of this replica.
        peers: Process group of the ranks at this position in all replicas, in the order of the
            replicas.
    """

    size: int
    count: int
    index: int
    position: int
    group: dist.ProcessGroup
    peers: dist.ProcessGroup

    def leaders(self) -> range:
        """Return the ranks that communicate with the encoders, one per replica."""
        return range(0, self.size * self.count, self.size)


def make_replicas(size: int, timeout: float) -> Replicas:
    """Form replicas of ``size`` ranks out of the default process group. Collective.

    Args:
        size: Number of ranks in each replica; it must divide the world size.
        timeout: Seconds that a collective may take.
    """
    world, rank = dist.get_world_size(), dist.get_rank()
    count = world // size
    accelerator = current_accelerator()
    # new_group() is collective, so every rank makes every group, in the same order.
    groups = [
        new_group(range(first, first + size), accelerator, timeout)
        for first in range(0, world, size)
    ]
    peers = [
        new_group(range(position, world, size), accelerator, timeout) for position in range(size)
    ]
    index, position = divmod(rank, size)
    return Replicas(size, count, index, position, groups[index], peers[position])


def average_gradients(
    parameters: Sequence[torch.Tensor], group: Optional[dist.ProcessGroup]
) -> None:
    """Replace each gradient by its mean over the ranks of ``group``. Collective.

    A missing gradient counts as zeros, because the shape of a collective must not depend on what
    one rank has computed.

    Args:
        parameters: Parameters with the same shapes, dtypes and order on all ranks of the group.
        group: Process group of the ranks to average over; all ranks when None.
    """
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    count = dist.get_world_size(group)
    if count == 1:
        return
    by_dtype: Dict[torch.dtype, List[torch.Tensor]] = {}
    for parameter in parameters:
        assert parameter.grad is not None
        by_dtype.setdefault(parameter.dtype, []).append(parameter.grad)
    for grads in by_dtype.values():
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        dist.all_reduce(flat, group=group)
        flat /= count
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads])):
            grad.copy_(mean.view_as(grad))
