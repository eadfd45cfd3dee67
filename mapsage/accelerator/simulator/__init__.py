"""Simulated devices ``gcu:N``: an eight-card job rehearsed on any machine with a C++ compiler.

PyTorch's PrivateUse1 device type, renamed ``gcu`` and computed by the CPU's own kernels
(backend.cpp). What is real: devices, placement and its errors, memory accounts, dispatch, autograd,
autocast. What is not: speed, the vendor's numerics and kernels, streams, a random stream a device.
"""
from .load import load_simulator, why_unavailable
from .settings import SimulatorError, SimulatorSettings, read_settings

__all__ = ['SimulatorError', 'SimulatorSettings', 'load_simulator', 'read_settings',
           'why_unavailable']
