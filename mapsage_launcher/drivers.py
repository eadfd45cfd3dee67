"""Finds out whether ranks may use a device driver, without touching a driver.

The launcher needs the answer before it imports PyTorch: ranks that use a driver cannot be forks,
and a process that has asked a driver for its devices must not fork such ranks.
"""

from __future__ import annotations

import contextlib
import glob
import importlib.util
import os
import runpy
from importlib import metadata
from typing import Any, Callable, Dict, Iterator, Optional

# Plugins that add a device to PyTorch as PrivateUse1 -> name of the device.
PLUGINS = {
    'torch_gcu': 'gcu',
    'torch_npu': 'npu',
    'torch_mlu': 'mlu',
    'torch_musa': 'musa',
    'torch_fl': 'flagos',
}
VENDOR_MODULES = (*PLUGINS, 'torch_xla')
# PyTorch 2.5 and newer imports every package with this entry point, unless the variable is 0.
AUTOLOAD, AUTOLOAD_GROUP = 'TORCH_DEVICE_BACKEND_AUTOLOAD', 'torch.backends'

# Device files of NVIDIA's driver, also on Jetson and under WSL, and of AMD's driver.
_CUDA_FILES = ('/dev/nvidia*', '/dev/nvhost*', '/dev/nvmap', '/dev/dxg', '/dev/kfd')


@contextlib.contextmanager
def autoload_restored() -> Iterator[None]:
    """Restore ``TORCH_DEVICE_BACKEND_AUTOLOAD`` after the block: child processes read it."""
    before = os.environ.get(AUTOLOAD)
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(AUTOLOAD, None)
        else:
            os.environ[AUTOLOAD] = before


@contextlib.contextmanager
def no_plugins_loaded() -> Iterator[None]:
    """Within the block, ``import torch`` imports no vendor's plugin; MapSage imports what it uses.

    A plugin that is broken would end the program here in a traceback, also a training on the CPU.
    """
    with autoload_restored():
        os.environ[AUTOLOAD] = '0'
        yield


def declared_plugins() -> Dict[str, Callable[[], object]]:
    """Return the functions that load the plugins which PyTorch would load, by their package.

    Nothing is imported.
    """
    groups: Any = metadata.entry_points()
    # Python 3.8 and 3.9 have no method to select a group.
    points = (
        groups.select(group=AUTOLOAD_GROUP)
        if hasattr(groups, 'select')
        else groups.get(AUTOLOAD_GROUP, [])
    )
    return {point.value.partition(':')[0].partition('.')[0]: point.load for point in points}


def possible_driver(accelerator: Optional[str] = None) -> Optional[str]:
    """Return the name of a driver that ranks may use on this machine; None for the CPU only.

    An installed vendor module counts for every accelerator, because PyTorch may load it by itself.

    Args:
        accelerator: Accelerator on the command line. None if the config chooses, which may name
            any accelerator.
    """
    for name in dict.fromkeys([*VENDOR_MODULES, *declared_plugins()]):
        if importlib.util.find_spec(name) is not None:
            return name
    if accelerator not in ('cpu', 'sim') and _torch_has_cuda() and any(map(glob.glob, _CUDA_FILES)):
        return 'cuda'
    return None


def _torch_has_cuda() -> bool:
    """Return whether the installed PyTorch is built for CUDA or ROCm, without importing it."""
    spec = importlib.util.find_spec('torch')
    if spec is None or spec.origin is None:
        return False
    version = runpy.run_path(os.path.join(os.path.dirname(spec.origin), 'version.py'))
    return version.get('cuda') is not None or version.get('hip') is not None
