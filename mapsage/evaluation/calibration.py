"""How far probabilities are from being shares of right pixels, counted in integers.

Expected calibration error: Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks,
ICML 2017, https://arxiv.org/abs/1706.04599, equation 3. Pixels are sorted into M equal bins by the
probability of their predicted class, (0, 1/M], (1/M, 2/M], ..., and ECE is the mean over all pixels
of |share of right pixels - mean probability| of their bin.
"""
from __future__ import annotations

from typing import Any

import numpy as np
import torch

from .confusion_matrix import describe_outside

BINS = 15
# A probability is counted in this unit, so that sums are the same in any order: float32 has 24
# bits. An int64 has room for the probabilities of 5e11 pixels.
UNIT = 2.0**-24


def count_confidence(confidence: torch.Tensor, prediction: torch.Tensor, truth: torch.Tensor,
                     num_classes: int, ignore_index: int = 255, bins: int = BINS) -> torch.Tensor:
    """Count the pixels of an image by predicted class and confidence, on the host.

    The counts of images can be summed.

    Args:
        confidence: Probability of the predicted class, float ``(H, W)``.
        prediction: Labels 0..C-1, ``(H, W)``.
        truth: Labels 0..C-1 or ``ignore_index``, ``(H, W)``.
        num_classes: Number of classes, C.
        ignore_index: Label of ``truth`` that is not counted.
        bins: Number of bins, M.

    Returns:
        Pixels, right pixels, and sum of the probabilities in units of ``UNIT``, int64
        ``(3, C, M)``.

    Raises:
        ValueError: If the shapes differ, a label is not a class, or a probability is not a number
            of 0..1.
    """
    if not prediction.shape == truth.shape == confidence.shape:
        raise ValueError(f'the confidence has shape {tuple(confidence.shape)}, the prediction '
                         f'{tuple(prediction.shape)} and the truth {tuple(truth.shape)}, expected '
                         'equal ones; load annotations after Resize')
    labels = truth.cpu().reshape(-1).long()
    known = labels != ignore_index
    labels = labels[known]
    predicted = prediction.cpu().reshape(-1)[known].long()
    values = confidence.cpu().reshape(-1)[known].double()
    outside = [int(((each < 0) | (each >= num_classes)).sum()) for each in (labels, predicted)]
    if any(outside):
        raise ValueError(describe_outside(outside, num_classes, ignore_index))
    if not bool(((values >= 0) & (values <= 1)).all()):
        wrong = values[~((values >= 0) & (values <= 1))][0].item()
        raise ValueError(f'a pixel has the probability {wrong}, expected 0 to 1')
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    places = predicted * bins + torch.bucketize(values, edges[1:-1])
    sums = torch.zeros(num_classes * bins, dtype=torch.int64)
    sums.scatter_add_(0, places, (values / UNIT).round().long())
    counts = [torch.bincount(each, minlength=num_classes * bins)
              for each in (places, places[predicted == labels])]
    return torch.stack([*counts, sums]).reshape(3, num_classes, bins)


def calibration_error(counts: Any) -> np.ndarray:
    """Return the expected calibration error (0..1) of counts ``(3, ..., M)``, float64 ``(...)``.

    For ``counts.sum(1)`` it is the error of all pixels, for ``counts`` that of each predicted
    class. It is NaN without pixels.
    """
    pixels, right, sums = np.asarray(counts, np.float64)
    with np.errstate(invalid='ignore'):
        return np.abs(right - sums * UNIT).sum(-1) / pixels.sum(-1)


def reliability(counts: Any) -> np.ndarray:
    """Return the mean probability and the share of right pixels for counts ``(3, ...)``.

    Returns:
        Both, 0..1, float64 ``(2, ...)``; NaN where there are no pixels.
    """
    pixels, right, sums = np.asarray(counts, np.float64)
    with np.errstate(invalid='ignore'):
        return np.stack([sums * UNIT / pixels, right / pixels])
