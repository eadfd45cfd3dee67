"""The ordered sum of DDP's buckets over NCCL: what it waits for, on which stream."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Dict, List

import torch
import torch.distributed as dist
from ranks import run_ranks

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import OrderedSum, init_process_group
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.distributed.wrappers.ddp import _BucketMeans

LENGTH = 1000


class Bucket:
    """A bucket of a backward pass, with the methods of torch's GradBucket."""

    def __init__(self, index: int, last: bool) -> None:
        self._index, self._last = index, last
        self._buffer = torch.full((LENGTH,), 1.0 + 2 * dist.get_rank() + index, device='cuda')

    def buffer(self) -> torch.Tensor:
        return self._buffer

    def index(self) -> int:
        return self._index

    def is_last(self) -> bool:
        return self._last


class SlowOnRank1(OrderedSum):
    """Rank 1 brings its sums to the second collective late, for which the others wait."""

    def _added(self, *args: Any) -> torch.Tensor:
        added = super()._added(*args)
        time.sleep(0.5 * dist.get_rank())
        return added


def start(kind: Any = OrderedSum) -> _BucketMeans:
    init_process_group(set_current_accelerator(resolve_accelerator('cuda')), timeout=60)
    world = dist.get_world_size()
    return _BucketMeans(kind(VirtualRanks(world, world), dist.get_rank()), None)


def means_of_two_buckets() -> Dict[str, Any]:
    means = start()
    first = means.begin(Bucket(0, last=False))
    done_at_once = first.done()
    last = means.begin(Bucket(1, last=True))
    return dict(
        done_at_once=done_at_once,
        done=first.done() and last.done(),
        means=[future.wait().cpu().unique().tolist() for future in (first, last)],
    )


def mean_from_another_stream() -> List[float]:
    means = start(SlowOnRank1)
    bucket = Bucket(0, last=True)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        future = means.begin(bucket)
    return future.wait().cpu().unique().tolist()


def test_a_bucket_travels_while_the_backward_pass_goes_on(tmp_path: Path) -> None:
    for found in run_ranks(means_of_two_buckets, 2, tmp_path):
        assert found == dict(done_at_once=False, done=True, means=[[2.0], [3.0]])


def test_whoever_waits_on_another_stream_gets_the_mean(tmp_path: Path) -> None:
    assert run_ranks(mean_from_another_stream, 2, tmp_path) == [[2.0]] * 2
