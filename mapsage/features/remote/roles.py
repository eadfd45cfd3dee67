"""Which ranks of a job encode and which train the head."""
from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Dict, Mapping

import torch.distributed as dist

ENCODER, HEAD = 'encoder', 'head'
# Set in every process of a job that was split: how many of its ranks encode.
ENCODERS_VARIABLE = 'MAPSAGE_ENCODERS'

_connections = itertools.count()


class RoleError(ValueError):
    """A job cannot be split into encoders and heads as asked."""


@dataclass(frozen=True)
class Role:
    """What one process of a split job is.

    Attributes:
        name: ``'encoder'`` or ``'head'``.
        index: Its number among those of its name.
        encoders: Encoders in the job.
        heads: Head ranks in the job.
        environ: Launcher variables to be set anew: a head sees heads only, as if they were all; an
            encoder, which is in no process group, has its device's number.
    """

    name: str
    index: int
    encoders: int
    heads: int
    environ: Dict[str, str]


def split_ranks(encoders: int, environ: Mapping[str, str], own_devices: bool) -> Role:
    """Return the role of the process with these launcher variables. Pure.

    The last ranks encode: rank 0 writes logs and checkpoints and is always a head, and on several
    machines the encoders are together on the last ones.

    Args:
        encoders: Ranks that encode.
        environ: With ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK`` and, if set, ``LOCAL_WORLD_SIZE``.
        own_devices: Encoders run on another kind of device than heads, so that both count their
            devices from 0. Otherwise a process keeps the device of its rank on the node.

    Raises:
        RoleError: If there is no rank left for the head, or ``encoders`` is no positive number.
    """
    if not isinstance(encoders, int) or isinstance(encoders, bool) or encoders < 1:
        raise RoleError(f'feature_source.encoders={encoders!r}, expected a number of ranks, 1 or '
                        f'more.')
    rank, world_size = int(environ['RANK']), int(environ['WORLD_SIZE'])
    heads = world_size - encoders
    if heads < 1:
        raise RoleError(
            f'feature_source.encoders={encoders} of {world_size} rank(s) leaves none for the head: '
            f'start at least {encoders + 1} (NPROC_PER_NODE), or lower encoders.')
    local_rank = int(environ['LOCAL_RANK'])
    local_size = int(environ.get('LOCAL_WORLD_SIZE', world_size))  # slurm may not say
    first = rank - local_rank  # of this node
    local_heads = max(0, min(local_size, heads - first))
    if rank < heads:
        own = dict(WORLD_SIZE=heads, LOCAL_WORLD_SIZE=local_heads)
        name, index = HEAD, rank
    else:
        own = dict(LOCAL_RANK=local_rank - local_heads if own_devices else local_rank,
                   LOCAL_WORLD_SIZE=local_size - local_heads if own_devices else local_size)
        name, index = ENCODER, rank - heads
    return Role(name, index, encoders, heads, {key: str(value) for key, value in own.items()
                                               if key in environ})


def check_ranks_per_head(ranks_per_head: int, heads: int) -> None:
    """Raise RoleError unless ``heads`` ranks form whole replicas of ``ranks_per_head`` ranks. Pure.
    """
    if not isinstance(ranks_per_head, int) or isinstance(ranks_per_head, bool) \
            or ranks_per_head < 1:
        raise RoleError(f'feature_source.ranks_per_head={ranks_per_head!r}, expected a number of '
                        f'ranks, 1 or more.')
    if heads % ranks_per_head:
        raise RoleError(
            f'feature_source.ranks_per_head={ranks_per_head} does not divide the {heads} rank(s) '
            f'that train the head: expected a multiple of {ranks_per_head}. Start that many '
            f'beside the encoders (NPROC_PER_NODE), or change ranks_per_head or encoders.')


def connect_store(timeout: float) -> Any:
    """Return a client of its own to the job's rendezvous store, which heads and encoders share.

    Args:
        timeout: Seconds to wait for the store.
    """
    # where env:// finds it; it outlives a restart by torchrun, and this process may train again
    place = f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/{next(_connections)}"
    store = dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']),
                          is_master=False, timeout=timedelta(seconds=timeout),
                          wait_for_workers=False)
    return dist.PrefixStore(f'mapsage/features/{place}', store)
