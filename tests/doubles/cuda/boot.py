"""The double's part in Python, which the build copies to ``cuda_double.boot``.

A .pth file imports it whenever a Python of the environment starts, and so before PyTorch. It loads
the double's libraries: a library that is loaded satisfies what PyTorch's libraries ask for under
the same name (SONAME), whatever their RPATH. At the end of ``import torch`` it registers the
operators (:class:`TorchFinder`). It does not do so as a plugin of PyTorch (entry point
``torch.backends``), because MapSage imports PyTorch without its plugins, and NVIDIA's runtime is
none.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, List, Optional

FOLDER = Path(__file__).resolve().parent
RUNTIME = 'libcudart.so.13'
OPERATORS = 'libcuda_double_operators.so'


def load_libraries() -> None:
    """Load the double's libraries, except for the operators, which need PyTorch."""
    names = sorted(path.name for path in FOLDER.glob('lib*.so*') if path.name != OPERATORS)
    names.sort(key=lambda name: name != RUNTIME)  # the others use it
    for name in names:
        ctypes.CDLL(str(FOLDER / name), mode=ctypes.RTLD_GLOBAL)


def register_operators() -> None:
    """Replace PyTorch's CUDA kernels by the CPU's."""
    ctypes.CDLL(str(FOLDER / OPERATORS)).cuda_double_register_operators()


class TorchFinder(MetaPathFinder):
    """Finds PyTorch where it is, and registers the double's operators once it is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Optional[ModuleSpec]:
        spec = PathFinder.find_spec(name) if name == 'torch' else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        run_module = loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run_module(module)
            register_operators()

        loader.exec_module = run_and_register
        return spec


def show_device_files() -> None:
    """Let programs find a driver that look for its files, if this machine has simulated devices."""
    glob_files = glob.glob

    def glob_with_devices(pattern: Any, *args: Any, **kwargs: Any) -> List[Any]:
        has_devices = os.environ.get('CUDA_DOUBLE_DEVICES', '0') not in ('', '0')
        if pattern == '/dev/nvidia*' and has_devices:
            return ['/dev/nvidia0']
        return glob_files(pattern, *args, **kwargs)

    glob.glob = glob_with_devices  # type: ignore[assignment]


load_libraries()
sys.meta_path.insert(0, TorchFinder())
show_device_files()
