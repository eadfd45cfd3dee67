"""The one file that faces vendors' modules: their import, and the functions that they may lack.

An absent module is None, a broken one is an error with the vendor's message. :class:`DeviceModule`
is the typed view of ``torch.npu``, ``torch.gcu`` and the like, whose functions differ by make and
version. Where the module lacks a function, it takes one of ``torch.accelerator`` (torch 2.6 and
newer).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any, Callable, Dict, List, Optional, TypeVar

import torch

from mapsage_launcher.drivers import autoload_restored, declared_plugins

from .base import AcceleratorError

T = TypeVar('T')

# What PyTorch calls its device type for out-of-tree makes until a plugin gives it a name.
UNNAMED_DEVICE = 'privateuseone'


def import_vendor(name: str) -> Optional[ModuleType]:
    """Import the module ``name``.

    torch_gcu puts its own folder at the beginning of the import path, where its ``distributed``
    hides a user's module of that name, and leaves ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` to child
    processes. Neither remains after this call.

    Returns:
        The module, or None if it is not installed.

    Raises:
        AcceleratorError: If it is installed and its import fails; the message includes the cause.
    """
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        return None
    try:
        with autoload_restored():
            module = importlib.import_module(name)
    # A vendor's import may fail in any way; the error below quotes it.
    except Exception as error:
        raise _broken(name, error) from error
    folders = set(getattr(module, '__path__', ()))
    sys.path[:] = [path for path in sys.path if path not in folders]
    return module


def _broken(name: str, error: Exception) -> AcceleratorError:
    return AcceleratorError(
        f'{name} is installed but its import fails: {type(error).__name__}: {error}. '
        f'Repair it (driver, library path, matching torch) or choose another accelerator '
        f'by name, for example accelerator=cpu.'
    )


def ask_vendor(name: str, question: Callable[[], T]) -> T:
    """Return ``question()``; an error is raised again as one that names the vendor.

    Raises:
        AcceleratorError: If the call fails; the message quotes the vendor's.
    """
    try:
        return question()
    except Exception as error:
        raise AcceleratorError(
            f'{name} is installed but cannot reach its devices: {type(error).__name__}: {error}. '
            f'Repair it (driver, permissions) or choose another accelerator by name, for example '
            f'accelerator=cpu.'
        ) from error


def vendor_version(package: str) -> str:
    """Return the version of a vendor's package, or ``'unknown'``."""
    return str(getattr(import_vendor(package), '__version__', 'unknown'))


def registered_device() -> Optional[str]:
    """Return the name of the device that a plugin has registered with PyTorch, or None."""
    name = getattr(torch._C, '_get_privateuse1_backend_name', lambda: UNNAMED_DEVICE)()
    return None if name == UNNAMED_DEVICE else str(name)


def load_entry_point(package: str) -> None:
    """Load an installed plugin as PyTorch would.

    Raises:
        AcceleratorError: If that fails; the message includes the cause.
    """
    if import_vendor(package) is None:
        return
    start: Any = declared_plugins()[package]
    try:
        start()()
    # A vendor's code may fail in any way; the error below quotes it.
    except Exception as error:
        raise _broken(package, error) from error


def communication_backend(device_type: str) -> Optional[str]:
    """Return the name of the torch.distributed backend that a plugin registered, or None.

    The map of default backends has it, except where a make registers the name of its device as one
    string (torch_musa: PyTorch enters its letters) or under PyTorch's own name of the device type
    (torch_fl). The table of capabilities is right in the first case.
    """
    from torch import distributed

    backends: Any = getattr(distributed, 'Backend', None)
    defaults: Dict[str, str] = getattr(backends, 'default_device_backend_map', {})
    capabilities: Dict[str, List[str]] = getattr(backends, 'backend_capability', {})
    names = (device_type, UNNAMED_DEVICE)
    for name in names:
        if name in defaults:
            return str(defaults[name])
    return next(
        (backend for backend, devices in capabilities.items() if set(names) & set(devices)), None
    )


class DeviceModule:
    """Functions of ``torch.<device_type>``, with ``torch.accelerator`` where it lacks one.

    Args:
        device_type: Name of the device in PyTorch.
        package: Package of the vendor, for error messages.
    """

    def __init__(self, device_type: str, package: str) -> None:
        self.device_type, self.package = device_type, package
        module = getattr(torch, device_type, None)
        # torch_fl has its functions in torch_fl.flagos.
        self._module: Any = module or getattr(sys.modules.get(package), device_type, None)

    def device_count(self) -> int:
        """Return the number of visible devices.

        Raises:
            AcceleratorError: If the vendor's software cannot tell.
        """
        return int(ask_vendor(self.package, self._function('device_count', 'device_count')))

    def set_device(self, index: int) -> None:
        """Make a device the current one of this thread.

        Raises:
            AcceleratorError: If the vendor's software fails.
        """
        select = self._function('set_device', 'set_device_index', 'set_device_idx')
        ask_vendor(self.package, lambda: select(index))

    def current_device(self) -> int:
        """Return the index of the current device."""
        return int(self._function('current_device', 'current_device_index', 'current_device_idx')())

    def synchronize(self) -> None:
        """Wait for the work queued on the current device."""
        self._function('synchronize', 'synchronize')()

    def seed(self, seed: int) -> None:
        """Seed the generators of all devices."""
        seed_all = self._find('manual_seed_all')
        if seed_all is not None:
            seed_all(seed)
            return
        seed_one, current = self._function('manual_seed'), self.current_device()
        for index in range(self.device_count()):
            self.set_device(index)
            seed_one(seed)
        self.set_device(current)

    def random_state(self) -> torch.Tensor:
        """Return the state of the current device's generator, uint8 on the CPU, of any length."""
        return self._function('get_rng_state')().cpu()

    def set_random_state(self, state: torch.Tensor) -> None:
        """Restore what :meth:`random_state` returned."""
        self._function('set_rng_state')(state)

    def device_name(self, index: int) -> str:
        """Return the model of a card; the name of the device type if the vendor does not tell."""
        name = self._find('get_device_name')
        return self.device_type if name is None else str(name(index))

    def uuid(self, index: int) -> Optional[str]:
        """Return the vendor's identifier of a card, whatever masks hide cards; None without one.

        torch_gcu has no uuid among the properties of a device. EFML, Enflame's management library,
        lists the identifiers of all cards of the machine, in the order of its own indices.
        """
        properties = self._find('get_device_properties')
        uuid = None if properties is None else getattr(properties(index), 'uuid', None)
        if uuid is None:
            uuids, position = (
                self._find('_raw_device_uuid_efml'),
                self._find('_get_efml_device_index'),
            )
            if uuids is not None and position is not None:
                uuid = _efml_uuid(uuids, position, index)
        return None if uuid is None else str(uuid)

    def bfloat16(self) -> Optional[bool]:
        """Return whether the current device supports bfloat16; None if the vendor does not tell."""
        supported = self._find('is_bf16_supported')
        return None if supported is None else bool(supported())

    def memory_allocated(self) -> Optional[int]:
        """Return the bytes allocated on the current device, or None if unknown."""
        return self._bytes('memory_allocated')

    def max_memory_allocated(self) -> Optional[int]:
        """Return the peak of :meth:`memory_allocated` in bytes, or None if unknown."""
        return self._bytes('max_memory_allocated')

    def reset_peak_memory(self) -> None:
        """Reset the peak of :meth:`max_memory_allocated`, if the vendor's software can."""
        for function in (
            self._find('reset_peak_memory_stats'),
            self._accelerator('reset_peak_memory_stats'),
        ):
            if function is not None:
                _answer(function)
                return

    def memory_total(self) -> Optional[int]:
        """Return the memory of the current device in bytes, or None if unknown."""
        for function in (self._find('mem_get_info'), self._accelerator('get_memory_info')):
            info = None if function is None else _answer(function)
            if info is not None:
                return int(info[1])
        return None

    def _bytes(self, name: str) -> Optional[int]:
        for function in (self._find(name), self._accelerator(name)):
            count = None if function is None else _answer(function)
            if count is not None:
                return int(count)
        return None

    def _find(self, name: str) -> Optional[Callable[..., Any]]:
        return getattr(self._module, name, None)

    @staticmethod
    def _accelerator(name: str) -> Optional[Callable[..., Any]]:
        return getattr(getattr(torch, 'accelerator', None), name, None)

    def _function(self, name: str, *accelerator_names: str) -> Callable[..., Any]:
        for function in (self._find(name), *map(self._accelerator, accelerator_names)):
            if function is not None:
                return function
        raise AcceleratorError(
            f'{self.package} has no torch.{self.device_type}.{name}, which MapSage needs, and '
            f'torch {torch.__version__} has no replacement for it. Update {self.package}, or '
            f'choose another accelerator by name, for example accelerator=cpu.'
        )


def _efml_uuid(
    uuids: Callable[[], Optional[List[str]]], position: Callable[[int], int], index: int
) -> Optional[str]:
    """Return a card's identifier from EFML; None where EFML is not installed."""
    try:
        identifiers = uuids()
        return None if identifiers is None else identifiers[position(index)]
    except OSError:
        return None


def _answer(function: Callable[[], T]) -> Optional[T]:
    """Return ``function()``; None where a vendor declares the function and does not implement it.

    PyTorch's own memory functions raise an assertion for allocators that keep no statistics.
    """
    try:
        return function()
    except (RuntimeError, NotImplementedError):
        return None
