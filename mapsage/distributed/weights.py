"""Prove that every rank holds the same weights."""
from __future__ import annotations

import hashlib
from typing import Dict, List, Optional

import torch
import torch.distributed as dist
from torch import nn


class WeightsDifferError(RuntimeError):
    """Parameters or buffers that must be equal on all ranks are not."""


def check_equal_weights(module: nn.Module, when: str,
                        group: Optional[dist.ProcessGroup] = None) -> None:
    """Compare a digest of all parameters and buffers across ranks. Collective.

    Every rank gathers one digest; only when they differ, which all ranks see alike, a second
    gather finds the first tensor that does.

    Args:
        module: The unwrapped model.
        when: Words for the error, for example ``'after wrapping'``.
        group: The group to compare over; the default group when None.

    Raises:
        WeightsDifferError: On every rank, naming the first differing tensor and the ranks.
    """
    tensors = {**dict(module.named_buffers()), **module.state_dict()}  # some only in the first
    digests = {name: _digest(tensor) for name, tensor in tensors.items()
               if isinstance(tensor, torch.Tensor)}
    total = hashlib.blake2b(repr(list(digests.items())).encode()).hexdigest()
    if len(set(_gather(total, group))) == 1:
        return
    every: List[Dict[str, str]] = _gather(digests, group)
    names = dict.fromkeys(name for each in every for name in each)
    name = next(name for name in names if len({each.get(name) for each in every}) > 1)
    odd = [rank for rank, each in enumerate(every) if each.get(name) != every[0].get(name)]
    raise WeightsDifferError(
        f'{when}, {name!r} on rank(s) {odd} is not equal to rank 0. Weights must be loaded or '
        f'initialised alike on every rank: load them through init_cfg or load_from, not in the '
        f"module's __init__, and give every rank the same files.")


def _digest(tensor: torch.Tensor) -> str:
    host = tensor.detach().cpu().contiguous().reshape(-1)
    if host.dtype == torch.bfloat16:
        host = host.view(torch.int16)  # numpy has no bfloat16
    return hashlib.blake2b(host.numpy().tobytes(), digest_size=16).hexdigest()


def _gather(item: object, group: Optional[dist.ProcessGroup]) -> list:
    gathered: list = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, item, group=group)
    return gathered
