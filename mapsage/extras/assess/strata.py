"""Strata of a map: a stratum for each class, and one for the pixels that the model doubts.

The stratum "doubtful" makes a survey of a rare class efficient: most omissions of the class lie
where the model was unsure, so the stratum finds them with few points (docs/how-to/assess.md has the
simulated effect). Rare classes keep all their pixels in their own stratum.

Shapes (K classes, L levels of confidence, H strata):
    table     (K, L) stratum of the pixels of a class and level; -1 where there are no pixels
    joint     (H, K, K) expected shares of map class and true class in each stratum
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import List

import numpy as np

from .census import MapCensus
from .map_reader import LEVELS

DOUBTFUL = 'doubtful'
"""Name of the stratum of doubtful pixels."""

# Expected accuracy of a map without confidence. It steers sizes and allocations, no estimate.
_GUESSED_ACCURACY = 0.8


@dataclass(frozen=True)
class Strata:
    """Strata that cover a map.

    Attributes:
        names: Name of each stratum: its class, or ``DOUBTFUL``.
        table: Stratum by class and level of confidence, int16 ``(K, L)``.
        area: Area of each stratum in the unit of the census, ``(H,)``.
        pixels: Pixels of each stratum, ``(H,)``.
        joint: Shares of map class and true class that the model expects in each stratum,
            ``(H, K, K)``. They steer the design; the estimates do not depend on them.
        composition: Share of each map class in the area of each stratum, ``(H, K)``.
        threshold: Confidence in percent below which pixels of common classes are doubtful; 0 if
            there is no such stratum.
    """

    names: List[str]
    table: np.ndarray
    area: np.ndarray
    pixels: np.ndarray
    joint: np.ndarray
    composition: np.ndarray
    threshold: int

    @property
    def shares(self) -> np.ndarray:
        """Share of the area of each stratum, ``(H,)``."""
        return self.area / self.area.sum()


def build_strata(census: MapCensus, doubtful_share: float) -> Strata:
    """Return the strata of a map.

    Args:
        census: Tables of the map.
        doubtful_share: Largest share of the area that the doubtful stratum may take, filled with
            the least confident pixels of classes that cover more than this share; 0 for none.
    """
    threshold = _find_threshold(census, doubtful_share)
    classes = len(census.class_names)
    number = np.broadcast_to(np.arange(classes)[:, None], census.pixels.shape).copy()
    common = census.class_shares > doubtful_share
    number[common, :threshold] = classes
    number[census.pixels == 0] = -1
    used = [stratum for stratum in range(classes + 1) if (number == stratum).any()]
    table = np.full(number.shape, -1, np.int16)
    for position, stratum in enumerate(used):
        table[number == stratum] = position
    member = table[None] == np.arange(len(used))[:, None, None]
    area = (member * census.area).sum((1, 2))
    by_class = np.einsum('hkl,kl->hk', member, census.area)
    joint = np.einsum('hkl,klr->hkr', member, expected_reference(census))
    names = [*census.class_names, _doubtful_name(census)]
    return Strata(
        [names[stratum] for stratum in used],
        table,
        area,
        (member * census.pixels).sum((1, 2)),
        joint / area[:, None, None],
        by_class / area[:, None],
        threshold,
    )


def expected_reference(census: MapCensus) -> np.ndarray:
    """Return the area that each true class is expected to have, by map class and level.

    From the probabilities; without them the mapped class gets the confidence, and the others share
    the rest by their areas on the map.

    Returns:
        Area ``(K, L, K)``; the last axis adds up to ``census.area``.
    """
    if census.probability is not None:
        total = census.probability.sum(-1, keepdims=True)
        return census.area[..., None] * np.divide(
            census.probability, total, where=total > 0, out=np.zeros_like(census.probability)
        )
    classes = len(census.class_names)
    has_confidence = census.pixels[:, 1:].any()
    right = np.arange(LEVELS) / 100 if has_confidence else np.full(LEVELS, _GUESSED_ACCURACY)
    expected = np.zeros((classes, LEVELS, classes))
    for number in range(classes):
        rest = np.where(np.arange(classes) == number, 0, census.class_shares)
        expected[number] = np.outer(1 - right, rest / rest.sum()) if rest.sum() else 0
        expected[number, :, number] = right if rest.sum() else 1
    return expected * census.area[..., None]


def _doubtful_name(census: MapCensus) -> str:
    """Return a name that no class has."""
    return DOUBTFUL if DOUBTFUL not in census.class_names else f'{DOUBTFUL} pixels'


def _find_threshold(census: MapCensus, doubtful_share: float) -> int:
    """Return the highest level below which common classes cover at most ``doubtful_share``."""
    common = census.class_shares > doubtful_share
    below = np.cumsum(census.area[common].sum(0)) / census.area.sum()
    # Level 0 holds all pixels of a map without confidence.
    if not census.pixels[:, 1:].any():
        return 0
    if doubtful_share <= 0 or not common.any():
        return 0
    threshold = int((below <= doubtful_share).sum())
    # Levels without pixels at the lower end make no stratum.
    return threshold if below[threshold - 1] > 0 else 0
