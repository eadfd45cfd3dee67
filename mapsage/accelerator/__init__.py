"""Device stacks behind one interface; the only package that imports a vendor's module."""

from .base import Accelerator, AcceleratorError, Supports
from .memory import is_out_of_memory
from .resolve import (
    ACCELERATORS,
    current_accelerator,
    derived_seed,
    explain,
    generator_states,
    resolve_accelerator,
    restore_generators,
    seed_generators,
    set_current_accelerator,
)

__all__ = [
    'ACCELERATORS',
    'Accelerator',
    'AcceleratorError',
    'Supports',
    'current_accelerator',
    'derived_seed',
    'explain',
    'generator_states',
    'is_out_of_memory',
    'resolve_accelerator',
    'restore_generators',
    'seed_generators',
    'set_current_accelerator',
]
