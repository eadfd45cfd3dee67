"""The double's part in Python, which the build copies to ``cuda_double.boot``.

A .pth file imports it whenever a Python of the environment starts, and so before PyTorch. It loads
the double's libraries: a library that is loaded satisfies what PyTorch's libraries ask for under
the same name (SONAME), whatever their RPATH. At the end of ``import torch``, PyTorch calls
:func:`register_operators`, an entry point of its group ``torch.backends``.
"""
from __future__ import annotations

import ctypes
import glob
import os
from pathlib import Path
from typing import Any, List

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
show_device_files()
