"""Boundary IoU: the IoU of the pixels near the outlines of truth and prediction.

Cheng, Girshick, Dollár, Berg, Kirillov: Boundary IoU, CVPR 2021, https://arxiv.org/abs/2103.16562,
with the conventions of the authors' code, https://github.com/bowenc0221/boundary-iou-api
(``boundary_iou/utils/boundary_utils.py``). The boundary of a mask consists of the pixels that an
erosion by a square of 2d + 1 pixels removes. Pixels outside the image belong to no mask, and d is
2 % of the image's diagonal.

Shapes:
    prediction, truth  (H, W)  class indices; the truth may contain ignore_index
    counts             (3, C)  boundary pixels: of both, of the prediction, of the truth
"""

from __future__ import annotations

import math
from typing import Union

import numpy as np
import torch

from .confusion_matrix import count_pixels

DILATION_RATIO = 0.02
_NOTHING = -1


def boundary_distance(height: int, width: int, dilation_ratio: float = DILATION_RATIO) -> int:
    """Return the distance d in pixels, at least 1, for an image of ``height`` x ``width``."""
    return max(1, int(round(dilation_ratio * math.hypot(height, width))))


def boundary_of(labels: torch.Tensor, distance: int) -> torch.Tensor:
    """Return the pixels of a label map that are near an outline, for all classes at once.

    All shapes are static, so a lazy device compiles the function once per image size.

    Args:
        labels: Label map, integers ``(H, W)``.
        distance: Distance d in pixels.

    Returns:
        Whether another label or the image's border lies within d rows and columns, bool ``(H, W)``.
    """
    padded = torch.nn.functional.pad(labels, [distance] * 4, value=_NOTHING)
    # A square of 2d + 1 pixels has a single label if all its 2d x 2d squares of 2 x 2 pixels have.
    vertical, horizontal = padded[1:] == padded[:-1], padded[:, 1:] == padded[:, :-1]
    same = vertical[:, 1:] & vertical[:, :-1] & horizontal[1:]
    return ~_all_within(_all_within(same, 2 * distance, 0), 2 * distance, 1)


def _all_within(flags: torch.Tensor, window: int, dim: int) -> torch.Tensor:
    """Return for every position whether the next ``window`` flags along ``dim`` are all set."""
    # After each pass a flag covers up to twice as many positions: log2(window) passes.
    covered = 1
    while covered < window:
        step = min(covered, window - covered)
        length = flags.shape[dim] - step
        flags = flags.narrow(dim, 0, length) & flags.narrow(dim, step, length)
        covered += step
    return flags


def boundary_counts(
    prediction: torch.Tensor,
    truth: torch.Tensor,
    num_classes: int,
    ignore_index: int = 255,
    dilation_ratio: float = DILATION_RATIO,
) -> torch.Tensor:
    """Count the boundary pixels of an image. The counts of images can be summed.

    Ignored pixels are not counted. They are ignored in the prediction too, so that a perfect
    prediction has the same outlines as the truth.

    Args:
        prediction: Labels 0..C-1, ``(H, W)``.
        truth: Labels 0..C-1 or ``ignore_index``, ``(H, W)``, on the same device.
        num_classes: Number of classes, C.
        ignore_index: Label of ``truth`` that is not counted.
        dilation_ratio: Distance d as a share of the image's diagonal.

    Returns:
        Pixels in both boundaries, in the prediction's, and in the truth's, int64 ``(3, C)``, on
        the same device.

    Raises:
        ValueError: If the label maps do not have the same shape ``(H, W)``.
    """
    if truth.dim() != 2 or prediction.shape != truth.shape:
        raise ValueError(
            f'the prediction has shape {tuple(prediction.shape)} and the truth '
            f'{tuple(truth.shape)}, expected one (H, W)'
        )
    distance = boundary_distance(truth.shape[0], truth.shape[1], dilation_ratio)
    ignored = truth == ignore_index
    boundaries = []
    for labels in (prediction, truth):
        labels = labels.long().masked_fill(ignored, _NOTHING)
        # Class C collects the pixels outside of the boundary, and is cut off at the end.
        boundaries.append(labels.masked_fill(~boundary_of(labels, distance) | ignored, num_classes))
    matrix = count_pixels(boundaries[0], boundaries[1], num_classes + 1, _NOTHING).matrix
    return torch.stack([matrix.diagonal(), matrix.sum(0), matrix.sum(1)])[:, :num_classes]


def boundary_iou(counts: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
    """Return the boundary IoUs, float64 ``(C,)``, of counts ``(3, C)``; NaN without a union.

    Example:
        >>> boundary_iou(np.array([[30, 0], [40, 5], [50, 0]]))    # in both, predicted, true
        array([0.5, 0. ])
    """
    both, predicted, truth = np.asarray(counts, np.float64)
    with np.errstate(invalid='ignore'):
        return both / (predicted + truth - both)
