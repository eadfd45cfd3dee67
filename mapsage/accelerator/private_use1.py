"""Devices of any make whose plugin registers them with PyTorch as PrivateUse1.

PyTorch holds one such device in a process. Plugins are the packages of the table in
`mapsage_launcher/drivers.py`, and any other that declares the entry point ``torch.backends``. What
the device computes is tried on the device (`probe.py`), the functions of the plugin's module are
reached through `_vendor.py`. docs/how-to/accelerators.md says what a new make needs.
"""

from __future__ import annotations

import functools
from typing import Dict, List, Optional, Sequence

import torch

from mapsage_launcher.drivers import PLUGINS, declared_plugins

from ._vendor import (
    DeviceModule,
    communication_backend,
    import_vendor,
    load_entry_point,
    registered_device,
    vendor_version,
)
from .base import Accelerator, AcceleratorError, Supports
from .probe import Capabilities, probe_device

# Its devices have gcu.py.
_OTHERS = ('torch_gcu',)
# Variables that hide cards; other makes have <DEVICE>_VISIBLE_DEVICES.
_MASKS = {
    'gcu': 'TOPS_VISIBLE_DEVICES',
    'npu': 'ASCEND_RT_VISIBLE_DEVICES',
    'mlu': 'MLU_VISIBLE_DEVICES',
    'musa': 'MUSA_VISIBLE_DEVICES',
}


class PrivateUse1Accelerator(Accelerator):
    """Devices of the plugin that is installed here, such as ``npu:N`` of torch_npu.

    Gradients travel over the backend that the plugin registers with torch.distributed, or through
    host memory if it registers none. Control traffic travels over gloo.

    Args:
        device_type: Name of the device; None for the device of any installed plugin.

    Raises:
        AcceleratorError: If no plugin with this device can be used.
    """

    name = 'plugin'

    def __init__(self, device_type: Optional[str] = None) -> None:
        reason = why_no_device(device_type)
        registered = registered_device()
        if reason is not None or registered is None:
            raise AcceleratorError(
                f'accelerator {device_type or self.name!r} cannot be used here: {reason}.'
            )
        self.name = self.device_type = registered
        self.masks = (_MASKS.get(registered, f'{registered.upper()}_VISIBLE_DEVICES'),)
        self.communication = communication_backend(registered) or 'staged'

    @classmethod
    def why_unavailable(cls) -> Optional[str]:
        return why_no_device(None)

    @functools.cached_property
    def module(self) -> DeviceModule:
        """Functions of ``torch.<device_type>``."""
        return DeviceModule(self.device_type, package_of(self.device_type))

    @functools.cached_property
    def capabilities(self) -> Capabilities:
        """What the current device computes, tried at the first use."""
        index = self.module.current_device()
        return probe_device(torch.device(self.device_type, index), self.module.bfloat16())

    @functools.cached_property
    def supports(self) -> Supports:  # type: ignore[override]
        """Capabilities of the current device, tried at the first use."""
        return self.capabilities.supports

    @property
    def amp_dtype(self) -> torch.dtype:  # type: ignore[override]
        """Bfloat16 where the device computes in it, else float16."""
        return torch.bfloat16 if self.capabilities.bfloat16 else torch.float16

    def device_count(self) -> int:
        return self.module.device_count()

    def device(self, local_rank: int = 0) -> torch.device:
        return torch.device(self.device_type, self._index(local_rank))

    def set_device(self, local_rank: int) -> None:
        self.module.set_device(self._index(local_rank))

    def synchronize(self) -> None:
        self.module.synchronize()

    def seed(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        self.module.seed(seed)

    def random_state(self) -> List[torch.Tensor]:
        return [torch.get_rng_state(), self.module.random_state()]

    def set_random_state(self, states: Sequence[torch.Tensor]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            self.module.set_random_state(state)

    def native_bfloat16(self) -> Optional[bool]:
        return self.capabilities.bfloat16

    def describe_probes(self) -> Optional[str]:
        tried = Capabilities(self.supports, self.capabilities.bfloat16)
        return f'{self.name}, tried on the card: {tried.summary()}'

    def card(self, local_rank: int = 0) -> Optional[str]:
        return self.module.uuid(self._index(local_rank))

    def card_model(self, local_rank: int = 0) -> str:
        return self.module.device_name(self._index(local_rank))

    def software(self) -> Dict[str, str]:
        return {self.module.package: vendor_version(self.module.package)}

    def memory_allocated(self) -> Optional[int]:
        return self.module.memory_allocated()

    def max_memory_allocated(self) -> Optional[int]:
        return self.module.max_memory_allocated()

    def reset_peak_memory(self) -> None:
        self.module.reset_peak_memory()

    def memory_total(self) -> Optional[int]:
        return self.module.memory_total()


def package_of(device_type: str) -> str:
    """Return the package whose plugin has a device; by convention it is named after the device."""
    packages = {device: package for package, device in PLUGINS.items()}
    return packages.get(device_type, f'torch_{device_type}')


def is_plugin_device(name: str) -> bool:
    """Return whether ``name`` is the device of a known or installed plugin. Imports none."""
    return (
        name in PLUGINS.values()
        or name == registered_device()
        or package_of(name) in declared_plugins()
    )


def why_no_device(device_type: Optional[str]) -> Optional[str]:
    """Load the plugin of a device, and return why the device cannot be used, or None if it can.

    Args:
        device_type: Name of the device; None for the device of any installed plugin.

    Raises:
        AcceleratorError: If the plugin is installed but broken; the message quotes its own.
    """
    packages = _packages() if device_type is None else [package_of(device_type)]
    for package in packages:
        if registered_device() is None:
            _load(package)
    registered = registered_device()
    if registered is None:
        return (
            f'{packages[0]} is not installed'
            if device_type is not None
            else f'no plugin is installed ({", ".join(p for p in PLUGINS if p not in _OTHERS)}, or '
            f'another with the entry point torch.backends)'
        )
    if package_of(registered) in _OTHERS and device_type is None:
        return f'PyTorch holds one such device, and {registered!r} has an accelerator of that name'
    if device_type not in (None, registered):
        return f'PyTorch holds one such device in a process, and {registered!r} is loaded'
    module = DeviceModule(registered, package_of(registered))
    if module.device_count() < 1:
        return f'{module.package} is installed and shows no device'
    return None


def _packages() -> List[str]:
    """Return the packages that may have a plugin, in the order in which they are tried."""
    packages = dict.fromkeys([*PLUGINS, *declared_plugins()])
    return [package for package in packages if package not in _OTHERS]


def _load(package: str) -> None:
    """Import a plugin if it is installed, so that it registers its device."""
    import_vendor(package)
    if registered_device() is None and package in declared_plugins():
        load_entry_point(package)
