"""Bring what every rank holds together on each rank's own device."""
from __future__ import annotations

from typing import Any, Callable, List, Optional

import torch
import torch.distributed as dist


def gather_to_device(item: Any, device: torch.device,
                     group: Optional[dist.ProcessGroup] = None) -> List[Any]:
    """Return every rank's ``item``, in rank order, with its tensors on ``device``. Collective.

    A tensor that travels as an object lands on the device it came from, so that what rank 0 then
    stacks lies on ``gcu:2`` and ``gcu:3``. Here tensors travel through host memory and arrive on
    one device. It pickles: for results and small samples, not for batches.

    Args:
        item: Tensors, alone or in dicts, lists, tuples and objects with ``.to(device)`` (MMEngine's
            data elements); anything else that pickles passes as it is. May differ in kind and
            shape between ranks.
        device: Where this rank wants the tensors.
        group: The ranks to gather from; the default group when None. Without one, only the caller.
    """
    if not dist.is_initialized():
        return [place(item, device)]
    gathered: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, place(item, torch.device('cpu')), group=group)
    return [place(each, device) for each in gathered]


def place(item: Any, device: torch.device) -> Any:
    """Return ``item`` with its tensors on ``device``; what is there already is not copied."""
    if isinstance(item, torch.Tensor):
        return item.to(device)
    if isinstance(item, dict):
        return type(item)((key, place(value, device)) for key, value in item.items())
    if isinstance(item, tuple) and hasattr(item, '_fields'):  # a named tuple
        return type(item)(*(place(value, device) for value in item))
    if isinstance(item, (list, tuple)):
        return type(item)(place(value, device) for value in item)
    move: Optional[Callable[..., Any]] = getattr(item, 'to', None)
    return item if move is None else move(device)
