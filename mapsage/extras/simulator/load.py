"""Loading of the simulator into the PyTorch of this process."""

from __future__ import annotations

import ctypes
import importlib.util
import os
from types import ModuleType
from typing import Optional

import torch

from mapsage.accelerator.base import Accelerator

from . import device_module
from .build import build_library, compiler, library_path
from .profiles import GcuProfile
from .settings import SimulatorError, SimulatorSettings, read_settings

# The oldest version with which the backend was compiled; docs/reference/simulator.md lists all.
_MIN_TORCH = (2, 6)

# The engine asserts that a gradient's device is the one accelerator of the process, and takes a
# PrivateUse1 device for it if one is loaded (torch 2.13, 2.14: "opt_ready_stream INTERNAL ASSERT").
ONE_OF_BOTH = "PyTorch's backward pass fails on CUDA once simulated devices are loaded"

_loaded: Optional[SimulatorSettings] = None


def why_unavailable() -> Optional[str]:
    """Return why the simulator cannot be loaded here, or None. Nothing is compiled."""
    if _loaded is not None:
        return None
    version = tuple(map(int, torch.__version__.split('+')[0].split('.')[:2]))
    if version < _MIN_TORCH:
        return f'the simulator needs torch>=2.6, this is {torch.__version__}'
    if importlib.util.find_spec('torch_gcu') is not None:
        return 'the real torch_gcu is installed, and PyTorch has room for one of them'
    name = torch._C._get_privateuse1_backend_name()
    if name != 'privateuseone':
        return f'PyTorch holds one such backend, and {name!r} is loaded'
    if not library_path().exists() and compiler() is None:
        return 'it is compiled on first use and there is no C++ compiler (install g++, or set CXX)'
    return None


def load_simulator() -> SimulatorSettings:
    """Add the devices ``gcu:N`` to the PyTorch of this process; a second call changes nothing.

    The settings are read from the environment once (:func:`read_settings`). Call this function
    before the first backward pass, because PyTorch counts the devices then.

    Returns:
        Settings that are in effect.

    Raises:
        SimulatorError: If a setting cannot be read, the backend cannot be built, or this process
            uses CUDA.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    settings = read_settings(os.environ)
    reason = why_unavailable()
    if reason is not None:
        raise SimulatorError(f'the simulator cannot be loaded: {reason}.')
    if torch.cuda.is_initialized():
        raise SimulatorError(
            f'CUDA is in use in this process, and {ONE_OF_BOTH}: use another '
            f'process for the simulator.'
        )
    add_devices(settings, 'gcu', device_module)
    _loaded = settings
    Accelerator.taken = f'simulated devices are loaded in this process, and {ONE_OF_BOTH}'
    return settings


def add_devices(settings: SimulatorSettings, device_type: str, module: ModuleType) -> None:
    """Add simulated devices to PyTorch under a name, such as ``gcu``.

    The tests' doubles of other makes have other names and modules, over the same backend.

    Args:
        settings: Settings of the simulated machine.
        device_type: Name of the devices.
        module: Module that becomes ``torch.<device_type>``.
    """
    library = ctypes.CDLL(str(build_library()))
    library.mapsage_sim_configure(
        ctypes.c_int(settings.devices),
        ctypes.c_int64(settings.memory or 0),
        ctypes.c_int64(settings.failing_allocation),
        ctypes.c_uint64(sum(1 << device for device in settings.absent)),
        ctypes.c_int(settings.refuse_float64),
        ctypes.c_int(settings.refuse_wide_int64),
        ctypes.c_int(settings.needs_workspace_setting),
        ctypes.c_int(settings.random_streams == 'device'),
        ','.join(settings.refused_ops).encode(),
    )
    set_profile(library, settings.profile)
    for counter in ('mapsage_sim_allocated', 'mapsage_sim_peak', 'mapsage_sim_get_rng_state'):
        getattr(library, counter).restype = ctypes.c_int64
    library.mapsage_sim_initial_seed.restype = ctypes.c_uint64
    library.mapsage_sim_register()
    device_module.attach(library, settings)
    torch.utils.rename_privateuse1_backend(device_type)
    torch._register_device_module(device_type, module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def set_profile(library: ctypes.CDLL, profile: GcuProfile) -> None:
    """Give the devices of the compiled backend the quirks of a profile."""
    library.mapsage_sim_set_profile(
        *map(
            ctypes.c_int,
            (
                profile.int64_wraps,
                profile.float64_narrows,
                profile.int64_arithmetic,
                profile.mixed_precision_sum,
                profile.max_of_nan_is_nan,
                profile.dtype_views,
                profile.usable_after_fork,
            ),
        )
    )
