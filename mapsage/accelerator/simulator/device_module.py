"""``torch.gcu`` with the interface of torch_gcu 2.10 (S60 line), for the simulated devices."""
from __future__ import annotations

import ctypes
import os
from types import SimpleNamespace, TracebackType
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Tuple, Type, Union

import torch

from .settings import SimulatorSettings

DeviceLike = Union[int, str, torch.device, None]

_library: Any = None
_settings = SimulatorSettings()
# Functions that wait for work which the simulated eccl has queued.
_waits: List[Callable[[], None]] = []


class DeviceProperties(NamedTuple):
    """Result of ``get_device_properties``; ``total_memory`` is in bytes.

    ``uuid`` names the card whatever the device masks of a process are, as on CUDA.
    """

    name: str
    total_memory: int
    uuid: str


def attach(library: Any, settings: SimulatorSettings) -> None:
    """Use the compiled backend ``library`` with the given settings."""
    global _library, _settings
    _library, _settings = library, settings


def is_available() -> bool:
    """Return whether there is a device."""
    return device_count() > 0


def is_initialized() -> bool:
    """Return True, because nothing is initialized later."""
    return True


def device_count() -> int:
    """Return the number of devices, including those that do not respond."""
    return _settings.devices


def current_device() -> int:
    """Return the index of the current device of this thread."""
    return int(_library.mapsage_sim_current_device())


def set_device(device: DeviceLike) -> None:
    """Make ``device`` the current one of this thread.

    Raises:
        RuntimeError: If there is no such device or it does not respond.
    """
    index = _index(device)
    if not _library.mapsage_sim_is_usable(index):
        raise RuntimeError(
            f'gcu:{index} does not answer (simulated fault: MAPSAGE_SIM_FAULTS)'
            if 0 <= index < _settings.devices else
            f'gcu:{index} does not exist: there are {_settings.devices} simulated devices '
            f'(MAPSAGE_SIM_DEVICES)')
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


def empty_cache() -> None:
    """Do nothing: the simulator caches no memory."""


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes of all tensors on a device."""
    return int(_library.mapsage_sim_allocated(_index(device)))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the highest :func:`memory_allocated` since the last reset, in bytes."""
    return int(_library.mapsage_sim_peak(_index(device)))


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Make the current :func:`memory_allocated` the peak."""
    _library.mapsage_sim_reset_peak(_index(device))


def mem_get_info(device: DeviceLike = None) -> Tuple[int, int]:
    """Return the free and the total memory of a device in bytes.

    Without ``MAPSAGE_SIM_MEMORY``, each device has an equal part of the machine's memory.
    """
    machine = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    total = _settings.memory or machine // _settings.devices
    return max(total - memory_allocated(device), 0), total


def get_device_name(device: DeviceLike = None) -> str:
    """Return the model of a card, with a word that no real card has."""
    return f'Simulated {_settings.models[_index(device)]}'


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return name, memory and identity of a device."""
    return DeviceProperties(get_device_name(device), mem_get_info(device)[1],
                            f'SIM-{_settings.cards[_index(device)]}')


def is_bf16_supported() -> bool:
    """Return True, as the S60 line does."""
    return True


def get_amp_supported_dtype() -> List[torch.dtype]:
    """Return the data types that ``torch.autocast('gcu')`` supports."""
    return [torch.float16, torch.bfloat16]


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device; by default all devices share the CPU's."""
    _library.mapsage_sim_seed(current_device(), ctypes.c_uint64(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        _library.mapsage_sim_seed(index, ctypes.c_uint64(seed))


def initial_seed() -> int:
    """Return the last seed of the current device."""
    return int(_library.mapsage_sim_initial_seed(current_device()))


def get_rng_state(device: DeviceLike = None) -> torch.Tensor:
    """Return the state of a device's generator, a uint8 CPU tensor."""
    index = _index(device)
    state = torch.empty(_library.mapsage_sim_get_rng_state(index, None), dtype=torch.uint8)
    _library.mapsage_sim_get_rng_state(index, ctypes.c_void_p(state.data_ptr()))
    return state


def set_rng_state(state: torch.Tensor, device: DeviceLike = None) -> None:
    """Restore what :func:`get_rng_state` returned.

    Raises:
        RuntimeError: If ``state`` does not have the bytes of a state.
    """
    index = _index(device)
    expected = _library.mapsage_sim_get_rng_state(index, None)
    host = state.detach().to('cpu', torch.uint8).contiguous()
    if host.numel() != expected:
        raise RuntimeError(f'a random state has {expected} bytes, got {host.numel()}')
    _library.mapsage_sim_set_rng_state(index, ctypes.c_void_p(host.data_ptr()))


def gcu_device(index: int) -> torch.device:
    """Return ``torch.device('gcu', index)``."""
    return torch.device('gcu', index)


class device:  # noqa: N801  (named as in torch)
    """A context in which ``device`` is the current one."""

    def __init__(self, device: DeviceLike) -> None:
        self._index = _index(device)
        self._before = 0

    def __enter__(self) -> None:
        self._before = current_device()
        set_device(self._index)

    def __exit__(self, kind: Optional[Type[BaseException]], error: Optional[BaseException],
                 trace: Optional[TracebackType]) -> None:
        set_device(self._before)


class _Autocast(torch.autocast):
    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16,
                 cache_enabled: bool = True) -> None:
        super().__init__('gcu', dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


def _grad_scaler(**kwargs: Dict[str, Any]) -> torch.amp.GradScaler:
    return torch.amp.GradScaler('gcu', **kwargs)  # type: ignore[arg-type]


amp = SimpleNamespace(autocast=_Autocast, GradScaler=_grad_scaler)


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    return None


def _index(device: DeviceLike) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return current_device() if index is None else index
