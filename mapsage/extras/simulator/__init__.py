"""Simulated devices ``gcu:N``, to test an eight-card job on any machine with a C++ compiler.

They use PyTorch's PrivateUse1 device type, renamed ``gcu``, and the kernels of the CPU
(backend.cpp). Devices, placement and its errors, memory accounting, dispatch, autograd and autocast
behave as on real devices, and so do device masks and, on request, a random generator for each
device. Speed, the vendor's numerics and kernels, and streams are not simulated.
"""

from .load import ONE_OF_BOTH, load_simulator, why_unavailable
from .profiles import GcuProfile, Wire64
from .settings import SimulatorError, SimulatorSettings, read_settings

__all__ = [
    'GcuProfile',
    'ONE_OF_BOTH',
    'SimulatorError',
    'SimulatorSettings',
    'Wire64',
    'load_simulator',
    'read_settings',
    'why_unavailable',
]
