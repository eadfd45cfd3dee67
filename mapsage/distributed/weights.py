"""Checks that every rank has the same weights, and copies rank 0's weights to all ranks.

Different weights raise no error, they only make a worse model. So the ranks compare digests,
which are small and catch any changed element. ``DeviceCheckHook`` calls these functions.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mapsage.base.errors import UserError

from .channels.open_channels import open_channel
from .ordered_sum import as_bytes, carries, to_host

# Larger drift between copies of a model cannot come from rounding only. A step rounds a float32 by
# 6e-8 of its value, and the roundings of a hundred thousand steps add up to less than this, unless
# all of them have the same sign.
LARGEST_DRIFT = 1e-3
# Number of elements that represent a parameter in weight_samples().
_SAMPLED = 8
# Size of a message of several tensors, which need the same amount of memory for a copy.
_MESSAGE_BYTES = 64 << 20


class WeightsDifferError(UserError, RuntimeError):
    """Parameters or buffers that must be equal on all ranks are not."""

    # After a restart from the last checkpoint, the weights are equal again.
    final = False
    on_every_rank = True


def check_equal_weights(
    module: nn.Module, when: str, group: Optional[dist.ProcessGroup] = None
) -> None:
    """Compare a digest of all parameters and buffers across ranks. Collective.

    The ranks gather one digest from each. If these differ, which all ranks see in the same data,
    they gather the digests of all tensors, to find the first tensor that differs.

    Args:
        module: Unwrapped model.
        when: Phrase at the start of the error message, for example ``'after wrapping'``.
        group: Process group to compare over; all ranks when None.

    Raises:
        WeightsDifferError: On every rank, naming the first differing tensor and the ranks.
        RankLostError: Naming the missing ranks.
    """
    channel = open_channel(group)
    digests = weight_digests(module)
    if len(set(channel.gather_texts(total_digest(digests)))) == 1:
        return
    digests_by_rank = [json.loads(text) for text in channel.gather_texts(json.dumps(digests))]
    name, odd, usual = first_difference(digests_by_rank)
    raise WeightsDifferError(
        f'{when}, {name!r} on rank(s) {[channel.ranks[rank] for rank in odd]} is not equal to rank '
        f'{channel.ranks[usual]}. Weights must be loaded or initialized alike on every rank: load '
        f"them through init_cfg or load_from, not in the module's __init__, and give every rank "
        f'the same files.'
    )


def broadcast_tensors(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite the tensors of every rank with rank 0's values, in place. Collective.

    Tensors travel from device to device if the process group allows it, else through host memory.
    Tensors of the same dtype and device type travel together, in messages of 64 MiB.

    Args:
        tensors: Tensors of the same dtypes, shapes and order on all ranks, on the device of the
            rank or on the CPU.
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
    """Return the tensors in groups of neighbors of at most 64 MiB, or of one larger tensor."""
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
    if carries(flat.device, dtype=flat.dtype):
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
    """Return the CRC-32 of every parameter's bytes, and by default of every buffer's.

    The digest always detects a change of a single element, and other changes with a probability of
    1 - 2**-32. It runs at the speed of memory, see docs/benchmarks.md.

    Args:
        module: Unwrapped model, on any device.
        buffers: Whether to include buffers and other entries of the state dict. During training
            the buffers of ranks differ, because each rank has its batch statistics.
    """
    # A state dict lacks the buffers that are not persistent, and has entries that are not buffers.
    tensors = (
        {**dict(module.named_buffers()), **module.state_dict()}
        if buffers
        else dict(module.named_parameters())
    )
    return {
        name: tensor_digest(tensor)
        for name, tensor in tensors.items()
        if isinstance(tensor, torch.Tensor)
    }


def weight_samples(module: nn.Module) -> Dict[str, List[float]]:
    """Return some numbers of each parameter, for :func:`largest_drift`.

    These are its root mean square, its mean, and up to eight of its elements, in this order.
    """
    samples: Dict[str, List[float]] = {}
    for name, tensor in module.named_parameters():
        numbers = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        host = numbers.detach().cpu().double().reshape(-1)
        if host.numel():
            chosen = host[torch.linspace(0, host.numel() - 1, min(_SAMPLED, host.numel())).long()]
            samples[name] = [float(host.pow(2).mean().sqrt()), float(host.mean()), *chosen.tolist()]
    return samples


def largest_drift(copies: Sequence[Mapping[str, Sequence[float]]]) -> Tuple[str, int, float]:
    """Return the largest difference between the first copy of a model and another copy. Pure.

    Differences are relative to the root mean square of the first copy's parameter. If the names or
    shapes of the parameters differ, the difference is infinite.

    Args:
        copies: Results of :func:`weight_samples`, one per copy.

    Returns:
        The name of the parameter, the index of the copy, and the difference.
    """
    reference = copies[0]
    worst = (next(iter(reference), ''), 0, 0.0)
    for index, samples in enumerate(copies):
        for name in dict.fromkeys([*reference, *samples]):
            expected, numbers = reference.get(name, ()), samples.get(name, ())
            drift = float('inf')
            if len(expected) == len(numbers):
                largest = max(abs(a - b) for a, b in zip(expected, numbers))
                drift = largest / expected[0] if expected[0] else float('inf') if largest else 0.0
            if drift > worst[2]:
                worst = name, index, drift
    return worst


def total_digest(digests: Mapping[str, int]) -> str:
    """Return one short text that depends on all digests, their names and their order."""
    return f'{zlib.crc32(repr(list(digests.items())).encode()):08x}'


def first_difference(copies: Sequence[Mapping[str, int]]) -> Tuple[str, List[int], int]:
    """Return the first tensor whose digests differ, and the copies that differ from most. Pure.

    If as many copies have one digest as another, the earlier copies count as the usual ones.

    Args:
        copies: Results of :func:`weight_digests`, one per copy. At least two must differ.

    Returns:
        The name of the tensor, the indices of the odd copies, and the index of a usual copy.
    """
    names = dict.fromkeys(name for digests in copies for name in digests)
    name = next(name for name in names if len({digests.get(name) for digests in copies}) > 1)
    values = [digests.get(name) for digests in copies]
    usual = values.index(Counter(values).most_common(1)[0][0])
    return name, [i for i, value in enumerate(values) if value != values[usual]], usual


def tensor_digest(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of a tensor's bytes, see :func:`weight_digests`."""
    host = tensor.detach().cpu().contiguous().reshape(-1)
    if host.dtype == torch.bfloat16:
        # NumPy has no bfloat16.
        host = host.view(torch.int16)
    return zlib.crc32(host.numpy().view(np.uint8).data) if host.numel() else 0
