"""A sample in dynamic sampling, before a step has decided whether to use it."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Optional, Tuple


@dataclass
class Candidate:
    """A sample with its origin and score.

    Attributes:
        sample: Sample that the dataset returned.
        index: Index in the dataset, -1 if unknown.
        seed: Seed of its random augmentation. Index and seed together reproduce the sample.
        score: Score by which it was judged; None before that.
    """

    sample: Any
    index: int = -1
    seed: Tuple[int, ...] = ()
    score: Optional[float] = None
