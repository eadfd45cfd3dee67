"""Check that every rank holds the same weights."""
from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mapsage.errors import UserError

from .channels.group_channel import open_channel
from .ordered_sum import as_bytes, carries, to_host

# From this drift on, weights do not differ by rounding alone. One step rounds by 6e-8 of a float32
# number, and the roundings of a hundred thousand steps add up to less than this unless all fall on
# one side.
LARGEST_DRIFT = 1e-3
_SAMPLED = 8  # elements of each tensor
_MESSAGE_BYTES = 64 << 20  # as much memory is needed beside the tensors


class WeightsDifferError(UserError, RuntimeError):
    """Parameters or buffers that must be equal on all ranks are not."""

    # A restart from the last checkpoint makes them equal again.
    final = False
    on_every_rank = True


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
    name, odd, usual = first_difference(every)
    raise WeightsDifferError(
        f'{when}, {name!r} on rank(s) {[channel.ranks[each] for each in odd]} is not equal to rank '
        f'{channel.ranks[usual]}. Weights must be loaded or initialized alike on every rank: load '
        f"them through init_cfg or load_from, not in the module's __init__, and give every rank "
        f'the same files.')


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Give every rank the values of rank 0's tensors, in place. Collective.

    Tensors travel on their device where the process group carries them, and through host memory
    otherwise. Those of one dtype travel together, in messages of 64 MiB.

    Args:
        tensors: Tensors of the same dtypes, shapes and order on all ranks, each on the device of
            its rank or on the CPU.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    by_kind: Dict[Tuple[torch.dtype, str], List[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device.type), []).append(tensor.detach())
    for kind in by_kind.values():
        for message in _messages(kind):
            _broadcast_message(message)


def _messages(tensors: Sequence[torch.Tensor]) -> List[List[torch.Tensor]]:
    """Return tensors in groups of neighbors of at most 64 MiB, or of a single larger one."""
    messages: List[List[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        size += tensor.numel() * tensor.element_size()
        if not messages or size > _MESSAGE_BYTES:
            messages.append([])
            size = tensor.numel() * tensor.element_size()
        messages[-1].append(tensor)
    return messages


def _broadcast_message(tensors: Sequence[torch.Tensor]) -> None:
    first = tensors[0]
    in_place = len(tensors) == 1 and first.is_contiguous()
    flat = first.view(-1) if in_place else torch.cat([tensor.reshape(-1) for tensor in tensors])
    if carries(flat.device):
        dist.broadcast(flat, src=0)
    else:
        host = to_host(flat)
        dist.broadcast(as_bytes(host), src=0)
        if host is not flat and dist.get_rank() != 0:
            flat.copy_(host)
    if in_place or dist.get_rank() == 0:
        return
    for tensor, values in zip(tensors, flat.split([tensor.numel() for tensor in tensors])):
        tensor.copy_(values.view(tensor.shape))


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


def weight_samples(module: nn.Module) -> Dict[str, List[float]]:
    """Return numbers that tell by how much two copies of a model differ.

    They are, for each parameter: its root mean square, its mean, and up to eight of its elements.
    """
    found: Dict[str, List[float]] = {}
    for name, tensor in module.named_parameters():
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        host = numbers.detach().cpu().double().reshape(-1)
        if host.numel():
            chosen = host[torch.linspace(0, host.numel() - 1, min(_SAMPLED, host.numel())).long()]
            found[name] = [float(host.pow(2).mean().sqrt()), float(host.mean()), *chosen.tolist()]
    return found


def largest_drift(every: Sequence[Mapping[str, Sequence[float]]]) -> Tuple[str, int, float]:
    """Return the parameter and the index that differ most from the first copy, and by how much.

    Pure. Differences are relative to the root mean square of the first copy's parameter; copies
    with different parameters are infinitely far apart.

    Args:
        every: Results of :func:`weight_samples`, one for each copy.
    """
    worst = (next(iter(every[0]), ''), 0, 0.0)
    for i, each in enumerate(every):
        for name in dict.fromkeys([*every[0], *each]):
            first, other = every[0].get(name, ()), each.get(name, ())
            drift = float('inf')
            if len(first) == len(other):
                largest = max(abs(a - b) for a, b in zip(first, other))
                drift = largest / first[0] if first[0] else float('inf') if largest else 0.0
            if drift > worst[2]:
                worst = name, i, drift
    return worst


def total_digest(digests: Mapping[str, int]) -> str:
    """Return one short text for all digests with their names and order."""
    return f'{zlib.crc32(repr(list(digests.items())).encode()):08x}'


def first_difference(every: Sequence[Mapping[str, int]]) -> Tuple[str, List[int], int]:
    """Return the first name whose digests differ, and where it differs from what most have.

    Pure; the digests must differ somewhere. Of two that differ the second is the odd one.

    Returns:
        The name, the indices of the odd ones, and the index of one that is as most are.
    """
    names = dict.fromkeys(name for each in every for name in each)
    name = next(name for name in names if len({each.get(name) for each in every}) > 1)
    values = [each.get(name) for each in every]
    usual = values.index(Counter(values).most_common(1)[0][0])
    return name, [i for i, value in enumerate(values) if value != values[usual]], usual


def _digest(tensor: torch.Tensor) -> int:
    host = tensor.detach().cpu().contiguous().reshape(-1)
    if host.dtype == torch.bfloat16:
        host = host.view(torch.int16)  # numpy has no bfloat16
    return zlib.crc32(host.numpy().view(np.uint8).data) if host.numel() else 0
