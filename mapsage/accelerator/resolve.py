"""The choice of the accelerator, and the reasons why the others were not chosen.

Generators are seeded from integers, such as (run's seed, rank, step). Their states can be stored
and restored, also on another rank.
"""

from __future__ import annotations

import random
from typing import Any, List, Optional, Tuple, Type

import numpy as np

from mapsage.base.random_state import derived_seed
from mapsage_launcher.drivers import PLUGINS
from mapsage_launcher.extras import accelerators_of_extras, missing_extra

from .base import Accelerator, AcceleratorError
from .cpu import CpuAccelerator
from .cuda import CudaAccelerator
from .gcu import GcuAccelerator
from .gcu_t20 import GcuT20Accelerator
from .private_use1 import PrivateUse1Accelerator, is_plugin_device, why_no_device
from .xla import XlaAccelerator

# The order in which `auto` searches. The CPU is always available, so `auto` never chooses an extra.
ACCELERATORS: Tuple[Type[Accelerator], ...] = (
    CudaAccelerator,
    GcuAccelerator,
    GcuT20Accelerator,
    XlaAccelerator,
    PrivateUse1Accelerator,
    CpuAccelerator,
    *accelerators_of_extras(),
)

_current: Optional[Accelerator] = None


def resolve_accelerator(name: str = 'auto') -> Accelerator:
    """Return the accelerator called ``name``, or the best available one.

    Args:
        name: Name ``'auto'``, or one of ``cuda``, ``gcu``, ``gcu_t20``, ``xla``, ``plugin``,
            ``cpu``, ``sim``, or the device of a plugin of PyTorch, such as ``npu``. ``auto``
            searches in this order, chooses ``xla`` only if its platform is not the CPU, and never
            chooses ``sim``. ``plugin`` is the device of whichever plugin is installed.

    Raises:
        AcceleratorError: If the name is unknown, the accelerator is not available, or a vendor's
            module that was examined is installed but broken.
    """
    if name == 'auto':
        return next(kind for kind in ACCELERATORS if why_not(kind) is None)()
    kinds = {kind.name: kind for kind in ACCELERATORS}
    if name in kinds:
        reason = kinds[name].why_unavailable()
        if reason is None:
            return kinds[name]()
    elif is_plugin_device(name):
        reason = why_no_device(name)
        if reason is None:
            return PrivateUse1Accelerator(name)
    elif missing_extra('names', name):
        raise AcceleratorError(f'accelerator {missing_extra("names", name)}')
    else:
        devices = [device for device in PLUGINS.values() if device not in kinds]
        raise AcceleratorError(
            f'unknown accelerator {name!r}: expected auto, {", ".join(kinds)}, or the device of a '
            f'plugin of PyTorch ({", ".join(devices)}, or that of another plugin that is '
            f'installed). It is set by env_cfg.accelerator, --accelerator or ACCELERATOR.'
        )
    present = [kind.name for kind in ACCELERATORS if _present(kind)]
    raise AcceleratorError(
        f'accelerator {name!r} cannot be used here: {reason}. Present: '
        f"{', '.join(present)}. Choose one of them, or 'auto'."
    )


def why_not(kind: Type[Accelerator]) -> Optional[str]:
    """Return why ``auto`` does not choose ``kind``, or None if it can be chosen."""
    reason = kind.why_unavailable()
    if reason is None and kind is XlaAccelerator and XlaAccelerator.is_cpu_stand_in():
        return 'its PJRT platform is CPU; ask for it by name'
    return reason


def explain(chosen: Accelerator, requested: str = 'auto') -> str:
    """Return a line with the choice and, for ``auto``, why each better accelerator was not chosen.

    Args:
        chosen: Result of :func:`resolve_accelerator`.
        requested: Name that function was called with. Only ``auto`` examines the software of other
            vendors.
    """
    if requested != 'auto':
        return f'accelerator {chosen.describe()} [chosen by name]'
    refusals: List[str] = []
    for kind in ACCELERATORS:
        if type(chosen) is kind:
            break
        refusals.append(f'{kind.name}: {why_not(kind)}')
    return f'accelerator {chosen.describe()}' + (f' [{"; ".join(refusals)}]' if refusals else '')


def set_current_accelerator(accelerator: Accelerator) -> Accelerator:
    """Make ``accelerator`` the current one of this process, and return it."""
    global _current
    accelerator.replace_operations()
    _current = accelerator
    return accelerator


def current_accelerator() -> Accelerator:
    """Return the current accelerator; without one, the first call resolves ``auto``."""
    return _current or set_current_accelerator(resolve_accelerator())


def _present(kind: Type[Accelerator]) -> bool:
    try:
        return kind.why_unavailable() is None
    except AcceleratorError:
        return False


def seed_generators(*entropy: int) -> None:
    """Seed the generators of Python, NumPy and the accelerator from non-negative integers."""
    seed = derived_seed(*entropy)
    random.seed(seed)
    np.random.seed(seed)
    current_accelerator().seed(seed)


def generator_states() -> Tuple[Any, ...]:
    """Return the states of the generators that :func:`seed_generators` seeds. It can be pickled."""
    return random.getstate(), np.random.get_state(), current_accelerator().random_state()


def restore_generators(states: Tuple[Any, ...]) -> None:
    """Restore what :func:`generator_states` returned, here or on another rank."""
    random.setstate(states[0])
    np.random.set_state(states[1])
    current_accelerator().set_random_state(states[2])
