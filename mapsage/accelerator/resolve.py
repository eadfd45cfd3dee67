"""Choose the accelerator, and say why the others were not chosen."""
from __future__ import annotations

from typing import List, Optional, Tuple, Type

from .base import Accelerator, AcceleratorError
from .cpu import CpuAccelerator
from .cuda import CudaAccelerator
from .gcu import GcuAccelerator
from .gcu_t20 import GcuT20Accelerator
from .sim import SimAccelerator
from .xla import XlaAccelerator

# The order in which `auto` looks. The CPU is always there, so it never gets to the simulator.
ACCELERATORS: Tuple[Type[Accelerator], ...] = (
    CudaAccelerator, GcuAccelerator, GcuT20Accelerator, XlaAccelerator, CpuAccelerator,
    SimAccelerator)

_current: Optional[Accelerator] = None


def resolve_accelerator(name: str = 'auto') -> Accelerator:
    """Return the accelerator called ``name``, or the best present one.

    Args:
        name: ``'auto'`` or one of ``cuda``, ``gcu``, ``gcu_t20``, ``xla``, ``cpu``, ``sim``.
            ``auto`` looks in that order, takes ``xla`` only when its platform is not the CPU, and
            never ``sim``.

    Raises:
        AcceleratorError: If the name is unknown, the accelerator is absent, or a vendor's module
            that had to be looked at is installed but broken.
    """
    if name == 'auto':
        return next(kind for kind in ACCELERATORS if why_not(kind) is None)()
    kinds = {kind.name: kind for kind in ACCELERATORS}
    if name not in kinds:
        raise AcceleratorError(
            f"unknown accelerator {name!r}: expected auto, {', '.join(kinds)}. It is set by "
            f'env_cfg.accelerator, --accelerator or ACCELERATOR.')
    reason = kinds[name].why_unavailable()
    if reason is not None:
        present = [kind.name for kind in ACCELERATORS if _present(kind)]
        raise AcceleratorError(
            f'accelerator {name!r} cannot be used here: {reason}. Present: '
            f"{', '.join(present)}. Choose one of them, or 'auto'.")
    return kinds[name]()


def why_not(kind: Type[Accelerator]) -> Optional[str]:
    """Return why ``auto`` passes over ``kind``, or None when it would take it."""
    reason = kind.why_unavailable()
    if reason is None and kind is XlaAccelerator and XlaAccelerator.is_cpu_stand_in():
        return 'its PJRT platform is CPU; ask for it by name'
    return reason


def explain(chosen: Accelerator, asked: str = 'auto') -> str:
    """Return one line: what was chosen and, after ``auto``, why what comes before it was not.

    Args:
        chosen: What :func:`resolve_accelerator` returned.
        asked: What it was asked for. After a name no other vendor's software is touched.
    """
    if asked != 'auto':
        return f'accelerator {chosen.describe()} [chosen by name]'
    passed: List[str] = []
    for kind in ACCELERATORS:
        if isinstance(chosen, kind):
            break
        passed.append(f'{kind.name}: {why_not(kind)}')
    return f'accelerator {chosen.describe()}' + (f" [{'; '.join(passed)}]" if passed else '')


def set_current_accelerator(accelerator: Accelerator) -> Accelerator:
    """Put ``accelerator`` in force for this process and return it."""
    global _current
    _current = accelerator
    return accelerator


def current_accelerator() -> Accelerator:
    """Return the accelerator in force; the first call resolves ``auto``."""
    return _current or set_current_accelerator(resolve_accelerator())


def _present(kind: Type[Accelerator]) -> bool:
    try:
        return kind.why_unavailable() is None
    except AcceleratorError:
        return False
