"""A sample on its way through dynamic sampling."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Tuple


@dataclass
class Candidate:
    """A sample, and what is known about it.

    Attributes:
        sample: What the dataset returned.
        index: Its place in the dataset, -1 if unknown.
        seed: What its random augmentation was drawn from. With the index it makes the same sample
            again.
        score: What it was judged by, None before that.
    """

    sample: Any
    index: int = -1
    seed: Tuple[int, ...] = ()
    score: Optional[float] = None
