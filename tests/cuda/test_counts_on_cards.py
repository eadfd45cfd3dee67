"""Counts of predictions are summed over NCCL without a wait of the host, with the bits of gloo."""
from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import torch
import torch.distributed as dist
from ranks import run_ranks
from torch import nn

from mapsage.accelerator import resolve_accelerator, set_current_accelerator
from mapsage.distributed import init_process_group
from mapsage.distributed.virtual_ranks import VirtualRanks
from mapsage.models import JaccardLoss
from mapsage.wrappers.batch_counts import BatchCounts

WORLD = 2


def count_of(rank: int) -> torch.Tensor:
    return torch.randn(3, 5, generator=torch.Generator().manual_seed(rank)) * 1e4


def sums(accelerator: str) -> Tuple[torch.Tensor, str]:
    current = set_current_accelerator(resolve_accelerator(accelerator))
    init_process_group(current, timeout=60)
    rank = dist.get_rank()
    loss = JaccardLoss()
    counts = BatchCounts(nn.Sequential(loss), VirtualRanks(WORLD, WORLD))
    count = count_of(rank).to(current.device(rank))
    with counts.step([None]):
        counts_of_first_call = loss.sum_over_ranks(count)  # NCCL meets in the first one
        if accelerator == 'cuda':
            torch.cuda.set_sync_debug_mode('error')
        total = loss.sum_over_ranks(count)
        torch.cuda.set_sync_debug_mode('default')
    assert torch.equal(total, counts_of_first_call)
    return total.cpu(), total.device.type


def test_the_host_does_not_wait(tmp_path: Path) -> None:
    found: List[List[Tuple[torch.Tensor, str]]] = [
        run_ranks(sums, WORLD, tmp_path / accelerator, accelerator)
        for accelerator in ('cuda', 'cpu')]
    expected = (count_of(0).double() + count_of(1).double()).float()
    for device, answers in zip(('cuda', 'cpu'), found):
        for total, where in answers:
            assert torch.equal(total, expected) and where == device
