"""Features over links (blocks, credits, checksums) against a bare gloo send of the same bytes.

    OMP_NUM_THREADS=1 python tools/benchmarks/feature_transfer.py

Starts an encoder and a head process itself, in host memory on one machine. An item has the features
that four layers of a ViT-L/16 give for 2 images of 512x512 in float32: 32 MiB. The encoder gives
the same tensors each time, so that nothing is computed; requests carry one pixel. All ways take
turns in one run: the bare one sends a tensor of the item's size over a gloo group of two ranks and
waits for each, into one buffer ("bare") or into new memory each time, as who keeps the features
must ("bare, kept"); ours also cuts and checks it, and copies it out of the blocks into new memory.
Medians over the turns, and of each turn's ratio.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, List, Tuple

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / 'tools' / 'benchmarks')]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as mp  # noqa: E402
from _common import describe_machine  # noqa: E402

from mapsage.extras.streaming.remote.sender import serve  # noqa: E402
from mapsage.extras.streaming.remote.streamed import Streamed  # noqa: E402
from mapsage.extras.streaming.source import Item  # noqa: E402
from mapsage.extras.streaming.wire.opening import open_links  # noqa: E402
from mapsage.extras.streaming.wire.payload import checksum  # noqa: E402

LEVEL = (2, 1024, 32, 32)
LEVELS, ITEMS, TURNS = 4, 16, 5
BLOCK_MIB = (1, 4, 16)
CPU = torch.device('cpu')
MIB = 2**20


def make_features() -> Tuple[torch.Tensor, ...]:
    """Return an item's features; random, since pages nobody wrote cost nothing to read."""
    return tuple(torch.rand(LEVEL) for _ in range(LEVELS))


def item_bytes() -> int:
    return LEVELS * torch.Size(LEVEL).numel() * 4


def time_bare(group: Any, rank: int, data: torch.Tensor, kept: bool) -> float:
    """Return the seconds of a turn."""
    start = time.perf_counter()
    for _ in range(ITEMS):
        if kept and rank == 0:
            data = torch.empty_like(data)
        (group.recv([data], 1, 0) if rank == 0 else group.send([data], 0, 0)).wait()
    return time.perf_counter() - start


def time_streamed(source: Streamed, expected: torch.Tensor, begin: int) -> float:
    """Return the seconds of a turn, in which every item is awaited in order."""
    items = [Item(begin + i, (), torch.zeros(1, 3, 1, 1)) for i in range(ITEMS)]
    start = time.perf_counter()
    for position in range(ITEMS + source.ahead):
        if position < ITEMS:
            source.request(items[position])
        if position >= source.ahead:
            features = source.features(items[position - source.ahead])
    seconds = time.perf_counter() - start
    assert torch.equal(features[-1], expected)
    return seconds


def run(rank: int, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    store = dist.FileStore(f'{folder}/store', -1)
    bare = dist.ProcessGroupGloo(dist.PrefixStore('bare', store), rank, 2, timedelta(seconds=60))
    features, data = make_features(), torch.rand(item_bytes() // 4)
    rows: List[Tuple[int, float, float, float]] = []
    for turn in range(TURNS + 1):
        for mib in BLOCK_MIB:
            seconds, kept = (time_bare(bare, rank, data, kept) for kept in (False, True))
            prefix = dist.PrefixStore(f'{turn}-{mib}', store)
            links = list(open_links(prefix, rank, [1], [0], 60, 60).values())
            if rank == 1:
                serve(links, lambda images: features, CPU)
                continue
            source = Streamed(links, CPU, block_bytes=mib * MIB, pool_bytes=256 * MIB, timeout=60)
            time_streamed(source, features[-1], 0)  # the pool is new
            ours = time_streamed(source, features[-1], ITEMS)
            source.close()
            if turn:  # the first one warms up
                rows.append((mib, seconds, kept, ours))
    if rank == 0:
        results.put((rows, time_checksum()))


def time_checksum() -> float:
    """Return GB/s of the checksum over 4 MiB."""
    data = torch.randint(0, 256, (4 * MIB,), dtype=torch.uint8)
    start = time.perf_counter()
    for _ in range(32):
        checksum(data)
    return 32 * len(data) / (time.perf_counter() - start) / 1e9


def main() -> None:
    context = mp.get_context('spawn')
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=run, args=(rank, folder, results)) for rank in range(2)]
        for process in ranks:
            process.start()
        rows, checked = results.get()
        for process in ranks:
            process.join()
    total = ITEMS * item_bytes() / 1e9
    print(
        f'{describe_machine()}. {TURNS} turns of {ITEMS} items of {item_bytes() // MIB} MiB; the '
        f'checksum alone runs at {checked:.1f} GB/s.\n'
    )
    print('| block MiB | bare GB/s | bare, kept GB/s | streamed GB/s | of bare | of bare, kept |')
    print('|---|---|---|---|---|---|')
    for mib in BLOCK_MIB:
        times = [each for each in rows if each[0] == mib]
        bare, kept, ours = (total / statistics.median(each) for each in list(zip(*times))[1:])
        ratios, others = (sorted(each[column] / each[3] for each in times) for column in (1, 2))
        print(
            f'| {mib} | {bare:.2f} | {kept:.2f} | {ours:.2f} | {_range(ratios)} | '
            f'{_range(others)} |'
        )


def _range(ratios: List[float]) -> str:
    return f'{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})'


if __name__ == '__main__':
    main()
