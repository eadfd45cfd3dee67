"""Check that every rank holds the same weights."""
from __future__ import annotations

import json
import zlib
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from .group_channel import open_channel


class WeightsDifferError(RuntimeError):
    """Parameters or buffers that must be equal on all ranks are not."""


def check_equal_weights(module: nn.Module, when: str,
                        group: Optional[dist.ProcessGroup] = None) -> None:
    """Compare a digest of all parameters and buffers across ranks. Collective.

    One digest of each rank is gathered. Only when they differ, which all ranks see from the same
    data, a second gather finds the first tensor that does.

    Args:
        module: Unwrapped model.
        when: Words for the error, for example ``'after wrapping'``.
        group: Process group to compare over; all ranks when None.

    Raises:
        WeightsDifferError: On every rank, naming the first differing tensor and the ranks.
        RankLostError: Naming the ranks that did not come.
    """
    channel = open_channel(group)
    digests = weight_digests(module)
    if len(set(channel.gather_texts(total_digest(digests)))) == 1:
        return
    every = [json.loads(text) for text in channel.gather_texts(json.dumps(digests))]
    name, odd = first_difference(every)
    raise WeightsDifferError(
        f'{when}, {name!r} on rank(s) {[channel.ranks[each] for each in odd]} is not equal to rank '
        f'{channel.ranks[0]}. Weights must be loaded or initialized alike on every rank: load '
        f"them through init_cfg or load_from, not in the module's __init__, and give every rank "
        f'the same files.')


def weight_digests(module: nn.Module, buffers: bool = True) -> Dict[str, int]:
    """Return a CRC-32 of the bytes of every parameter, and every buffer by default.

    A change of a single element is always detected, other changes with a chance of 1 - 2**-32. It
    runs at the speed of memory, see docs/benchmarks.md.

    Args:
        module: Unwrapped model, on any device.
        buffers: Whether to include buffers and other entries of the state dict. During training
            each rank has its own batch statistics.
    """
    tensors = (
        {**dict(module.named_buffers()), **module.state_dict()}  # not all are in both
        if buffers else dict(module.named_parameters()))
    return {name: _digest(tensor) for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor)}


def total_digest(digests: Mapping[str, int]) -> str:
    """Return one short text for all digests with their names and order."""
    return f'{zlib.crc32(repr(list(digests.items())).encode()):08x}'


def first_difference(every: Sequence[Mapping[str, int]]) -> Tuple[str, List[int]]:
    """Return the first name whose digests differ, and the indices that differ from the first.

    Pure; the digests must differ somewhere.
    """
    names = dict.fromkeys(name for each in every for name in each)
    name = next(name for name in names if len({each.get(name) for each in every}) > 1)
    return name, [i for i, each in enumerate(every) if each.get(name) != every[0].get(name)]


def _digest(tensor: torch.Tensor) -> int:
    host = tensor.detach().cpu().contiguous().reshape(-1)
    if host.dtype == torch.bfloat16:
        host = host.view(torch.int16)  # numpy has no bfloat16
    return zlib.crc32(host.numpy().view(np.uint8).data) if host.numel() else 0
