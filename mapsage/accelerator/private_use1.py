"""Devices of any make whose plugin registers them with PyTorch as PrivateUse1.

PyTorch holds one such device in a process. Plugins are the packages of the table in
`mapsage_launcher/drivers.py`, and any other that declares the entry point ``torch.backends``. What
the device computes is tried on the device, the functions of the plugin's module are
reached through `_vendor.py`. docs/how-to/accelerators.md says what a new make needs.

Makes and versions of their software differ, and no interface of PyTorch tells what they lack: some
keep 64-bit numbers in 32 bits, some run missing operators on the CPU without a word. So each
capability is a computation of a few numbers with a known result. No random number is drawn.
"""

from __future__ import annotations

import functools
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence

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

_SYNC_BN = (
    'batch_norm_stats',
    'batch_norm_gather_stats_with_counts',
    'batch_norm_elemt',
    'batch_norm_backward_reduce',
    'batch_norm_backward_elemt',
)


class Capabilities(NamedTuple):
    """What one device computes itself.

    Attributes:
        supports: Capabilities that decide how a run is built.
        bfloat16: Whether it multiplies matrices of bfloat16.
    """

    supports: Supports
    bfloat16: bool

    def summary(self) -> str:
        """Return the capabilities as one phrase for the log."""
        answers = dict(
            int64=self.supports.int64,
            float64=self.supports.float64,
            bfloat16=self.bfloat16,
            SyncBN=self.supports.sync_bn,
        )
        answers['foreach optimizers'] = self.supports.foreach_optimizer
        answers['fused optimizers'] = self.supports.fused_optimizer
        return ', '.join(f'{name} {"yes" if answer else "no"}' for name, answer in answers.items())


def probe_device(device: torch.device, bfloat16: Optional[bool] = None) -> Capabilities:
    """Return what a device of type PrivateUse1 computes. Takes some dozens of small operators.

    Args:
        device: Device, which must be usable.
        bfloat16: Whether the vendor says that it supports bfloat16; None to try it.
    """
    return Capabilities(
        Supports(
            sync_bn=all(map(has_kernel, _SYNC_BN)),
            float64=_holds(lambda: _keeps_float64(device)),
            int64=_holds(lambda: _keeps_int64(device)),
            # Inductor needs a backend for the device, which no make here has for training.
            compile=False,
            fused_optimizer=has_kernel('_fused_adamw_')
            and _holds(lambda: _steps(device, fused=True)),
            foreach_optimizer=_holds(lambda: _steps(device, foreach=True)),
        ),
        _holds(lambda: _multiplies_bfloat16(device)) if bfloat16 is None else bfloat16,
    )


def has_kernel(operator: str) -> bool:
    """Return whether the plugin has its own kernel of an operator of PyTorch, such as ``'relu'``.

    A fallback to the CPU that a plugin registers for all operators does not count.
    """
    try:
        return bool(
            torch._C._dispatch_has_kernel_for_dispatch_key(f'aten::{operator}', 'PrivateUse1')
        )
    # This version of torch has no such operator.
    except RuntimeError:
        return False


def _holds(experiment: Callable[[], bool]) -> bool:
    """Return the outcome of an experiment; False if the device refuses it."""
    try:
        return experiment()
    except (RuntimeError, TypeError, ValueError):
        return False


def _keeps_int64(device: torch.device) -> bool:
    number = 2**40
    on_device = torch.tensor([number]).to(device)
    return on_device.cpu().tolist() == [number] and (on_device + 1).cpu().tolist() == [number + 1]


def _keeps_float64(device: torch.device) -> bool:
    # The largest odd number that float64 holds, and a sum of which float32 loses the small part.
    number = float(2**53 - 1)
    on_device = torch.tensor([number], dtype=torch.float64).to(device)
    total = torch.tensor([1.0], dtype=torch.float64).to(device) + 2.0**-40
    return on_device.cpu().tolist() == [number] and total.cpu().tolist() == [1 + 2.0**-40]


def _multiplies_bfloat16(device: torch.device) -> bool:
    matrix = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    on_device = matrix.to(device)
    return (on_device @ on_device).float().cpu().tolist() == [[7.0, 10.0], [15.0, 22.0]]


def _steps(device: torch.device, foreach: bool = False, fused: bool = False) -> bool:
    """Return whether a step of AdamW on the device is right."""
    parameter = torch.nn.Parameter(torch.ones(1, device=device))
    parameter.grad = torch.full_like(parameter, 0.5)
    optimizer = torch.optim.AdamW(
        [parameter], lr=0.125, weight_decay=0, foreach=foreach, fused=fused
    )
    optimizer.step()
    # Adam's first step has the length of the learning rate, whatever the gradient.
    return abs(float(parameter.detach().cpu()) - 0.875) < 1e-5


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
