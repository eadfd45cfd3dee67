"""Gradients added along the tree over the ranks, against the all-reduce of gloo.

    OMP_NUM_THREADS=1 python tools/benchmarks/ordered_sum.py 4 8

Forks ranks of one thread each, which take both ways in turn, so that both see the same machine.
Milliseconds are the median of the slowest rank's; the ratio is the median over pairs of a native
and an ordered one that follow each other, and of wholes: all ordered time by all native time.
The bucket has 25 MiB of float32. A step is forward, backward and optimizer of the model of
configs/demo/efficientnet_lite0_fpn_demo.py with a batch of 2 on each rank, without data loading.
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
from mmengine.config import Config  # noqa: E402
from mmengine.optim import build_optim_wrapper  # noqa: E402
from mmengine.registry import MODELS, init_default_scope  # noqa: E402
from mmengine.structures import PixelData  # noqa: E402
from mmseg.structures import SegDataSample  # noqa: E402

from mapsage.accelerator import resolve_accelerator, set_current_accelerator  # noqa: E402
from mapsage.distributed import OrderedSum, init_process_group  # noqa: E402
from mapsage.distributed.virtual_ranks import VirtualRanks  # noqa: E402
from mapsage.distributed.wrappers import MMDistributedDataParallel  # noqa: E402

CONFIG = ROOT / 'configs' / 'demo' / 'efficientnet_lite0_fpn_demo.py'
BUCKET_BYTES, WARM_UP = 25 * 2**20, 2
ROUNDS = {'bucket': 25, 'step': 15}
WAYS = ('native', 'ordered')


def sums(rank: int, world: int) -> Dict[str, Callable[[], Any]]:
    """Return both ways to the mean of one bucket."""
    bucket = torch.randn(BUCKET_BYTES // 4, generator=torch.Generator().manual_seed(rank))
    ordered = OrderedSum(VirtualRanks(world, world), rank)

    def native() -> None:
        bucket.div_(world)
        dist.all_reduce(bucket)

    return {'native': native, 'ordered': lambda: ordered.mean([bucket], out=bucket)}


def steps(rank: int) -> Dict[str, Callable[[], Any]]:
    """Return a training step for each way of adding gradients."""
    cfg = Config.fromfile(str(CONFIG))
    init_default_scope('mmseg')
    data = dict(inputs=[], data_samples=[])
    for _ in range(2):
        data['inputs'].append(torch.randint(256, (3, 128, 128), dtype=torch.uint8))
        label = torch.randint(cfg.model.decode_head.num_classes, (1, 128, 128))
        data['data_samples'].append(
            SegDataSample(gt_sem_seg=PixelData(data=label), metainfo=dict(img_shape=(128, 128)))
        )
    found: Dict[str, Callable[[], Any]] = {}
    for way in WAYS:
        torch.manual_seed(0)
        model = MMDistributedDataParallel(
            MODELS.build(cfg.model), broadcast_buffers=False, reduction=way
        )
        optimizer = build_optim_wrapper(model, cfg.optim_wrapper)
        found[way] = lambda model=model, optimizer=optimizer: model.train_step(data, optimizer)
    return found


def seconds_of(action: Callable[[], Any]) -> float:
    """Return the slowest rank's seconds. Collective."""
    dist.barrier()
    start = time.perf_counter()
    action()
    spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return spent.item()


def measure(what: str, ways: Dict[str, Callable[[], Any]], rank: int, world: int) -> None:
    times: Dict[str, List[float]] = {way: [] for way in WAYS}
    for number in range(WARM_UP + ROUNDS[what]):
        for way in WAYS if number % 2 else reversed(WAYS):
            spent = seconds_of(ways[way])
            if number >= WARM_UP:
                times[way].append(spent)
    if rank:
        return
    native, ordered = (times[way] for way in WAYS)
    paired = statistics.median(b / a for a, b in zip(native, ordered))
    print(
        f'| {world} | {what} | {1e3 * statistics.median(native):.1f} | '
        f'{1e3 * statistics.median(ordered):.1f} | {paired:.2f} | '
        f'{sum(ordered) / sum(native):.2f} |',
        flush=True,
    )


def be_rank(rank: int, world: int, port: int) -> None:
    os.environ.update(
        MASTER_ADDR='127.0.0.1',
        MASTER_PORT=str(port),
        RANK=str(rank),
        WORLD_SIZE=str(world),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(world),
    )
    torch.set_num_threads(1)
    init_process_group(
        set_current_accelerator(resolve_accelerator('cpu')),
        timeout=timedelta(minutes=5).total_seconds(),
    )
    measure('bucket', sums(rank, world), rank, world)
    measure('step', steps(rank), rank, world)
    dist.barrier()


def main() -> None:
    load = ', '.join(f'{each:.1f}' for each in os.getloadavg())
    print(f'{describe_machine()}, load before {load}')
    print('\n| ranks | what | native ms | ordered ms | ordered / native, pairs | wholes |')
    print('|---|---|---|---|---|---|', flush=True)
    for world in map(int, sys.argv[1:] or ('4', '8')):
        fork_ranks(world, be_rank)


if __name__ == '__main__':
    main()
