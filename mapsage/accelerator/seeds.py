"""Seeds derived from integers, such as (run's seed, rank, step), and the generators they seed."""
from __future__ import annotations

import random

import numpy as np

from .resolve import current_accelerator


def derived_seed(*entropy: int) -> int:
    """Return a seed in [0, 2**32) from non-negative integers; similar ones give unrelated seeds."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])


def seed_generators(*entropy: int) -> None:
    """Seed the generators of Python, NumPy and the accelerator from non-negative integers."""
    seed = derived_seed(*entropy)
    random.seed(seed)
    np.random.seed(seed)
    current_accelerator().seed(seed)
