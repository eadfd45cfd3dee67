"""Also pin the labels of a batch if a loader has ``pin_memory=True``.

Gap: PyTorch's loader pins tensors in containers, and objects with a method ``pin_memory``.
MMEngine's data elements lack the method, so labels stay in pageable memory, and the host waits for
each copy of a label to the device.
Remove when: mmengine's ``BaseDataElement`` has the method.
"""

from __future__ import annotations

import torch
from mmengine.structures import BaseDataElement


def _pin_memory(self: BaseDataElement) -> BaseDataElement:
    """Return a data element with the same metainfo and values, tensors in pinned memory."""
    pinned = self.new()
    for name, value in self.items():
        if isinstance(value, (torch.Tensor, BaseDataElement)):
            pinned.set_data({name: value.pin_memory()})  # type: ignore[union-attr]
    return pinned


def apply() -> None:
    """Add the method, which PyTorch's loader calls."""
    BaseDataElement.pin_memory = _pin_memory  # type: ignore[attr-defined]
