"""Doubles of plugins that add a make's devices to PyTorch, over the simulator's backend.

The device is a real PyTorch device of type PrivateUse1 under the make's name, computed by the CPU's
kernels. Its collectives are gloo behind a copy. What is imitated is what differs between makes, as
their public sources have it: the name of the package, of the device and of the collective backend,
how the backend is registered with torch.distributed, and which functions ``torch.<device>`` has.
Nothing here ran on a card, and nothing here is a vendor's code.
"""

from __future__ import annotations

import functools
import os
import types
from dataclasses import replace
from datetime import timedelta
from typing import Any, Callable, Iterable

import torch
import torch.distributed as dist

from mapsage.extras.simulator import device_module, read_settings
from mapsage.extras.simulator.load import add_devices

# Functions of a make's module that the simulated one has under the same name.
FULL = (
    'is_available',
    'is_initialized',
    'device_count',
    'current_device',
    'set_device',
    'synchronize',
    'memory_allocated',
    'max_memory_allocated',
    'reset_peak_memory_stats',
    'mem_get_info',
    'empty_cache',
    'get_device_name',
    'manual_seed',
    'manual_seed_all',
    'get_rng_state',
    'set_rng_state',
    'is_bf16_supported',
    'get_amp_supported_dtype',
    'device',
    '_is_in_bad_fork',
    '_lazy_init',
)


def add_make(device_type: str, mask: str, functions: Iterable[str] = FULL) -> types.ModuleType:
    """Add a make's devices to PyTorch and return its module.

    Args:
        device_type: Name of the devices.
        mask: Variable that hides cards.
        functions: Functions that the module has.
    """
    environ = {'MAPSAGE_SIM_RANDOM': 'device', **os.environ}
    environ.pop('TOPS_VISIBLE_DEVICES', None)
    if mask in environ:
        environ['TOPS_VISIBLE_DEVICES'] = environ[mask]
    settings = read_settings(environ)
    # What torch_gcu does otherwise than a CPU is no other make's.
    plain = replace(
        settings.profile,
        int64_wraps=False,
        float64_narrows=False,
        int64_arithmetic=True,
        mixed_precision_sum=True,
        max_of_nan_is_nan=True,
        dtype_views=True,
        usable_after_fork=True,
    )
    module = types.ModuleType(f'torch.{device_type}')
    for name in functions:
        setattr(module, name, getattr(device_module, name))
    # By default the simulator's functions mean the device 'gcu', which has another name here.
    module.get_rng_state = lambda device=None: device_module.get_rng_state(_index(device))
    module.set_rng_state = lambda state, device=None: device_module.set_rng_state(
        state, _index(device)
    )
    # MMEngine uses it for musa.
    module.amp = types.SimpleNamespace(autocast=functools.partial(torch.autocast, device_type))
    add_devices(replace(settings, profile=plain), device_type, module)
    return module


def _index(device: Any) -> int:
    return device_module.current_device() if device is None else torch.device(device).index


def make_group(name: str) -> Callable[..., Any]:
    """Return a function of the four classic arguments that makes a process group of this name."""

    def create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
        # Not at the import of a vendor, which comes before the rooms that need it.
        from mapsage.distributed.groups.staged import StagedProcessGroup

        class Group(StagedProcessGroup):
            def getBackendName(self) -> str:
                return name

        return Group(store, rank, size, timeout)

    return create


def make_extended_group(name: str) -> Callable[..., Any]:
    """Return a function of the arguments that ``extended_api=True`` asks for."""
    create = make_group(name)

    def create_with_options(options: Any, backend_options: Any) -> Any:
        return create(options.store, options.group_rank, options.group_size, options.timeout)

    return create_with_options
