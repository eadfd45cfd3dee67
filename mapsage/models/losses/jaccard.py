"""The soft Jaccard index of the whole batch of all ranks, and of the band along true contours.

For an IoU reward the policy gradient of a per-pixel softmax is the gradient of this loss, without
the noise of samples: the counts of a batch concentrate at their expectations.
"""
from __future__ import annotations

import math
from typing import Any, Optional, Sequence

import torch
from mmengine.registry import MODELS
from torch import nn

from .inputs import checked_weights, prepare


@MODELS.register_module()
class JaccardLoss(nn.Module):
    """1 - R, R = (1 - band_weight) mIoU + band_weight mIoU on the band, of expected counts.

    With the probabilities p of the softmax and the labels t, a class has the intersection sum(p t)
    and the union sum(p + t - p t) over the valid pixels of the *global batch*, and counts if that
    holds a pixel of it. So a class that an image lacks costs nothing there, and rare classes have
    the largest gradient a pixel. The band consists of the valid pixels that have a valid pixel of
    another true class within d rows and columns, and has counts and classes of its own.

    The sums over all ranks come from the wrapper (``counts_predictions`` in
    mapsage/wrappers/batch_counts.py says how and at what cost); the mean gradient of the ranks
    is that of one process with the whole batch, whatever each of them holds. With
    ``accumulative_counts`` each iteration has an index of its own, and gradients are their mean.

    It moves probabilities toward 0 and 1: keep a share of cross-entropy and report the calibration
    (docs/metric-stage.md).

    Args:
        band_weight: Share of the band in R, 0 to 1.
        dilation_ratio: Distance d as a share of the label map's diagonal, at least one pixel; 0.02
            in Boundary IoU (https://arxiv.org/abs/2103.16562), whose band also has the outlines of
            the prediction, which no counts can express.
        class_weight: Weight of each class in the means, ``(C,)``; None for equal ones.
        loss_weight: Factor of the loss.
        ignore_index: Label of pixels that do not count; the same as that of the decode head.
        loss_name: Name in the log; it is part of the loss if it begins with ``loss_``.

    Raises:
        ValueError: If an argument is out of its range.
    """

    counts_predictions = True

    def __init__(self, band_weight: float = 0.0, dilation_ratio: float = 0.02,
                 class_weight: Optional[Sequence[float]] = None, loss_weight: float = 1.0,
                 ignore_index: int = 255, loss_name: str = 'loss_jaccard') -> None:
        super().__init__()
        if not 0 <= band_weight <= 1 or not 0 < dilation_ratio < 1:
            raise ValueError(f'band_weight={band_weight}, dilation_ratio={dilation_ratio}: expected'
                             ' a share from 0 to 1, and a share of the diagonal such as 0.02')
        self.band_weight, self.dilation_ratio = band_weight, dilation_ratio
        self.class_weight = checked_weights(class_weight)
        self.loss_weight, self.ignore_index = loss_weight, ignore_index
        self.loss_name = loss_name

    @staticmethod
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        """Return a count summed over all ranks; the wrapper puts its own function here."""
        return count.detach()

    def forward(self, logits: torch.Tensor, labels: torch.Tensor,
                weight: Optional[torch.Tensor] = None, ignore_index: int = 255,
                **_: Any) -> torch.Tensor:
        """Return the loss of the global batch, a scalar, the same on all ranks.

        Args:
            logits: Float ``(N, C, H, W)``; of one channel, those of class 1 against class 0.
            labels: Class indices or ``ignore_index``, integers ``(N, H, W)``.
            weight: None; weights of pixels, as from a sampler, are refused.
            ignore_index: That of the decode head.

        Raises:
            ValueError: If there is a ``weight``, the values of ``ignore_index`` differ, or there
                are not as many class weights as classes.
        """
        logits, truth, valid, weights = prepare(self, logits, labels, weight, ignore_index)
        places, shares = [valid], [1 - self.band_weight]
        if self.band_weight:
            distance = max(1, round(self.dilation_ratio * math.hypot(*labels.shape[-2:])))
            places.append(valid * contour_band(labels, distance, self.ignore_index)[:, None])
            shares.append(self.band_weight)
        probabilities = logits.softmax(1)
        # (places, 3, C): intersection, union and truth.
        mine = torch.stack([_counts(probabilities * place, truth * place) for place in places])
        sums, ranks = self.sum_over_ranks(
            torch.cat([mine.detach().reshape(-1), mine.new_ones(1)])).split([mine.numel(), 1])
        # The value is that of all ranks. The gradient is this rank's, times the number of ranks,
        # since theirs are averaged.
        counts = sums.view_as(mine) + ranks * (mine - mine.detach())
        losses = torch.stack([share * _one_minus_mean(each, weights)
                              for share, each in zip(shares, counts)])
        return self.loss_weight * losses.sum()


def _counts(probabilities: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return intersection, union and number of true pixels of each class, ``(3, C)``."""
    def total(each: torch.Tensor) -> torch.Tensor:
        return each.flatten(2).sum(2).sum(0)

    both, held = total(probabilities * truth), total(truth)
    return torch.stack([both, total(probabilities) + held - both, held])


def _one_minus_mean(counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return 1 - the weighted mean index over the classes present; 0 if there is none."""
    both, union, held = counts
    present = (held > 0).to(counts.dtype) * weights
    index = both / torch.where(held > 0, union, torch.ones_like(union))
    total = present.sum()
    return ((1 - index) * present).sum() / torch.where(total > 0, total, torch.ones_like(total))


def contour_band(labels: torch.Tensor, distance: int, ignore_index: int = 255) -> torch.Tensor:
    """Return where a valid pixel has a valid pixel of another class nearby.

    Image borders and borders of ignored areas are no contours.

    Args:
        labels: Class indices or ``ignore_index``, integers ``(N, H, W)``.
        distance: Number of rows and columns that count as nearby.
        ignore_index: Label of pixels that are not valid.

    Returns:
        Bool ``(N, H, W)``.
    """
    valid = labels != ignore_index
    values = labels.float()
    # Larger than any class, so that a place without a valid pixel nearby has no extreme of its own.
    outside = torch.full_like(values, float(2**16))
    highest = _widest(torch.where(valid, values, -outside), distance)
    lowest = -_widest(-torch.where(valid, values, outside), distance)
    return valid & ((highest != values) | (lowest != values))


def _widest(values: torch.Tensor, distance: int) -> torch.Tensor:
    """Return the largest value within ``distance`` rows and columns, ``(N, H, W)``."""
    size = 2 * distance + 1
    pool = torch.nn.functional.max_pool2d
    rows = pool(values[:, None], (size, 1), stride=1, padding=(distance, 0))
    return pool(rows, (1, size), stride=1, padding=(0, distance))[:, 0]
