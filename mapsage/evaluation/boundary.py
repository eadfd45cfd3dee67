"""Boundary IoU: the IoU of what lies near the outlines of truth and prediction.

Cheng, Girshick, Dollár, Berg, Kirillov: Boundary IoU, CVPR 2021, https://arxiv.org/abs/2103.16562;
the conventions are those of its code, https://github.com/bowenc0221/boundary-iou-api
(``boundary_iou/utils/boundary_utils.py``): of a mask, the pixels that its erosion by a square of
2d + 1 pixels takes away, beyond the image lies no mask, and d is 2 % of the image's diagonal.
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
    """Return d in pixels, at least 1."""
    return max(1, int(round(dilation_ratio * math.hypot(height, width))))


def boundary_of(labels: torch.Tensor, distance: int) -> torch.Tensor:
    """Return where a label map is near an outline; all classes at once, in static shapes.

    Args:
        labels: ``(H, W)`` integers.
        distance: d in pixels.

    Returns:
        ``(H, W)`` bool: within d rows and columns lies another label, or the image's border.
    """
    padded = torch.nn.functional.pad(labels, [distance] * 4, value=_NOTHING)
    # A square of 2d + 1 pixels is of one label if its 2d x 2d squares of 2 x 2 pixels are.
    below, beside = padded[1:] == padded[:-1], padded[:, 1:] == padded[:, :-1]
    same = below[:, 1:] & below[:, :-1] & beside[1:]
    return ~_all_within(_all_within(same, 2 * distance, 0), 2 * distance, 1)


def _all_within(flags: torch.Tensor, window: int, dim: int) -> torch.Tensor:
    """Return for each start whether all of the next ``window`` flags hold, in log2 passes."""
    covered = 1
    while covered < window:
        step = min(covered, window - covered)
        length = flags.shape[dim] - step
        flags = flags.narrow(dim, 0, length) & flags.narrow(dim, step, length)
        covered += step
    return flags


def boundary_counts(prediction: torch.Tensor, truth: torch.Tensor, num_classes: int,
                    ignore_index: int = 255,
                    dilation_ratio: float = DILATION_RATIO) -> torch.Tensor:
    """Count the boundary pixels of an image; counts of images add up.

    Ignored pixels are not counted and are no class in the prediction either, so that a perfect
    prediction has the outlines of the truth.

    Args:
        prediction: ``(H, W)`` labels of 0..C-1.
        truth: ``(H, W)`` labels of 0..C-1 or ``ignore_index``, on the same device.
        num_classes: C.
        ignore_index: The label of ``truth`` that is not counted.
        dilation_ratio: d as a share of the image's diagonal.

    Returns:
        ``(3, C)`` int64 on that device: pixels in both boundaries, in the prediction's, in the
        truth's.

    Raises:
        ValueError: If the label maps are not of one shape ``(H, W)``.
    """
    if truth.dim() != 2 or prediction.shape != truth.shape:
        raise ValueError(f'the prediction has shape {tuple(prediction.shape)} and the truth '
                         f'{tuple(truth.shape)}, expected one (H, W)')
    distance = boundary_distance(truth.shape[0], truth.shape[1], dilation_ratio)
    ignored = truth == ignore_index
    inner = []
    for labels in (prediction, truth):
        known = labels.long().masked_fill(ignored, _NOTHING)
        # one class more: not in the boundary
        inner.append(known.masked_fill(~boundary_of(known, distance) | ignored, num_classes))
    matrix = count_pixels(inner[0], inner[1], num_classes + 1, _NOTHING).matrix
    return torch.stack([matrix.diagonal(), matrix.sum(0), matrix.sum(1)])[:, :num_classes]


def boundary_iou(counts: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
    """Return ``(C,)`` float64 IoUs of ``(3, C)`` :func:`boundary_counts`; NaN without a union."""
    both, predicted, truth = np.asarray(counts, np.float64)
    with np.errstate(invalid='ignore'):
        return both / (predicted + truth - both)
