"""Imports of vendors' modules that distinguish an absent module from a broken one."""
from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType
from typing import Callable, Optional, TypeVar

from .base import AcceleratorError

T = TypeVar('T')


def import_vendor(name: str) -> Optional[ModuleType]:
    """Import the module ``name``.

    Returns:
        The module, or None if it is not installed.

    Raises:
        AcceleratorError: If it is installed and its import fails; the message includes the cause.
    """
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:
        raise AcceleratorError(
            f'{name} is installed but its import fails: {type(error).__name__}: {error}. '
            f'Repair it (driver, library path, matching torch) or choose another accelerator '
            f'by name, for example accelerator=cpu.') from error


def ask_vendor(name: str, question: Callable[[], T]) -> T:
    """Return ``question()``; an error is raised again as one that names the vendor.

    Raises:
        AcceleratorError: If the call fails; the message quotes the vendor's.
    """
    try:
        return question()
    except Exception as error:
        raise AcceleratorError(
            f'{name} is installed but cannot reach its devices: {type(error).__name__}: {error}. '
            f'Repair it (driver, permissions) or choose another accelerator by name, for example '
            f'accelerator=cpu.') from error
