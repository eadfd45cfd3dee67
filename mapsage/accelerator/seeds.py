"""The generators that are seeded from integers, such as (run's seed, rank, step).

The states of these generators can be stored and restored, also on another rank.
"""

from __future__ import annotations

import random
from typing import Any, Tuple

import numpy as np

from mapsage.base.random_state import derived_seed

from .resolve import current_accelerator


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
