"""``torch.gcu`` with the interface of torch_gcu 2.10 (S60 line), for the simulated devices."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import torch

from .devices import (
    DeviceLike,
    attach,
    current_device,
    device,
    device_count,
    device_index,
    device_of,
    initialize,
    is_in_bad_fork,
    is_initialized,
    library,
    off_synchronize,
    on_synchronize,
    set_device,
    settings,
    synchronize,
)
from .random_state import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from .streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)

__all__ = [
    'DeviceProperties',
    'Event',
    'Stream',
    'StreamContext',
    'amp',
    'attach',
    'can_device_access_peer',
    'current_device',
    'current_stream',
    'default_generators',
    'default_stream',
    'device',
    'device_count',
    'device_of',
    'empty_cache',
    'gcu_device',
    'get_amp_supported_dtype',
    'get_device_capability',
    'get_device_name',
    'get_device_properties',
    'get_rng_state',
    'get_rng_state_all',
    'init',
    'initial_seed',
    'is_available',
    'is_bf16_supported',
    'is_current_stream_capturing',
    'is_fp16_supported',
    'is_initialized',
    'manual_seed',
    'manual_seed_all',
    'max_memory_allocated',
    'max_memory_reserved',
    'mem_get_info',
    'memory_allocated',
    'memory_reserved',
    'memory_stats',
    'off_synchronize',
    'on_synchronize',
    'reset_peak_memory_stats',
    'seed',
    'seed_all',
    'set_device',
    'set_rng_state',
    'set_rng_state_all',
    'set_stream',
    'stream',
    'synchronize',
]

# Major version 3 is the S60 (torch_gcu 2.10, gcu_hardware.cpp:18); the minor one is not published.
_CAPABILITY = (3, 0)
# A stream of the S60 can be limited to 1 or 2 clusters of 1 to 12 processors.
_CLUSTERS, _PROCESSORS = 2, 24


class DeviceProperties(NamedTuple):
    """Result of ``get_device_properties``; ``total_memory`` is in bytes.

    As with torch_gcu, there is no ``uuid``: :func:`_raw_device_uuid_efml` has the cards' names.
    """

    name: str
    major: int
    minor: int
    multi_processor_count: int
    total_memory: int
    sip_count: int


def is_available() -> bool:
    """Return whether there is a device."""
    return device_count() > 0


def init() -> None:
    """Count this process as one that uses the devices."""
    initialize()


def empty_cache() -> None:
    """Do nothing: the simulator caches no memory."""


def memory_allocated(device: DeviceLike = None) -> int:
    """Return the bytes of all tensors on a device."""
    return int(library().mapsage_sim_allocated(device_index(device)))


def max_memory_allocated(device: DeviceLike = None) -> int:
    """Return the highest :func:`memory_allocated` since the last reset, in bytes."""
    return int(library().mapsage_sim_peak(device_index(device)))


def memory_reserved(device: DeviceLike = None) -> int:
    """Return :func:`memory_allocated`, because the simulator caches no memory."""
    return memory_allocated(device)


def max_memory_reserved(device: DeviceLike = None) -> int:
    """Return :func:`max_memory_allocated`, because the simulator caches no memory."""
    return max_memory_allocated(device)


def memory_stats(device: DeviceLike = None) -> Dict[str, int]:
    """Return the current bytes and the peak, under the keys that CUDA has for them."""
    current, peak = memory_allocated(device), max_memory_allocated(device)
    return {
        f'{kind}_bytes.all.{name}': value
        for kind in ('allocated', 'reserved')
        for name, value in (('current', current), ('peak', peak))
    }


def reset_peak_memory_stats(device: DeviceLike = None) -> None:
    """Make the current :func:`memory_allocated` the peak."""
    library().mapsage_sim_reset_peak(device_index(device))


def mem_get_info(device: DeviceLike = None) -> Tuple[int, int]:
    """Return the free and the total memory of a device in bytes.

    Without ``MAPSAGE_SIM_MEMORY``, each device has an equal part of the machine's memory.
    """
    machine = os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES')
    total = settings().memory or machine // device_count()
    return max(total - memory_allocated(device), 0), total


def get_device_name(device: DeviceLike = None) -> str:
    """Return the model of a card, with a word that no real card has."""
    return f'Simulated {settings().models[device_index(device)]}'


def get_device_capability(device: DeviceLike = None) -> Tuple[int, int]:
    """Return the major and minor version of the hardware."""
    return _CAPABILITY


def get_device_properties(device: DeviceLike = None) -> DeviceProperties:
    """Return model and memory of a device.

    Raises:
        RuntimeError: In a process forked from one that has used the devices.
    """
    initialize()
    return DeviceProperties(
        get_device_name(device), *_CAPABILITY, _CLUSTERS, mem_get_info(device)[1], _PROCESSORS
    )


def can_device_access_peer(device: DeviceLike, peer_device: DeviceLike) -> bool:
    """Return whether two devices are different ones: each simulated device can read the others."""
    return device_index(device) != device_index(peer_device)


def is_current_stream_capturing() -> bool:
    """Return False: graphs are not simulated."""
    return False


def is_bf16_supported() -> bool:
    """Return True, as the S60 line does."""
    return True


def is_fp16_supported() -> bool:
    """Return True, as the S60 line does."""
    return True


def get_amp_supported_dtype() -> List[torch.dtype]:
    """Return the data types that ``torch.autocast('gcu')`` supports."""
    return [torch.float16, torch.bfloat16]


def gcu_device(index: int) -> torch.device:
    """Return ``torch.device('gcu', index)``."""
    return torch.device('gcu', index)


class _Autocast(torch.autocast):
    def __init__(
        self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True
    ) -> None:
        super().__init__('gcu', dtype=dtype, enabled=enabled, cache_enabled=cache_enabled)


# torch 1.10 imports this file and lacks the class; the simulator is refused there (load.py).
_ScalerBase: Any = getattr(getattr(torch, 'amp', None), 'GradScaler', object)


class _GradScaler(_ScalerBase):
    """The scaler of ``torch.gcu.amp``, which tells of an overflow on the standard output."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__('gcu', **kwargs)

    def _maybe_opt_step(
        self,
        optimizer: torch.optim.Optimizer,
        optimizer_state: Dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Optional[float]:
        if settings().profile.scaler_prints_overflow and any(
            flag.item() for flag in optimizer_state['found_inf_per_device'].values()
        ):
            sys.stdout.write('Gradient overflow. Skipping step\n')
        return super()._maybe_opt_step(optimizer, optimizer_state, *args, **kwargs)


amp = SimpleNamespace(autocast=_Autocast, GradScaler=_GradScaler)


def _raw_device_uuid_efml() -> List[str]:
    """Return the names of all cards of the machine, whatever the masks of a process are."""
    return [f'SIM-{card}' for card in range(settings().machine_cards)]


def _get_efml_device_index(device: DeviceLike = None) -> int:
    """Return the position of a device's card in :func:`_raw_device_uuid_efml`."""
    return settings().cards[device_index(device)]


_is_in_bad_fork = is_in_bad_fork
_lazy_init = initialize
