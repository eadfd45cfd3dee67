"""Estimators for a stratified random sample, whether or not the strata are the map's classes.

Every area and accuracy is a mean or a ratio of two means over the strata (Stehman 2014, "Estimating
area and map accuracy for stratified random sampling when the strata are different from the map
classes", Int. J. Remote Sensing 35). With the map's classes as strata, the results equal those in
Olofsson et al. 2014 (Remote Sensing of Environment 148). The intervals are in `intervals.py`.

Shapes:
    counts        (..., H, C): points of stratum h in cell c; leading axes are independent surveys
    y, x, g       (C,) value of a point of the cell, such as 1 if map and reference agree
    residual      (..., C) linearized value of a cell: the estimate has the variance of its mean
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional, Tuple

import numpy as np


@dataclass(frozen=True)
class Survey:
    """A stratified random sample: simple, without replacement, within each stratum.

    A cell is a group of points with equal values. In an error matrix it is a pair of map class and
    reference class. With values that differ from point to point, each point is a cell.

    Attributes:
        counts: Sampled points by stratum and cell, float64 ``(..., H, C)``.
        shares: Share of the mapped area that each stratum covers, float64 ``(H,)``; their sum is 1.
        sizes: Pixels of each stratum, float64 ``(H,)``, for the finite population correction;
            infinite for a sample with replacement.
        weights: Area of a pixel of each cell, or numbers in proportion to it, float64 ``(C,)``;
            None if all pixels have the same area. The mean of a stratum is then the ratio of two
            means (Cochran 1977, 6.2), of area times value and of area.
    """

    counts: np.ndarray
    shares: np.ndarray
    sizes: np.ndarray
    weights: Optional[np.ndarray] = None

    @property
    def points(self) -> np.ndarray:
        """Number of points in each stratum, float64 ``(..., H)``."""
        return self.counts.sum(-1)

    def stratum_means(self, values: np.ndarray) -> np.ndarray:
        """Return the mean of ``values`` (..., C) over the area of each stratum, ``(..., H)``."""
        return np.matmul(self.counts * self.relative_areas, values[..., None])[..., 0] / self.points

    @property
    def relative_areas(self) -> np.ndarray:
        """Area of a cell's pixel by the mean of the stratum's points, ``(..., H, C)`` or ``()``."""
        if self.weights is None:
            return np.ones(())
        return self.weights / ((self.counts * self.weights).sum(-1) / self.points)[..., None]

    def mean(self, values: np.ndarray) -> np.ndarray:
        """Return the estimated mean of ``values`` over the whole area, ``(...)``."""
        return self.stratum_means(values) @ self.shares

    def deviations(self, residual: np.ndarray) -> np.ndarray:
        """Return the squared deviations from the mean of their stratum, ``(..., H, C)``.

        Deviations are weighted by area, as those of a ratio are (Cochran 1977, 6.4).
        """
        return (self.relative_areas * self.centered(residual)) ** 2

    def centered(self, residual: np.ndarray) -> np.ndarray:
        """Return the residuals less the mean of their stratum, ``(..., H, C)``."""
        return residual[..., None, :] - self.stratum_means(residual)[..., None]

    def variance(self, residual: np.ndarray) -> np.ndarray:
        """Return the variance of an estimate with this residual, ``(...)``.

        ``sum_h W_h^2 (1 - n_h / N_h) s_h^2 / n_h``, with the sample variance ``s_h^2`` of the
        residual. A stratum needs two points.
        """
        points = self.points
        squares = (self.counts * self.deviations(residual)).sum(-1) / (points - 1)
        return (self.shares**2 * (1 - points / self.sizes) * squares / points).sum(-1)


@dataclass(frozen=True)
class Estimate:
    """An estimated mean or ratio.

    Attributes:
        value: The estimate ``(...)``; NaN if the denominator of a ratio is 0.
        variance: Estimated variance of ``value``, ``(...)``.
        residual: Linearized value of each cell, ``(..., C)``.
    """

    value: np.ndarray
    variance: np.ndarray
    residual: np.ndarray


def estimate_mean(survey: Survey, y: np.ndarray) -> Estimate:
    """Return the mean of ``y`` (C,) over the area: an area's share, or the overall accuracy."""
    return Estimate(survey.mean(y), survey.variance(y), y)


def estimate_ratio(survey: Survey, y: np.ndarray, x: np.ndarray) -> Estimate:
    """Return ``mean(y) / mean(x)``: a user's or a producer's accuracy (combined ratio estimator).

    The residual is ``(y - R x) / mean(x)``, which gives equation 28 of Stehman 2014.
    """
    return _ratio(survey, survey.mean(y), survey.mean(x), y, x)


def estimate_assisted_mean(
    survey: Survey, y: np.ndarray, g: np.ndarray, known: np.ndarray
) -> Estimate:
    """Return the mean of ``y`` with the help of a variable that is known at every pixel.

    This is the difference estimator with a tuned coefficient: ``sum_h W_h (mean_h(y) + b (G_h -
    mean_h(g)))``. It is unbiased whatever the model's probabilities are worth, up to the tuning of
    ``b``, and ``b`` is near 0 where they are worth nothing.

    Args:
        survey: The sample.
        y: Value from the reference labels ``(C,)``.
        g: Value from the model, such as the probability of a class, ``(C,)``.
        known: Mean of ``g`` over all pixels of each stratum, ``(H,)``.
    """
    value, residual = _assisted(survey, y, g, known)
    return Estimate(value, survey.variance(residual), residual)


def estimate_assisted_ratio(
    survey: Survey,
    y: np.ndarray,
    x: np.ndarray,
    g_y: np.ndarray,
    g_x: np.ndarray,
    known_y: np.ndarray,
    known_x: np.ndarray,
) -> Estimate:
    """Return ``mean(y) / mean(x)``, with both means as in :func:`estimate_assisted_mean`."""
    top, y = _assisted(survey, y, g_y, known_y)
    bottom, x = _assisted(survey, x, g_x, known_x)
    return _ratio(survey, top, bottom, y, x)


def _assisted(
    survey: Survey, y: np.ndarray, g: np.ndarray, known: np.ndarray
) -> Tuple[np.ndarray, np.ndarray]:
    """Return the assisted mean of ``y`` and its residual ``y - b g``."""
    spread_g, spread_both = survey.variance(g), _covariance(survey, y, g)
    # Between 0 and 1, as in PPI++ (Angelopoulos et al. 2023): a coefficient outside is noise.
    coefficient = np.clip(spread_both / spread_g, 0, 1) if spread_g > 0 else 0.0
    residual = y - coefficient * g
    return survey.mean(residual) + coefficient * (known @ survey.shares), residual


def _covariance(survey: Survey, y: np.ndarray, g: np.ndarray) -> np.ndarray:
    """Return the covariance of the estimated means of ``y`` and ``g``."""
    return (survey.variance(y + g) - survey.variance(y - g)) / 4


def _ratio(
    survey: Survey, top: np.ndarray, bottom: np.ndarray, y: np.ndarray, x: np.ndarray
) -> Estimate:
    with np.errstate(divide='ignore', invalid='ignore'):
        ratio = np.where(bottom > 0, top / bottom, np.nan)
        residual = (y - ratio[..., None] * x) / bottom[..., None]
    return Estimate(ratio, survey.variance(residual), residual)
