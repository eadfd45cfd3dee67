"""Random numbers of ``torch.gcu``, with the interface of torch_gcu 2.10.

By default the devices share the CPU's generator, whose state has 5,056 bytes. With
``MAPSAGE_SIM_RANDOM=device`` the state of a device has the vendor's 16 bytes: seed and offset.
"""

from __future__ import annotations

import ctypes
import secrets
from typing import Any, Iterator, List, Sequence, Tuple

import torch

from .devices import DeviceLike, current_device, device_count, device_index, initialize, library


def manual_seed(seed: int) -> None:
    """Seed the generator of the current device."""
    library().mapsage_sim_seed(current_device(), ctypes.c_uint64(seed))


def manual_seed_all(seed: int) -> None:
    """Seed the generators of all devices."""
    for index in range(device_count()):
        library().mapsage_sim_seed(index, ctypes.c_uint64(seed))


def seed() -> None:
    """Seed the generator of the current device with a random number."""
    manual_seed(secrets.randbits(64))


def seed_all() -> None:
    """Seed the generators of all devices with one random number."""
    manual_seed_all(secrets.randbits(64))


def initial_seed() -> int:
    """Return the last seed of the current device."""
    initialize()
    return int(library().mapsage_sim_initial_seed(current_device()))


def get_rng_state(device: DeviceLike = 'gcu') -> torch.Tensor:
    """Return the state of a device's generator, a uint8 CPU tensor.

    Raises:
        RuntimeError: In a process forked from one that has used the devices.
    """
    initialize()
    index = device_index(device)
    state = torch.empty(library().mapsage_sim_get_rng_state(index, None), dtype=torch.uint8)
    library().mapsage_sim_get_rng_state(index, ctypes.c_void_p(state.data_ptr()))
    return state


def get_rng_state_all() -> List[torch.Tensor]:
    """Return the states of all devices."""
    return [get_rng_state(index) for index in range(device_count())]


def set_rng_state(state: torch.Tensor, device: DeviceLike = 'gcu') -> None:
    """Restore what :func:`get_rng_state` returned.

    Raises:
        RuntimeError: If ``state`` has another size, or an offset that is not a multiple of 4.
    """
    index = device_index(device)
    expected = library().mapsage_sim_get_rng_state(index, None)
    host = state.detach().to('cpu', torch.uint8).contiguous()
    if host.numel() != expected:
        raise RuntimeError(
            f'RNG state is wrong size: expected {expected} bytes, got {host.numel()}'
        )
    if not library().mapsage_sim_set_rng_state(index, ctypes.c_void_p(host.data_ptr())):
        raise RuntimeError('offset must be a multiple of 4')


def set_rng_state_all(states: Sequence[torch.Tensor]) -> None:
    """Restore what :func:`get_rng_state_all` returned."""
    for index, state in enumerate(states):
        set_rng_state(state, index)


class DeviceGenerator:
    """The default generator of a device, with the methods of ``torch.Generator``."""

    def __init__(self, index: int) -> None:
        self.device = torch.device('gcu', index)

    def manual_seed(self, seed: int) -> DeviceGenerator:
        """Seed the generator and return it."""
        library().mapsage_sim_seed(self.device.index, ctypes.c_uint64(seed))
        return self

    def seed(self) -> int:
        """Seed the generator with a random number and return that."""
        seed = secrets.randbits(64)
        self.manual_seed(seed)
        return seed

    def initial_seed(self) -> int:
        """Return the last seed."""
        return int(library().mapsage_sim_initial_seed(self.device.index))

    def get_state(self) -> torch.Tensor:
        """Return :func:`get_rng_state` of the device."""
        return get_rng_state(self.device)

    def set_state(self, state: torch.Tensor) -> None:
        """Call :func:`set_rng_state` for the device."""
        set_rng_state(state, self.device)


class _DefaultGenerators(Sequence[DeviceGenerator]):
    """One generator for each device that this process can see."""

    def __len__(self) -> int:
        return device_count()

    def __getitem__(self, index: Any) -> Any:
        generators: Tuple[DeviceGenerator, ...] = tuple(self)
        return generators[index]

    def __iter__(self) -> Iterator[DeviceGenerator]:
        return (DeviceGenerator(index) for index in range(device_count()))


default_generators = _DefaultGenerators()
