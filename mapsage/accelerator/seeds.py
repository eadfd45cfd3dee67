"""A single seed derived from a number of integers."""
from __future__ import annotations

import numpy as np


def derived_seed(*entropy: int) -> int:
    """Return a seed in [0, 2**32) from non-negative integers; similar ones give unrelated seeds."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
