"""The centerline Dice loss (clDice) of the global batch: roads, rivers and hedges in one piece.

A gap of one pixel across a road hardly changes a cross-entropy or an IoU, but it removes the
centerline there. Shit et al. 2021, "clDice - a novel topology-preserving loss function for tubular
structure segmentation", CVPR (https://arxiv.org/abs/2003.07311).

Shapes: N images, C classes, H x W pixels.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence

import torch
from mmengine.registry import MODELS
from torch import nn

from .inputs import prepare_inputs

_pool = torch.nn.functional.max_pool2d


@MODELS.register_module()
class CenterlineDiceLoss(nn.Module):
    """Centerline Dice loss: 1 - the mean over classes of 2 P S / (P + S).

    The precision P is the share of the predicted centerline on true pixels, and the sensitivity S
    is the share of the true centerline on predicted pixels. Centerlines are soft: what repeated
    erosion of the probabilities leaves. Use it beside cross-entropy or ``JaccardLoss``, for classes
    that are lines: it says little about widths.

    The four sums are those of the *global batch*, as in ``JaccardLoss``, so the gradient does not
    depend on how the batch is split over ranks. A class without a true pixel does not count.

    Args:
        classes: Classes that are lines; None for all.
        iterations: Erosions; at least half the width in pixels of the widest line.
        smooth: Pixels added to both parts of P and S, as in the paper.
        loss_weight: Factor of the loss.
        ignore_index: Label of ignored pixels; must equal the decode head's ``ignore_index``.
        loss_name: Name in the log; the value is added to the total loss if it begins with
            ``loss_``.

    Raises:
        ValueError: If ``iterations`` or ``smooth`` is out of its range.
    """

    counts_predictions = True
    # All classes have the same weight; `prepare_inputs` reads it.
    class_weight: Optional[List[float]] = None

    def __init__(
        self,
        classes: Optional[Sequence[int]] = None,
        iterations: int = 10,
        smooth: float = 1.0,
        loss_weight: float = 1.0,
        ignore_index: int = 255,
        loss_name: str = 'loss_centerline',
    ) -> None:
        super().__init__()
        if iterations < 1 or smooth <= 0:
            raise ValueError(
                f'iterations={iterations}, smooth={smooth}: expected at least one '
                'erosion, and a number of pixels above 0'
            )
        self.classes = None if classes is None else list(classes)
        self.iterations, self.smooth = iterations, smooth
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
            ValueError: If ``weight`` is not None, the values of ``ignore_index`` differ, or a class
                does not exist.
        """
        logits, truth, valid = prepare_inputs(self, logits, labels, weight, ignore_index)[:3]
        classes = list(range(logits.shape[1])) if self.classes is None else self.classes
        if not set(classes) <= set(range(logits.shape[1])):
            raise ValueError(
                f'CenterlineDiceLoss has classes={classes} and the logits '
                f'{logits.shape[1]} classes; expected indices below that'
            )
        predicted = logits.softmax(1)[:, classes] * valid
        truth = truth[:, classes]
        predicted_line = soft_centerline(predicted, self.iterations)
        true_line = soft_centerline(truth, self.iterations)
        # (4, C)
        local = torch.stack(
            [
                _sum_pixels(predicted_line * truth),
                _sum_pixels(predicted_line),
                _sum_pixels(true_line * predicted),
                _sum_pixels(true_line),
            ]
        )
        sums, ranks = self.sum_over_ranks(
            torch.cat([local.detach().reshape(-1), local.new_ones(1)])
        ).split([local.numel(), 1])
        # The value is the sum over all ranks, but only the local counts have a gradient. It is
        # multiplied by the number of ranks, because DDP averages the ranks' gradients.
        on_truth, predicted_length, on_predicted, true_length = sums.view_as(local) + ranks * (
            local - local.detach()
        )
        precision = (on_truth + self.smooth) / (predicted_length + self.smooth)
        sensitivity = (on_predicted + self.smooth) / (true_length + self.smooth)
        index = 2 * precision * sensitivity / (precision + sensitivity)
        present = (true_length > 0).to(index.dtype)
        return self.loss_weight * ((1 - index) * present).sum() / present.sum().clamp(min=1)


def soft_centerline(mask: torch.Tensor, iterations: int) -> torch.Tensor:
    """Return the soft skeleton of probabilities or a mask, ``(N, C, H, W)`` in 0..1.

    Algorithm 1 of the paper: erosion takes the smallest of a pixel and its four neighbors, dilation
    the largest of its 3 x 3 neighbors, and what an opening removes belongs to the skeleton.
    """
    skeleton = torch.relu(mask - _open(mask))
    for _ in range(iterations):
        mask = _erode(mask)
        thinner = torch.relu(mask - _open(mask))
        skeleton = skeleton + torch.relu(thinner - skeleton * thinner)
    return skeleton


def _sum_pixels(values: torch.Tensor) -> torch.Tensor:
    """Return the sum over images and pixels of each class, ``(C,)``."""
    return values.flatten(2).sum(2).sum(0)


def _open(mask: torch.Tensor) -> torch.Tensor:
    return _pool(_erode(mask), 3, stride=1, padding=1)


def _erode(mask: torch.Tensor) -> torch.Tensor:
    columns = -_pool(-mask, (3, 1), stride=1, padding=(1, 0))
    rows = -_pool(-mask, (1, 3), stride=1, padding=(0, 1))
    return torch.min(columns, rows)
