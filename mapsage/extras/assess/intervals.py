"""Confidence intervals of 95 %, and a judgment whether the sample can support one.

The textbook interval (estimate +- 1.96 standard errors) fails where few points carry the standard
error: a rare class whose omissions lie in a large stratum is found by 0 or 1 point, and then both
estimate and standard error are too small. No formula repairs that, so `find_interval` marks such
estimates and gives a cautious interval. docs/how-to/assess.md has the simulated coverage of both.

Shapes:
    span    (..., H) largest difference of the residual between two pixels of stratum h
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist
from typing import Tuple

import numpy as np

from .estimators import Estimate, Survey

Z = NormalDist().inv_cdf(0.975)
"""Quantile of the normal distribution for an interval of 95 %."""

FEWEST = 5
"""Points that must carry a standard error: fewer, and the normal approximation fails."""

LARGEST_MOVE = 0.5
"""Part of the half-width by which one more point of an unseen kind may move an estimate."""

# A stratum with fewer points of the rarer kind may hide more of them.
_RARELY_SEEN = 3
_TINY, _ROUNDING = 1e-300, 1e-12


@dataclass(frozen=True)
class Interval:
    """Interval of 95 % of an estimate; arrays have the shape of the estimate.

    Attributes:
        low: Lower end: Wilson's interval with the effective number of points, or where
            ``is_doubtful`` the cautious one.
        high: Upper end.
        is_doubtful: Whether the sample cannot support an interval, so that it is a cautious one.
        carried_by: Effective number of points that carry the standard error.
        move: Largest move of the estimate by one more point of a kind that a stratum rarely showed.
        moved_by: Index of this stratum.
        is_cut: Whether the estimate lies beyond the values that are possible. The interval is then
            that of the nearest possible one.
    """

    low: np.ndarray
    high: np.ndarray
    is_doubtful: np.ndarray
    carried_by: np.ndarray
    move: np.ndarray
    moved_by: np.ndarray
    is_cut: np.ndarray


def find_interval(
    survey: Survey, estimate: Estimate, span: np.ndarray, is_difference: bool = False
) -> Interval:
    """Return the interval of an estimate.

    Args:
        survey: The sample.
        estimate: Its estimate.
        span: Largest difference of the residual between two pixels of a stratum, ``(..., H)``.
        is_difference: Whether the estimate is a difference between -1 and 1, which gets a symmetric
            interval. If False it is a share between 0 and 1.
    """
    value, variance = estimate.value, estimate.variance
    # A stratum of which every pixel is labeled hides nothing.
    largest = np.where(survey.counts > 0, survey.relative_areas, 0).max(-1)
    lever = np.where(
        survey.points < survey.sizes, survey.shares * span * largest / survey.points, 0.0
    )
    carried_by = _carrying_points(survey, estimate.residual)
    seen = _rarer_points(survey, estimate.residual, span)
    moves = np.where(seen < _RARELY_SEEN, lever, 0.0)
    move = moves.max(-1)
    lowest = -1.0 if is_difference else 0.0
    # A sum of shares may exceed 1 in its last bits.
    is_cut = (value < lowest - _ROUNDING) | (value > 1 + _ROUNDING)
    share = np.clip(value, lowest, 1)
    # At an end, p (1 - p) knows no variance, and another variance contradicts it.
    at_end = ~np.asarray(is_difference) & ((share == 0) | (share == 1)) & (variance > _ROUNDING)
    # Without a lever the estimate is known, such as the accuracy of a class that no map can have.
    is_doubtful = (
        (lever.sum(-1) != 0)
        & ~((carried_by >= FEWEST) & (move <= LARGEST_MOVE * Z * np.sqrt(variance)))
        | is_cut
        | at_end
    )
    # Half a point of the rarer kind in each stratum, so that unseen kinds count in the variance.
    cautious = variance + 0.5 * (lever**2).sum(-1)
    used = np.where(is_doubtful, cautious, variance)
    if is_difference:
        half = Z * np.sqrt(used)
        low, high = np.maximum(share - half, -1), np.minimum(share + half, 1)
    else:
        # At a share of 0 or 1 the formula p (1 - p) / V knows no variance; the cautious interval
        # takes p one standard error away from it.
        inner = np.clip(share, np.minimum(np.sqrt(used), 0.5), 1 - np.minimum(np.sqrt(used), 0.5))
        spread = np.where(is_doubtful, inner * (1 - inner), share * (1 - share))
        low, high = wilson(share, np.where(used > 0, spread / np.maximum(used, _TINY), np.inf))
    return Interval(low, high, is_doubtful, carried_by, move, moves.argmax(-1), is_cut)


def wilson(share: np.ndarray, points: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Return Wilson's interval of a share that was estimated from a number of points.

    Example:
        >>> low, high = wilson(np.array([0.9]), np.array([100.]))
        >>> print(low.round(3), high.round(3))
        [0.826] [0.945]
    """
    # Without points the interval is 0 to 1.
    points = np.clip(points, np.finfo(float).eps, 1 / np.finfo(float).eps)
    center = (share + Z * Z / (2 * points)) / (1 + Z * Z / points)
    half = (
        Z * np.sqrt(share * (1 - share) / points + (Z / (2 * points)) ** 2) / (1 + Z * Z / points)
    )
    return np.maximum(center - half, 0), np.minimum(center + half, 1)


def hidden_share(stratum_share: float, points: float) -> float:
    """Return the share of the map that a stratum may hide of a kind that none of its points showed.

    ``W_h (1 - 0.025^(1 / n_h))``, the upper end of the exact binomial interval at 0 of n.
    """
    return stratum_share * (1 - 0.025 ** (1 / points))


def span_of_cells(residual: np.ndarray, occurs: np.ndarray) -> np.ndarray:
    """Return the span of each stratum from the residual of every cell.

    Args:
        residual: Residual of each pair of map class and reference class, ``(..., K, R)``.
        occurs: Whether a stratum has pixels of a map class, bool ``(H, K)``.

    Returns:
        Span ``(..., H)``.
    """
    by_class = residual[..., None, :, :]
    mask = occurs[:, :, None]
    high = np.where(mask, by_class, -np.inf).max((-2, -1))
    return high - np.where(mask, by_class, np.inf).min((-2, -1))


def _carrying_points(survey: Survey, residual: np.ndarray) -> np.ndarray:
    """Return ``(sum c)^2 / sum c^2`` over the points' contributions c to the variance."""
    weights = (survey.shares / survey.points) ** 2
    contributions = weights[..., None] * survey.deviations(residual)
    total = (survey.counts * contributions).sum((-2, -1))
    return total**2 / np.maximum((survey.counts * contributions**2).sum((-2, -1)), _TINY)


def _rarer_points(survey: Survey, residual: np.ndarray, span: np.ndarray) -> np.ndarray:
    """Return how many points of each stratum differ from its majority, ``(..., H)``."""
    squares = (survey.counts * survey.centered(residual) ** 2).sum(-1)
    return squares / np.maximum(span**2, _TINY)
