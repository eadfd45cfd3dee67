"""Weights at the start of a run, and buffers before an evaluation, travel over NCCL together."""

from __future__ import annotations

from pathlib import Path
from typing import List, Tuple

import torch
import torch.distributed as dist
from ranks import run_ranks
from toy_runs import toy_runner


def train(folder: Path) -> List[Tuple[str, int]]:
    """Return device and number of elements of each broadcast of a tensor in a run."""
    sent: List[Tuple[str, int]] = []
    broadcast = dist.broadcast

    def recorded(tensor: torch.Tensor, src: int = 0, *args: object, **options: object) -> object:
        if tensor.is_floating_point():
            sent.append((tensor.device.type, tensor.numel()))
        return broadcast(tensor, src, *args, **options)

    dist.broadcast = recorded
    runner, _ = toy_runner(folder, **{'env_cfg.accelerator': 'cuda'})
    runner.train()
    dist.broadcast = broadcast
    return sent


def test_messages_of_a_run(tmp_path: Path) -> None:
    for sent in run_ranks(train, 2, tmp_path / 'ranks', tmp_path / 'run'):
        # 54 and 7 numbers of two linear layers and 24 of BatchNorm are sent at the start. 12 of
        # these are buffers, which are sent again before the one validation. Fewer are of checks.
        assert [message for message in sent if message[1] > 6] == [('cuda', 85), ('cuda', 12)]
