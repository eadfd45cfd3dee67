"""Expected calibration error (ECE): does a probability of 0.8 mean 80 % correct pixels?

Guo, Pleiss, Sun, Weinberger: On Calibration of Modern Neural Networks, ICML 2017,
https://arxiv.org/abs/1706.04599, equation 3. Pixels are sorted into M equal bins by the
probability of their predicted class, (0, 1/M], (1/M, 2/M], ... ECE is the mean over all pixels of
|share of correct pixels - mean probability| of their bin. Probabilities are summed as integers, so
the result does not depend on the order of images or ranks.

Shapes:
    confidence, prediction, truth  (H, W)     of one image
    counts                         (3, C, M)  pixels, correct pixels, sum of probabilities in UNIT
"""

from __future__ import annotations

from typing import Union

import numpy as np
import torch

from .confusion_matrix import describe_outside

BINS = 15
# A probability is counted in this unit, the resolution of float32 (24 bits), so that sums are the
# same in any order. An int64 can sum the probabilities of 5e11 pixels.
UNIT = 2.0**-24


def count_confidence(
    confidence: torch.Tensor,
    prediction: torch.Tensor,
    truth: torch.Tensor,
    num_classes: int,
    ignore_index: int = 255,
    bins: int = BINS,
) -> torch.Tensor:
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
        Pixels, correct pixels, and sum of the probabilities in units of ``UNIT``, int64
        ``(3, C, M)``.

    Raises:
        ValueError: If the shapes differ, a label is not a class, or a probability is not in 0..1.
    """
    if not prediction.shape == truth.shape == confidence.shape:
        raise ValueError(
            f'the confidence has shape {tuple(confidence.shape)}, the prediction '
            f'{tuple(prediction.shape)} and the truth {tuple(truth.shape)}, expected '
            'equal shapes; load annotations after Resize'
        )
    labels = truth.cpu().reshape(-1).long()
    labeled = labels != ignore_index
    labels = labels[labeled]
    predicted = prediction.cpu().reshape(-1)[labeled].long()
    values = confidence.cpu().reshape(-1)[labeled].double()
    outside = [
        int(((classes < 0) | (classes >= num_classes)).sum()) for classes in (labels, predicted)
    ]
    if any(outside):
        raise ValueError(describe_outside(outside, num_classes, ignore_index))
    # Written with "not", so that NaN counts as out of range.
    if not bool(((values >= 0) & (values <= 1)).all()):
        wrong = values[~((values >= 0) & (values <= 1))][0].item()
        raise ValueError(f'a pixel has the probability {wrong}, expected 0 to 1')
    edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)
    # Flat index of (predicted class, bin).
    cells = predicted * bins + torch.bucketize(values, edges[1:-1])
    sums = torch.zeros(num_classes * bins, dtype=torch.int64)
    sums.scatter_add_(0, cells, (values / UNIT).round().long())
    pixels = torch.bincount(cells, minlength=num_classes * bins)
    correct = torch.bincount(cells[predicted == labels], minlength=num_classes * bins)
    return torch.stack([pixels, correct, sums]).reshape(3, num_classes, bins)


def calibration_error(counts: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
    """Return the expected calibration error (0..1) of counts ``(3, ..., M)``, float64 ``(...)``.

    ``counts.sum(1)`` gives the error over all pixels, ``counts`` the errors by predicted class.
    The error is NaN without pixels.
    """
    pixels, correct, sums = np.asarray(counts, np.float64)
    with np.errstate(invalid='ignore'):
        return np.abs(correct - sums * UNIT).sum(-1) / pixels.sum(-1)


def reliability(counts: Union[np.ndarray, torch.Tensor]) -> np.ndarray:
    """Return the mean probability and the share of correct pixels for counts ``(3, ...)``.

    Returns:
        Both, 0..1, float64 ``(2, ...)``; NaN without pixels.
    """
    pixels, correct, sums = np.asarray(counts, np.float64)
    with np.errstate(invalid='ignore'):
        return np.stack([sums * UNIT / pixels, correct / pixels])
