"""The soft Jaccard (IoU) loss of the global batch, optionally with a band along true contours.

For an IoU reward, the policy gradient of a per-pixel softmax is the gradient of this loss, but
without sampling noise, because the counts of a whole batch concentrate at their expectations.

Shapes: N images, C classes, H x W pixels; M is 1 for all valid pixels, or 2 with the contour band.
"""

from __future__ import annotations

import math
from typing import Any, Optional, Sequence

import torch
from mmengine.registry import MODELS
from torch import nn

from .inputs import check_class_weight, prepare_inputs


@MODELS.register_module()
class JaccardLoss(nn.Module):
    """Jaccard loss: 1 - ((1 - band_weight) mIoU + band_weight mIoU on the band), of soft counts.

    With softmax probabilities p and one-hot labels t, a class has the intersection sum(p t) and the
    union sum(p + t - p t) over the valid pixels of the *global batch*. The mean includes the
    classes that the batch's labels contain. So a class that an image lacks costs nothing in that
    image, and rare classes have the largest gradient per pixel. The band consists of the valid
    pixels with a valid pixel of another true class within d rows and columns; its mIoU is computed
    from the band's pixels only.

    The wrapper sums the counts over all ranks (``counts_predictions`` in
    mapsage/distributed/wrappers/batch_counts.py explains how and at what cost). The averaged gradient of the
    ranks therefore equals the gradient of one process with the whole batch, however it is split.
    With ``accumulative_counts``, every iteration computes a separate index, and the gradients are
    averaged.

    The loss pushes probabilities toward 0 and 1: keep a share of cross-entropy, and report the
    calibration (docs/how-to/metric-stage.md).

    Args:
        band_weight: Share of the band, 0 to 1.
        dilation_ratio: Distance d as a share of the label map's diagonal, at least one pixel.
            Boundary IoU (https://arxiv.org/abs/2103.16562) uses 0.02; its band also follows the
            contours of the prediction, which soft counts cannot express.
        class_weight: Weight of each class in the means, ``(C,)``; None for equal weights.
        loss_weight: Factor of the loss.
        ignore_index: Label of ignored pixels; must equal the decode head's ``ignore_index``.
        loss_name: Name in the log; the value is added to the total loss if it begins with
            ``loss_``.

    Raises:
        ValueError: If an argument is out of its range.
    """

    counts_predictions = True

    def __init__(
        self,
        band_weight: float = 0.0,
        dilation_ratio: float = 0.02,
        class_weight: Optional[Sequence[float]] = None,
        loss_weight: float = 1.0,
        ignore_index: int = 255,
        loss_name: str = 'loss_jaccard',
    ) -> None:
        super().__init__()
        if not 0 <= band_weight <= 1 or not 0 < dilation_ratio < 1:
            raise ValueError(
                f'band_weight={band_weight}, dilation_ratio={dilation_ratio}: expected'
                ' a share from 0 to 1, and a share of the diagonal such as 0.02'
            )
        self.band_weight, self.dilation_ratio = band_weight, dilation_ratio
        self.class_weight = check_class_weight(class_weight)
        self.loss_weight, self.ignore_index = loss_weight, ignore_index
        self.loss_name = loss_name

    @staticmethod
    def sum_over_ranks(count: torch.Tensor) -> torch.Tensor:
        """Return a count summed over all ranks; the wrapper replaces this function."""
        return count.detach()

    def forward(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weight: Optional[torch.Tensor] = None,
        ignore_index: int = 255,
        **_: Any,
    ) -> torch.Tensor:
        """Return the loss of the global batch, a scalar with the same value on all ranks.

        Args:
            logits: Float ``(N, C, H, W)``, or ``(N, 1, H, W)`` for two classes.
            labels: Class indices or ``ignore_index``, integers ``(N, H, W)``.
            weight: Pixel weights of a sampler; must be None.
            ignore_index: ``ignore_index`` of the decode head.

        Raises:
            ValueError: If ``weight`` is not None, the values of ``ignore_index`` differ, or the
                numbers of class weights and classes differ.
        """
        logits, truth, valid, weights = prepare_inputs(self, logits, labels, weight, ignore_index)
        masks, shares = [valid], [1 - self.band_weight]
        if self.band_weight:
            distance = max(1, round(self.dilation_ratio * math.hypot(*labels.shape[-2:])))
            masks.append(valid * contour_band(labels, distance, self.ignore_index)[:, None])
            shares.append(self.band_weight)
        probabilities = logits.softmax(1)
        # (M, 3, C): intersection, union and number of true pixels.
        local = torch.stack([_count_overlap(probabilities * mask, truth * mask) for mask in masks])
        sums, ranks = self.sum_over_ranks(
            torch.cat([local.detach().reshape(-1), local.new_ones(1)])
        ).split([local.numel(), 1])
        # The value is the sum over all ranks, but only the local counts have a gradient. It is
        # multiplied by the number of ranks, because DDP averages the ranks' gradients and the
        # global counts need their sum.
        counts = sums.view_as(local) + ranks * (local - local.detach())
        losses = torch.stack(
            [
                share * _jaccard_distance(mask_counts, weights)
                for share, mask_counts in zip(shares, counts)
            ]
        )
        return self.loss_weight * losses.sum()


def _count_overlap(probabilities: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Return intersection, union and number of true pixels of each class, ``(3, C)``."""

    def sum_pixels(values: torch.Tensor) -> torch.Tensor:
        return values.flatten(2).sum(2).sum(0)

    intersection, labeled = sum_pixels(probabilities * truth), sum_pixels(truth)
    return torch.stack([intersection, sum_pixels(probabilities) + labeled - intersection, labeled])


def _jaccard_distance(counts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return 1 - the weighted mean IoU over the classes with true pixels; 0 without any."""
    intersection, union, labeled = counts
    present = (labeled > 0).to(counts.dtype) * weights
    index = intersection / torch.where(labeled > 0, union, torch.ones_like(union))
    total = present.sum()
    return ((1 - index) * present).sum() / torch.where(total > 0, total, torch.ones_like(total))


def contour_band(labels: torch.Tensor, distance: int, ignore_index: int = 255) -> torch.Tensor:
    """Return the valid pixels with a valid pixel of another class nearby.

    The borders of the image and of ignored areas are not contours.

    Args:
        labels: Class indices or ``ignore_index``, integers ``(N, H, W)``.
        distance: Number of rows and columns that count as nearby.
        ignore_index: Label of ignored pixels.

    Returns:
        Bool ``(N, H, W)``.
    """
    valid = labels != ignore_index
    values = labels.float()
    # Larger than any class, so ignored pixels never become the highest or lowest class nearby.
    outside = torch.full_like(values, float(2**16))
    highest = _max_nearby(torch.where(valid, values, -outside), distance)
    lowest = -_max_nearby(-torch.where(valid, values, outside), distance)
    return valid & ((highest != values) | (lowest != values))


def _max_nearby(values: torch.Tensor, distance: int) -> torch.Tensor:
    """Return the largest value within ``distance`` rows and columns, ``(N, H, W)``."""
    size = 2 * distance + 1
    pool = torch.nn.functional.max_pool2d
    rows = pool(values[:, None], (size, 1), stride=1, padding=(distance, 0))
    return pool(rows, (1, size), stride=1, padding=(0, distance))[:, 0]
