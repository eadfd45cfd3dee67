"""Devices of ``torch.gcu``: the compiled backend of this process, and which device is current."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Callable, List, Optional, Type, Union

import torch

from .settings import SimulatorSettings

DeviceLike = Union[int, str, torch.device, None]

_library: Any = None
_settings = SimulatorSettings()
# Functions that wait for work which the simulated eccl has queued.
_waits: List[Callable[[], None]] = []


def attach(library: Any, settings: SimulatorSettings) -> None:
    """Use the compiled backend ``library`` with the given settings."""
    global _library, _settings
    _library, _settings = library, settings


def library() -> Any:
    """Return the compiled backend."""
    return _library


def settings() -> SimulatorSettings:
    """Return the settings of the devices."""
    return _settings


def initialize() -> None:
    """Count this process as one that uses the devices.

    Raises:
        RuntimeError: In a process forked from one that has used them, in the vendor's words.
    """
    if is_in_bad_fork():
        raise RuntimeError(
            'Cannot re-initialize GCU in forked subprocess. To use GCU with '
            "multiprocessing, you must use the 'spawn' start method"
        )
    _library.mapsage_sim_use()


def is_initialized() -> bool:
    """Return whether this process has used a device."""
    return bool(_library.mapsage_sim_is_in_use()) and not is_in_bad_fork()


def is_in_bad_fork() -> bool:
    """Return whether the process that this one was forked from had used a device."""
    return bool(_library.mapsage_sim_is_in_bad_fork())


def device_count() -> int:
    """Return the number of devices, including those that do not respond."""
    return _settings.devices


def current_device() -> int:
    """Return the index of the current device of this thread."""
    return int(_library.mapsage_sim_current_device())


def device_index(device: DeviceLike) -> int:
    """Return the index of a device; without a number, of the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index


def set_device(device: DeviceLike) -> None:
    """Make ``device`` the current one of this thread; a negative index does nothing.

    Raises:
        RuntimeError: If there is no such device or it does not respond, or in a process forked
            from one that has used the devices.
    """
    index = device_index(device)
    if index < 0:
        return
    initialize()
    if not _library.mapsage_sim_is_usable(index):
        raise RuntimeError(
            f'gcu:{index} does not answer (simulated fault: MAPSAGE_SIM_FAULTS)'
            if index < _settings.devices
            else f'gcu:{index} does not exist: there are {_settings.devices} simulated devices '
            f'(MAPSAGE_SIM_DEVICES)'
        )
    _library.mapsage_sim_set_device(index)


def synchronize(device: DeviceLike = None) -> None:
    """Wait for the collectives under way. Kernels are finished when they are queued."""
    for wait in list(_waits):
        wait()


def on_synchronize(wait: Callable[[], None]) -> None:
    """Call ``wait`` in every :func:`synchronize` from now on."""
    _waits.append(wait)


def off_synchronize(wait: Callable[[], None]) -> None:
    """Undo :func:`on_synchronize`."""
    _waits.remove(wait)


class device:  # noqa: N801  (named as in torch)
    """A context in which ``device`` is the current one."""

    def __init__(self, device: DeviceLike) -> None:
        self._index = device_index(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        set_device(self._before)


class device_of(device):  # noqa: N801
    """A context in which the device of a tensor is the current one; of a CPU tensor, no change."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__(tensor.device if tensor.device.type == 'gcu' else -1)
