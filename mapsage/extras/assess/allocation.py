"""How many points a survey needs, and how they are divided among the strata.

Formulas of Cochran 1977 (Sampling Techniques, 5.25 and 5.26) and of Olofsson et al. 2014
(section 5.1).

Shapes:
    shares, deviations    (H,) share of the area of a stratum, and the standard deviation in it of
                          the quantity that the survey is for
"""

from __future__ import annotations

from typing import Sequence

import numpy as np

from .errors import AssessError
from .intervals import Z

ALLOCATIONS = 'balanced', 'proportional', 'neyman'

# A variance needs two points in every stratum.
_FEWEST = 2
# Points beyond which a half-width is refused: nobody labels more.
_MOST = 1000000


def allocate(
    kind: str,
    points: int,
    shares: np.ndarray,
    deviations: np.ndarray,
    minimum: int = _FEWEST,
    sizes: Sequence[float] = (),
) -> np.ndarray:
    """Return the number of points of each stratum, int64 ``(H,)``; the sum is ``points``.

    Args:
        kind: ``'proportional'`` to the area, ``'neyman'`` (area times standard deviation, which has
            the smallest variance) or ``'balanced'``: ``minimum`` for each stratum whose
            proportional number is smaller, the rest proportional (Olofsson's compromise).
        points: Number of points in all.
        shares: Share of each stratum.
        deviations: Expected standard deviation in each stratum.
        minimum: Fewest points in a stratum.
        sizes: Pixels of each stratum, which no allocation exceeds; empty for no limit.

    Raises:
        AssessError: If there are too few points for the strata.
    """
    strata = len(shares)
    fewest = min(minimum, points // strata) if kind == 'balanced' else _FEWEST
    if points < _FEWEST * strata:
        raise AssessError(
            f'{points} points for {strata} strata, expected {_FEWEST * strata} or '
            'more: a standard error needs two points in every stratum.'
        )
    weights = shares * (deviations if kind == 'neyman' and deviations.any() else 1.0)
    ceiling = np.asarray(sizes, float) if len(sizes) else np.full(strata, np.inf)
    if ceiling.sum() < points:
        raise AssessError(
            f'{points} points, and the map has {ceiling.sum():.0f} pixels; ask for fewer points.'
        )
    return _round(_fill(points, weights, np.minimum(fewest, ceiling), ceiling), points, ceiling)


def expected_error(shares: np.ndarray, deviations: np.ndarray, points: np.ndarray) -> float:
    """Return the expected standard error ``sqrt(sum W_h^2 S_h^2 / n_h)``."""
    return float(np.sqrt((shares**2 * deviations**2 / points).sum()))


def required_points(
    kind: str, half_width: float, shares: np.ndarray, deviations: np.ndarray, minimum: int = _FEWEST
) -> int:
    """Return the fewest points with which 1.96 expected standard errors reach ``half_width``.

    With ``'neyman'`` this is equation 13 of Olofsson et al. 2014, ``(sum W_h S_h)^2 / S^2``.

    Raises:
        AssessError: If more than a million points would be needed.
    """
    strata = len(shares)

    def reaches(points: int) -> bool:
        weights = shares * (deviations if kind == 'neyman' and deviations.any() else 1.0)
        fewest = min(minimum, points // strata) if kind == 'balanced' else _FEWEST
        real = _fill(points, weights, np.full(strata, float(fewest)), np.full(strata, np.inf))
        return Z * expected_error(shares, deviations, real) <= half_width

    low, high = _FEWEST * strata, _MOST
    if not reaches(high):
        raise AssessError(
            f'a half-width of {half_width:g} needs more than {_MOST} points; ask for a larger one.'
        )
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle + 1, high)
    return low


def _fill(points: int, weights: np.ndarray, fewest: np.ndarray, ceiling: np.ndarray) -> np.ndarray:
    """Return real numbers in proportion to the weights, within limits, with the sum ``points``."""
    low, high = 0.0, float(points) / max(weights[weights > 0].min(), 1e-12) * 2
    # The sum grows with the factor, so bisection finds it.
    for _ in range(200):
        factor = (low + high) / 2
        if np.clip(factor * weights, fewest, ceiling).sum() < points:
            low = factor
        else:
            high = factor
    return np.clip(high * weights, fewest, ceiling)


def _round(real: np.ndarray, points: int, ceiling: np.ndarray) -> np.ndarray:
    """Round to integers with the sum ``points``: the largest fractions are rounded up."""
    whole = np.floor(real + 1e-9).astype(np.int64)
    order = np.argsort(-(real - whole), kind='stable')
    for index in order:
        if whole.sum() >= points:
            break
        whole[index] += whole[index] < ceiling[index]
    return whole
