"""Bring together on one device what lies on several, of one rank or of all."""
from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any, Iterator, List, Optional

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
        return [move(item, device)]
    gathered: List[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, move(item, torch.device('cpu')), group=group)
    return [move(each, device) for each in gathered]


def move(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``; differentiable.

    Tensors are found in lists, tuples, dicts and data elements (objects with ``keys``, ``values``
    and ``to``, as MMEngine's). What holds nothing that lies elsewhere is returned itself, not a
    copy; so is what says ``moves_itself``.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if getattr(value, 'moves_itself', False):
        return value
    if isinstance(value, (list, tuple)):
        items = [move(item, device) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {key: new for key, item in value.items()
                   if (new := move(item, device)) is not item}
        if not changed:
            return value
        value = copy.copy(value)
        value.update(changed)
        return value
    if _is_element(value) and any(tensor.device != device for tensor in tensors_in(value)):
        return value.to(device)
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in lists, tuples, dicts and data elements, without moving any."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, MutableMapping) or _is_element(value):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in tuple.__iter__(value) if isinstance(value, tuple) else value:
            yield from tensors_in(item)


def _is_element(value: Any) -> bool:
    return hasattr(value, 'to') and hasattr(value, 'keys') and hasattr(value, 'values')
