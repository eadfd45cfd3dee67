"""Tell, without touching a driver, whether ranks may drive an accelerator.

Needs the standard library alone: tools/launch.py loads this file by its path, before any import.
"""
from __future__ import annotations

import glob
import importlib.util
import os
import runpy
from typing import Optional

VENDOR_MODULES = ('torch_gcu', 'torch_xla')

# NVIDIA's driver, on Jetson, under WSL; AMD's.
_CUDA_FILES = ('/dev/nvidia*', '/dev/nvhost*', '/dev/nvmap', '/dev/dxg', '/dev/kfd')


def possible_driver(accelerator: Optional[str] = None) -> Optional[str]:
    """Return what ranks may drive on this machine, None when all they can use is the CPU.

    A vendor's module counts when it is installed: PyTorch may load it whichever accelerator is
    chosen.

    Args:
        accelerator: The name on the command line. None: it is left to the config, which may name
            any.
    """
    for name in VENDOR_MODULES:
        if importlib.util.find_spec(name) is not None:
            return name
    if accelerator not in ('cpu', 'sim') and _torch_has_cuda() and any(
            map(glob.glob, _CUDA_FILES)):
        return 'cuda'
    return None


def _torch_has_cuda() -> bool:
    """Whether the installed PyTorch is built for CUDA or ROCm, told without importing it."""
    found = importlib.util.find_spec('torch')
    if found is None or found.origin is None:
        return False
    version = runpy.run_path(os.path.join(os.path.dirname(found.origin), 'version.py'))
    return version.get('cuda') is not None or version.get('hip') is not None
