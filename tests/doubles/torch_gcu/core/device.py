"""Cards, seeds and memory: ``device``, ``random`` and ``debug`` of ``torch_gcu.core``."""

from __future__ import annotations

import gc
import os
from typing import Any, Optional

import _XLAC
import torch
import torch_xla


def device_count() -> int:
    masked = os.environ.get('TOPS_VISIBLE_DEVICES')
    if masked is not None:
        return len([card for card in masked.split(',') if card.strip()])
    return int(os.environ.get('TORCH_GCU_DOUBLE_DEVICES', '8'))


os.environ['CPU_NUM_DEVICES'] = str(device_count())  # read when the first device is used


def is_available() -> bool:
    return device_count() > 0


def device_index(device: Any, optional: bool = False) -> int:
    """Return the index in ``device``: an int, a string or a torch.device of type xla, or None."""
    if isinstance(device, str):
        device = torch.device(device)  # 'gcu' is no device type of this torch: RuntimeError
    if isinstance(device, torch.device):
        if device.type != 'xla':
            raise ValueError(f'Expected a gcu device, but got: {device}')
        device = device.index
    if device is None and not optional:
        raise ValueError(
            f'Expected a torch.device with a specified index or an integer, but got:{device}'
        )
    return current_device() if device is None else device


def check_index(index: int) -> None:
    if not 0 <= index < device_count():
        raise IndexError(f'Invalid device id, must in [0, {device_count() - 1}], got {index}')


def gcu_device(device: Any = None) -> torch.device:
    """Return the device object. Trap: an index that does not exist is not refused here."""
    return torch.device('xla', device_index(device, optional=True))


class device:  # noqa: N801
    """Trap: a context manager that selects a card, and no device: ``tensor.to`` refuses it."""

    def __init__(self, device: Any) -> None:
        self.idx = device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self) -> None:
        self.prev_idx = current_device()
        set_device(self.idx)

    def __exit__(self, *error: Any) -> bool:
        set_device(self.prev_idx)
        return False


def set_device(device: Any) -> None:
    """Select a card. Trap: one that does not exist is passed over in silence."""
    index = device_index(device)
    if 0 <= index < device_count():
        _XLAC._xla_set_default_device(f'xla:{index}')


def current_device() -> int:
    return int(_XLAC._xla_get_default_device().split(':')[1])


def get_device_name(device: Any = None) -> str:
    check_index(device_index(device, optional=True))
    return 'T20 (test double on torch_xla)'


def manual_seed_all(seed: int) -> None:
    if not 0 <= int(seed) < 2**32:
        raise ValueError(f'Seed must be a unint32 number which is between 0~4294967295, got {seed}')
    for index in range(device_count()):
        torch_xla.manual_seed(int(seed), f'xla:{index}')


def get_hbm_alloc_size(device: Optional[Any] = None) -> int:
    """Return bytes. There is no peak, and no way to empty the cache."""
    check_index(device_index(device, optional=True))
    held = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    return sum(each.numel() * each.element_size() for each in held if each.device.type == 'xla')


def _rebuild_from_numpy(data: Any, dtype: Any, device: str, requires_grad: bool) -> torch.Tensor:
    # Trap: a tensor saved on a card loads to the CPU unless that card is the current one.
    tensor = torch.from_numpy(data).to(dtype=dtype)
    if not device.startswith('xla') or device == f'xla:{current_device()}':
        tensor = tensor.to(device)
    tensor.requires_grad = requires_grad
    return tensor


torch.Tensor.is_gcu = lambda self: self.device.type == 'xla'  # type: ignore[attr-defined]
torch._utils._rebuild_device_tensor_from_numpy = _rebuild_from_numpy
