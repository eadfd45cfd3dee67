"""Import a vendor's module so that absent and broken are told apart."""
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
        The module, or None when it is not installed.

    Raises:
        AcceleratorError: If it is installed and its import fails, with its own message.
    """
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.import_module(name)
    except Exception as error:  # a vendor's import can raise anything; all of it is re-raised
        raise AcceleratorError(
            f'{name} is installed but its import fails: {type(error).__name__}: {error}. '
            f'Mend it (driver, library path, matching torch) or choose another accelerator '
            f'by name, for example accelerator=cpu.') from error


def ask_vendor(name: str, question: Callable[[], T]) -> T:
    """Return ``question()``; an error of the vendor's becomes one that names the vendor.

    Raises:
        AcceleratorError: If the call fails, with the vendor's own message.
    """
    try:
        return question()
    except Exception as error:  # a vendor's driver can raise anything; all of it is re-raised
        raise AcceleratorError(
            f'{name} is installed but cannot reach its devices: {type(error).__name__}: {error}. '
            f'Mend it (driver, permissions) or choose another accelerator by name, for example '
            f'accelerator=cpu.') from error
