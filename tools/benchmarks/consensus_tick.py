"""What a tick costs: the agreement of the ranks of a head replica, once a step.

    OMP_NUM_THREADS=1 python tools/benchmarks/consensus_tick.py

Starts its gloo ranks itself, all of them on this machine; with more ranks than cores a time is that
of the operating system's turns as well. A tick of one field is the least; that of an item has the
fields of ``mapsage.features``. Beside it the collective in it by itself, on as many bytes. A step
delivers an item of 64 KiB that is there already, with the next one named: one tick, and the
broadcasts. They take turns, block by block; a time is rank 0's, the median over all.
"""
from __future__ import annotations

import os
import socket
import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from _common import describe_machine  # noqa: E402

from mapsage.distributed import Consensus  # noqa: E402
from mapsage.features.remote.blocks import BlockPool  # noqa: E402
from mapsage.features.remote.state import State  # noqa: E402
from mapsage.features.replica.replica_facts import FIELDS  # noqa: E402
from mapsage.features.replica.replica_features import ReplicaFeatures  # noqa: E402
from mapsage.features.wire.payload import pack_levels  # noqa: E402

RANKS = [2, 4, 8]
TURNS, EACH = 6, 10  # so many blocks of so many repetitions
WARM_UP = 5
ITEM_BYTES, BLOCK_BYTES = 2**16, 2**15


class Ready:
    """An item that is here already."""

    state, attempt, error = State.READY, 0, None

    def __init__(self, number: int, data: Any) -> None:
        self.number, (self.layout, self._bytes) = number, data
        self.total = self.arrived = len(self._bytes)

    def read(self, start: int, stop: int) -> torch.Tensor:
        return self._bytes[start:stop]

    def wait(self, timeout: float) -> None:
        raise AssertionError('there is nothing to wait for')


def ways() -> Dict[str, Callable[[], Any]]:
    """Return what is measured, by name, ready to be repeated in step on all ranks."""
    rank = dist.get_rank()
    small, item = Consensus(['step']), Consensus(FIELDS)
    bytes_of_item = torch.zeros(len(FIELDS), dtype=torch.int64)
    answers = [torch.empty_like(bytes_of_item) for _ in range(dist.get_world_size())]
    replica = ReplicaFeatures(None, BlockPool(4, BLOCK_BYTES), torch.device('cpu'), 60)
    data = pack_levels([torch.randn(1, 1, 1, ITEM_BYTES // 4)])
    items: List[Optional[Ready]] = [Ready(0, data) if rank == 0 else None]

    def deliver() -> None:
        current = items[0]
        items[0] = None if current is None else Ready(current.number + 1, data)
        replica.deliver(current, items[0])  # type: ignore[arg-type]

    return {'all_gather of its bytes': lambda: dist.all_gather(answers, bytes_of_item),
            'tick of one field': lambda: small.tick(step=1),
            f'tick of {len(FIELDS)} fields': lambda: item.tick(item=1, total=7, arrived=7),
            'step with one tick': deliver}


def be_rank(rank: int, world: int, port: int, answer: str) -> None:
    """Be one rank; the first writes the medians in milliseconds."""
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=world, timeout=timedelta(seconds=300))
    measured = ways()
    times: Dict[str, List[float]] = {name: [] for name in measured}
    for turn in range(TURNS + 1):
        for name, way in measured.items():
            for _ in range(EACH if turn else WARM_UP):
                start = time.perf_counter()
                way()
                if turn:
                    times[name].append(1000 * (time.perf_counter() - start))
    if not rank:
        torch.save({name: statistics.median(each) for name, each in times.items()}, answer)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(world: int) -> Dict[str, float]:
    """Return the medians of rank 0."""
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = str(Path(folder) / 'answer')
        mp.spawn(be_rank, (world, port, answer), nprocs=world)
        return dict(torch.load(answer))


def main() -> None:
    print(describe_machine())
    every = {world: on_ranks(world) for world in RANKS}
    print(f'\n{"median ms":<26}' + ''.join(f'{world:>5} ranks' for world in RANKS))
    for name in next(iter(every.values())):
        print(f'{name:<26}' + ''.join(f'{every[world][name]:11.2f}' for world in RANKS))
    part, whole = f'tick of {len(FIELDS)} fields', 'all_gather of its bytes'
    print(f'{"tick / its all_gather":<26}' + ''.join(
        f'{every[world][part] / every[world][whole]:11.2f}' for world in RANKS))


if __name__ == '__main__':
    main()
