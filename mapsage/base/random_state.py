"""Seeds derived from integers, and the global random generators that loaders and training share."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import Iterator

import numpy as np
import torch


@contextmanager
def same_random_numbers() -> Iterator[None]:
    """Restore the global generators of Python, NumPy and torch (CPU) after the block.

    For blocks that load samples or apply transforms, which seed the generators or draw from them.
    """
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


def derived_seed(*entropy: int) -> int:
    """Return a seed in [0, 2**32) from non-negative integers; similar ones give unrelated seeds."""
    return int(np.random.SeedSequence(entropy).generate_state(1)[0])
