"""What the collectives of our channels cost a rank, against the number of ranks.

    OMP_NUM_THREADS=1 python tools/benchmarks/channel_scale.py 2 8 32 128 256

Forks ranks without a model. Messages, bytes (headers included) and requests to the rendezvous store
are the highest of all ranks; they are counted, and do not depend on the machine. Seconds are
the slowest rank's, the median over repetitions; with more ranks than cores they are the
scheduler's. For gloo's all-reduce the kernel counts writes (``/proc/self/io``). In the last row one
rank stays away, and the others name it; its seconds begin when they stop waiting.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Callable, Dict, List

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from _common import describe_machine, fork_ranks  # noqa: E402

from mapsage.distributed import (  # noqa: E402
    Consensus,
    RankLostError,
    all_ranks_or_none,
    open_channel,
)
from mapsage.distributed.channels.group_channel import GroupChannel  # noqa: E402

REPETITIONS, PATIENT, AWAY_SECONDS = 7, 600.0, 3.0
FIELDS = list('abcdefgh')  # as many as dynamic sampling has


def block() -> None:
    with all_ranks_or_none():
        pass


def collectives(channel: Any) -> Dict[str, Callable[[], Any]]:
    """Return what is measured, by name."""
    eight, rank, world = torch.zeros(8, dtype=torch.int64), channel.rank, len(channel.ranks)
    tick = Consensus(FIELDS, timeout=PATIENT).tick
    return {
        'gloo all_reduce, 64 bytes': lambda: dist.all_reduce(eight, op=dist.ReduceOp.MAX),
        'max, 64 bytes': lambda: channel.max(eight),
        'broadcast, 64 bytes': lambda: channel.broadcast(eight, 0),
        'gather, 64 bytes a rank': lambda: channel.gather(eight),
        'trade, 32 bytes a pair': lambda: channel.trade(eight[:4].repeat(world, 1)),
        'gather_texts, none': lambda: channel.gather_texts(''),
        'gather_texts, 40 letters a rank': lambda: channel.gather_texts('x' * 40),
        'tick, 8 fields, all equal': lambda: tick(**dict.fromkeys(FIELDS, 1)),
        'tick, 8 fields, they differ': lambda: tick(**dict.fromkeys(FIELDS, rank)),
        'all_ranks_or_none': block,
    }


def counts(channel: GroupChannel, of_gloo: bool) -> List[int]:
    """Return messages, bytes and store requests of this rank so far."""
    roll = channel._roll
    if of_gloo:
        told = dict(line.split(': ') for line in Path('/proc/self/io').read_text().splitlines())
        return [int(told['syscw']), int(told['wchar']), roll.store.requests]
    return [roll.mesh.messages, roll.mesh.bytes, roll.store.requests]


def measure(channel: GroupChannel, name: str, action: Callable[[], Any]) -> List[float]:
    """Return the counts of the rank with the most, and the slowest rank's milliseconds."""
    action()  # connects
    channel.max(torch.tensor([0]))
    before, times = counts(channel, 'gloo' in name), []
    for _ in range(REPETITIONS):
        start = time.perf_counter()
        action()
        times.append(time.perf_counter() - start)
    after = counts(channel, 'gloo' in name)
    mine = [(b - a) // REPETITIONS for a, b in zip(before, after)]
    largest = torch.tensor([*mine, int(1e6 * statistics.median(times))])
    channel.max(largest)
    return [*largest[:3].tolist(), largest[3].item() / 1e3]


def name_one(channel: GroupChannel) -> List[float]:
    """Let the last rank stay away; return what it costs the others to name it."""
    away, short = channel.ranks[-1], open_channel(None, AWAY_SECONDS, 'away')
    channel.max(torch.tensor([0]))
    before, start = counts(channel, False), time.perf_counter()
    if channel.rank != away:
        try:
            short.gather(torch.tensor([0]))
        except RankLostError as error:
            assert error.ranks == [away], error
    spent = time.perf_counter() - start - AWAY_SECONDS
    mine = [b - a for a, b in zip(before, counts(channel, False))]
    largest = torch.tensor([*mine, int(1e6 * spent) if channel.rank != away else 0])
    channel.max(largest)
    return [*largest[:3].tolist(), largest[3].item() / 1e3]


def be_rank(rank: int, world: int, port: int) -> None:
    os.environ.update(MASTER_ADDR='127.0.0.1', MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group('gloo', rank=rank, world_size=world, timeout=timedelta(seconds=PATIENT))
    channel = open_channel(None, PATIENT, 'measured')
    assert isinstance(channel, GroupChannel)
    rows = {name: measure(channel, name, action) for name, action in collectives(channel).items()}
    rows['naming a rank that stays away'] = name_one(channel)
    for name, (messages, size, requests, ms) in rows.items() if not rank else ():
        print(
            f'| {world} | {name} | {messages:.0f} | {size:.0f} | {requests:.0f} | {ms:.1f} |',
            flush=True,
        )
    links = torch.tensor([len(channel._roll.mesh._links)])
    channel.max(links)
    if not rank:
        print(
            f'| {world} | connections of all channels together | {links.item()} | | | |', flush=True
        )
    channel.max(torch.tensor([0]))


def main() -> None:
    print(describe_machine())
    print('\n| ranks | collective | messages | bytes | store requests | ms |')
    print('|---|---|---|---|---|---|', flush=True)
    for world in map(int, sys.argv[1:]):
        fork_ranks(world, be_rank)


if __name__ == '__main__':
    main()
