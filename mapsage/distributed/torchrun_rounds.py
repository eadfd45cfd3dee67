"""Machines that join a job of plain torchrun (``--nnodes 1:2``, c10d).

Gap: since torch 2.4, torchrun's agents share the store of their ranks, and the agent that keeps it
publishes its address only in its first round (``DynamicRendezvousHandler.next_rendezvous``). A
machine that joins waits 60 s for the address in vain, and then all machines end. Where it becomes
the first of the machines, by its address, its agent keeps a new store, and the other agents still
tell their ranks the address of the old one. The shared store
also keeps the keys of the rounds before. With ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1``, and under
MapSage's launcher, none of this happens.

Rank 0 publishes the address for its own round and the next one here, and each round has keys of
its own.

Remove when: torch's handler sets ``MASTER_ADDR`` in each round.
"""

from __future__ import annotations

import os
import re
from datetime import timedelta
from pathlib import Path
from typing import Dict, Mapping, NamedTuple, Optional

import torch.distributed as dist

# Seconds for the rendezvous store, which answers at once where it can be reached.
_SECONDS = 10
_ADDRESS = ['MASTER_ADDR', 'MASTER_PORT']
_RANGE = re.compile(r'--?nnodes[=\0]\d+:\d+\0')


class TorchrunRound(NamedTuple):
    """The round of torchrun's rendezvous that started this rank.

    Attributes:
        store: torchrun's rendezvous store.
        job: Name of the job there.
        number: Number of the round, from 0.
    """

    store: dist.Store
    job: str
    number: int

    def meet(self, environ: Mapping[str, str], limit: timedelta) -> Dict[str, str]:
        """Return the variables of rank 0 that say where its agent keeps the ranks' store.

        Args:
            environ: This rank's environment.
            limit: Time to wait for rank 0.
        """
        own = dist.PrefixStore(f'{self.job}.{self.number}/mapsage', self.store)
        if environ['RANK'] == '0':
            for name in _ADDRESS:
                own.set(name, environ[name])
        own.wait(_ADDRESS, limit)
        return {name: own.get(name).decode() for name in _ADDRESS}

    def publish_address(self, environ: Mapping[str, str]) -> None:
        """Tell the machines of the next round where the agent of rank 0 keeps the ranks' store."""
        following = dist.PrefixStore(f'{self.job}.{self.number + 1}', self.store)
        for name in _ADDRESS:
            following.set(name, environ[name])


def current_round(environ: Mapping[str, str] = os.environ) -> Optional[TorchrunRound]:
    """Return the round of this rank; None if machines cannot join, or the agents share no store.

    Raises:
        RuntimeError: If the rendezvous store does not answer.
    """
    if environ.get('TORCHELASTIC_USE_AGENT_STORE') != 'True':
        return None
    try:
        command = Path(f'/proc/{os.getppid()}/cmdline').read_bytes().decode(errors='replace')
    except OSError:
        return None
    if not _RANGE.search(command) and ':' not in environ.get('PET_NNODES', ''):
        return None
    from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
    from torch.distributed.run import get_args_parser

    words = command.split('\0')[:-1]
    first = next(
        (
            position
            for position, word in enumerate(words)
            if re.search(
                r'(^|/)(torchrun|torch\.distributed\.run|torch/distributed/run\.py)$', word
            )
        ),
        None,
    )
    if first is None:
        return None
    args = get_args_parser().parse_args(words[first + 1 :])
    if args.rdzv_backend != 'c10d' or not args.rdzv_endpoint:
        return None
    host, port = parse_rendezvous_endpoint(args.rdzv_endpoint, default_port=29400)
    store = dist.TCPStore(
        host,
        port,
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_SECONDS),
    )
    job, number = f'torch.rendezvous.{environ["TORCHELASTIC_RUN_ID"]}', 0
    # The agents of a round write this key before they start ranks, and no later round has begun
    # while a rank runs.
    while store.check([f'{job}.{number + 1}/torchelastic/role_info/0']):
        number += 1
    return TorchrunRound(store, job, number)
