"""Splits the ranks of a job into encoders and ranks that train the head.

The last ranks encode. Both kinds get launcher variables that describe only their part of the job,
so that everything that reads these variables, such as the process group of the heads, needs no
special case.
"""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Dict, Mapping

import torch.distributed as dist

from mapsage.base.errors import UserError
from mapsage.distributed.job_store import private_store
from mapsage_launcher.rank_notes import ROUND_VARIABLE

ENCODER, HEAD = 'encoder', 'head'

_connections = itertools.count()


class RoleError(UserError, ValueError):
    """The ranks of a job cannot be split into encoders and heads as the config says."""

    on_every_rank = True


@dataclass(frozen=True)
class Role:
    """The role of one process of a split job.

    Attributes:
        name: ``'encoder'`` or ``'head'``.
        index: Number of the process among the processes with the same name.
        encoders: Number of encoders in the job.
        heads: Number of head ranks in the job.
        local_heads: Number of head ranks on this machine.
        environ: Launcher variables to replace. For a head they describe a job of heads only. For an
            encoder, which is in no process group, they give the number of its device.
    """

    name: str
    index: int
    encoders: int
    heads: int
    local_heads: int
    environ: Dict[str, str]


def split_ranks(encoders: int, environ: Mapping[str, str], separate_devices: bool) -> Role:
    """Return the role of the process with these launcher variables. Pure.

    The last ranks encode. Rank 0, which writes logs and checkpoints, is therefore always a head,
    and on several machines the encoders are together on the last ones.

    Args:
        encoders: Number of ranks that encode.
        environ: Environment with ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and, if the launcher sets
            it, ``LOCAL_WORLD_SIZE``.
        separate_devices: Whether encoders run on another kind of device than heads, so that both
            count their devices from 0. Otherwise a process uses the device with the number of its
            rank on the machine.

    Raises:
        RoleError: If no rank is left for the head, or ``encoders`` is not a positive integer.
    """
    if not isinstance(encoders, int) or isinstance(encoders, bool) or encoders < 1:
        raise RoleError(
            f'feature_source.encoders={encoders!r}, expected a number of ranks, 1 or more.'
        )
    rank, world_size = int(environ['RANK']), int(environ['WORLD_SIZE'])
    heads = world_size - encoders
    if heads < 1:
        raise RoleError(
            f'feature_source.encoders={encoders} of {world_size} rank(s) leaves none for the head: '
            f'start at least {encoders + 1} (NPROC_PER_NODE), or lower encoders.'
        )
    local_rank = int(environ['LOCAL_RANK'])
    # Slurm may not set LOCAL_WORLD_SIZE.
    local_size = int(environ.get('LOCAL_WORLD_SIZE', world_size))
    first_local_rank = rank - local_rank
    local_heads = max(0, min(local_size, heads - first_local_rank))
    if rank < heads:
        variables = dict(WORLD_SIZE=heads, LOCAL_WORLD_SIZE=local_heads)
        name, index = HEAD, rank
    else:
        # Ranks of this machine that do not share the encoders' devices.
        elsewhere = local_heads if separate_devices else 0
        variables = dict(LOCAL_RANK=local_rank - elsewhere, LOCAL_WORLD_SIZE=local_size - elsewhere)
        name, index = ENCODER, rank - heads
    replaced = {key: str(value) for key, value in variables.items() if key in environ}
    return Role(name, index, encoders, heads, local_heads, replaced)


def check_ranks_per_head(ranks_per_head: int, heads: int) -> None:
    """Raise RoleError unless ``ranks_per_head`` is positive and divides ``heads``. Pure."""
    if (
        not isinstance(ranks_per_head, int)
        or isinstance(ranks_per_head, bool)
        or ranks_per_head < 1
    ):
        raise RoleError(
            f'feature_source.ranks_per_head={ranks_per_head!r}, expected a number of '
            f'ranks, 1 or more.'
        )
    if heads % ranks_per_head:
        raise RoleError(
            f'feature_source.ranks_per_head={ranks_per_head} does not divide the {heads} rank(s) '
            f'that train the head: expected a multiple of {ranks_per_head}. Start that many '
            f'in addition to the encoders (NPROC_PER_NODE), or change ranks_per_head or encoders.'
        )


def connect_store(timeout: float) -> dist.Store:
    """Return a new client of the job's rendezvous store, which heads and encoders share.

    Args:
        timeout: Seconds to wait for the store.
    """
    # A store of torchrun outlives a restart, and this process may train several times, so every
    # connection uses another prefix for its keys. In an elastic job each machine counts its own
    # restarts, so the number of the round is used instead.
    start = os.environ.get(ROUND_VARIABLE) or os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')
    store = private_store(timeout)
    if store is None:
        store = dist.TCPStore(
            os.environ['MASTER_ADDR'],
            int(os.environ['MASTER_PORT']),
            is_master=False,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,
        )
    return dist.PrefixStore(f'mapsage/extras/streaming/{start}/{next(_connections)}', store)
