"""Finds and moves the tensors in nested containers, such as a batch of MMEngine.

Containers are lists, tuples, dicts and data elements: objects with ``keys``, ``values`` and ``to``,
such as MMEngine's ``BaseDataElement``. A tensor in any other object is neither found nor moved.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any, Iterator

import torch


class MovesItself:
    """Base class of containers that move their tensors themselves; :func:`move` skips them."""


def move(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``; differentiable.

    A container whose tensors are all on ``device`` already is returned itself, without a copy. So
    is a :class:`MovesItself`.
    """
    if isinstance(value, torch.Tensor):
        return value if value.device == device else value.to(device)
    if isinstance(value, MovesItself):
        return value
    if isinstance(value, (list, tuple)):
        items = [move(item, device) for item in value]
        if all(new is old for new, old in zip(items, value)):
            return value
        return type(value)(*items) if hasattr(value, '_fields') else type(value)(items)
    if isinstance(value, MutableMapping):
        changed = {
            key: new for key, item in value.items() if (new := move(item, device)) is not item
        }
        if not changed:
            return value
        value = copy.copy(value)
        value.update(changed)
        return value
    if _is_element(value) and any(tensor.device != device for tensor in tensors_in(value)):
        return value.to(device)
    return value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers, without moving any."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, MutableMapping) or _is_element(value):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        # Not iter(value), by which a MovesItself may move its items.
        for item in tuple.__iter__(value) if isinstance(value, tuple) else value:
            yield from tensors_in(item)


def _is_element(value: object) -> bool:
    """Return whether a value is a data element of MMEngine, or has the same methods."""
    return hasattr(value, 'to') and hasattr(value, 'keys') and hasattr(value, 'values')
