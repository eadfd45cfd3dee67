"""Confusion matrices: counted on any device, scored in float64.

Element ``[t, p]`` is the number of pixels of class ``t`` that were predicted as ``p``. Counting
never waits for a lazy device, so labels outside the classes are counted too, and reported later.

Shapes:
    prediction, truth  any, equal  class indices; the truth may contain ignore_index
    matrix             (C, C)      int64 pixels, rows are the truth
    outside            (2,)        int64 pixels with a truth, with a prediction outside the classes
"""

from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch

from mapsage.accelerator import current_accelerator

# The counting table has a row for every label up to ignore_index, and label maps have at most 16
# bits.
_MAX_IGNORE_INDEX = 2**16 - 1
# A CPU counts this many pixels at once, so that intermediate results stay in its caches.
_CPU_CHUNK = 2**17


class PixelCounts(NamedTuple):
    """Pixel counts of one image, on the device of its labels.

    Attributes:
        matrix: Confusion matrix, int64 ``(C, C)``.
        outside: Two counts, int64 ``(2,)``: pixels with a truth that is neither a class nor
            ignored, and pixels with a class as the truth but not as the prediction.
    """

    matrix: torch.Tensor
    outside: torch.Tensor


def count_pixels(
    prediction: torch.Tensor, truth: torch.Tensor, num_classes: int, ignore_index: int = 255
) -> PixelCounts:
    """Count pixels by truth and prediction, without waiting for a lazy device.

    All shapes depend only on the shapes of the arguments. Ignored pixels and labels outside the
    classes are counted in separate bins, which are cut off afterwards.

    Args:
        prediction: Labels of any shape and dtype; floats are truncated.
        truth: Labels of the same shape, on the same device.
        num_classes: Number of classes, C.
        ignore_index: Label of ``truth`` that is not counted; it may be one of the classes.

    Raises:
        ValueError: If the shapes differ, or ``num_classes`` or ``ignore_index`` is out of range.
    """
    if prediction.shape != truth.shape:
        raise ValueError(
            f'the prediction has shape {tuple(prediction.shape)} and the truth '
            f'{tuple(truth.shape)}, expected equal shapes'
        )
    if num_classes < 1 or abs(ignore_index) > _MAX_IGNORE_INDEX:
        raise ValueError(
            f'num_classes={num_classes}, ignore_index={ignore_index}: expected at '
            f'least 1, and -{_MAX_IGNORE_INDEX} to {_MAX_IGNORE_INDEX}'
        )
    # The table has a row for every label in this range, and one more column on both sides of the
    # classes. Masking ignored pixels instead would need one more pass over the pixels.
    low, high = min(-1, ignore_index - 1), max(num_classes, ignore_index + 1)
    table = _table(prediction.reshape(-1), truth.reshape(-1), low, high, num_classes)
    labeled = table[-low : num_classes - low].clone()
    ignored = table[ignore_index - low].sum()
    if 0 <= ignore_index < num_classes:
        labeled[ignore_index] = 0
    matrix = labeled[:, 1:-1]
    outside = torch.stack([table.sum() - ignored - labeled.sum(), labeled.sum() - matrix.sum()])
    return PixelCounts(matrix, outside)


def _table(
    prediction: torch.Tensor, truth: torch.Tensor, low: int, high: int, num_classes: int
) -> torch.Tensor:
    """Return ``(high - low + 1, C + 2)`` int64 counts of truth low..high, prediction -1..C."""
    columns = num_classes + 2
    bins = (high - low + 1) * columns
    step = max(_CPU_CHUNK, bins) if truth.device.type == 'cpu' else max(1, len(truth))
    table = torch.zeros(bins, dtype=torch.int64, device=truth.device)
    for truth_chunk, prediction_chunk in zip(truth.split(step), prediction.split(step)):
        # A clamped label fits into 32 bits, which halves the memory traffic.
        codes = truth_chunk.long().clamp(low, high).int().mul_(columns)
        codes.add_(prediction_chunk.long().clamp(-1, num_classes).int()).add_(1 - low * columns)
        table += _histogram(codes, bins)
    return table.reshape(-1, columns)


def _histogram(codes: torch.Tensor, bins: int) -> torch.Tensor:
    """Return the number of occurrences of every code, int32 ``(N,)`` -> int64 ``(bins,)``."""
    if codes.device.type != 'cpu' and not current_accelerator().native_bincount:
        indices = codes.long()
        return indices.new_zeros(bins).scatter_add_(0, indices, torch.ones_like(indices))
    return torch.bincount(codes, minlength=bins)


def confusion_matrix(
    prediction: torch.Tensor, truth: torch.Tensor, num_classes: int, ignore_index: int = 255
) -> torch.Tensor:
    """Return the ``(C, C)`` int64 matrix of an image or a batch; see :func:`count_pixels`.

    Raises:
        ValueError: As in :func:`count_pixels`, and if a label is outside the classes. This check
            waits for the device.
    """
    counts = count_pixels(prediction, truth, num_classes, ignore_index)
    outside = counts.outside.tolist()
    if any(outside):
        raise ValueError(describe_outside(outside, num_classes, ignore_index))
    return counts.matrix


def describe_outside(outside: Sequence[int], num_classes: int, ignore_index: int) -> str:
    """Return the error text for labels outside the classes (see :class:`PixelCounts`)."""
    return (
        f'{outside[0]} truth pixel(s) and {outside[1]} predicted pixel(s) have labels outside '
        f'the classes, expected 0 to {num_classes - 1}, or {ignore_index} (ignored) in the '
        'truth; check reduce_zero_label and ignore_index, and that num_classes of the decode '
        "head is the number of the dataset's classes"
    )


Scores = Dict[str, Union[float, np.ndarray]]
_PER_CLASS = ('IoU', 'Acc', 'Dice', 'Fscore', 'Fbeta', 'Precision', 'Recall')


def scores(
    matrix: Union[np.ndarray, torch.Tensor], beta: float = 1, nan_to_num: Optional[float] = None
) -> Scores:
    """Score a confusion matrix. Scores are float64 fractions; undefined scores are NaN.

    With TP, T (row sum) and P (column sum) of a class: IoU = TP / (T + P - TP), Acc = Recall =
    TP / T, Precision = TP / P, Dice = 2 TP / (T + P), Fscore = Fbeta = (1 + b^2) TP /
    (b^2 T + P). aAcc = sum TP / N, kappa = 1 - (1 - aAcc) / (1 - sum T P / N^2) (Cohen 1960,
    https://doi.org/10.1177/001316446002000104). A mean covers only the classes with a defined
    score.

    The same scores are undefined as in MMSeg's ``IoUMetric``: IoU and Dice of a class that neither
    occurs nor is predicted, Acc and Recall of a class that does not occur, Precision of a class
    that is never predicted, Fscore of a class without a correct pixel, and all scores of a matrix
    of zeros. kappa is undefined if guessing would always be correct. Fbeta is scikit-learn's
    ``fbeta_score``: for a class that occurs or is predicted but has no correct pixel, it is 0 and
    counts in the mean.

    Args:
        matrix: Confusion matrix, integers ``(C, C)``.
        beta: Weight of recall in the F-score, b.
        nan_to_num: Value that replaces undefined scores and counts in the means; None keeps NaN.

    Returns:
        Arrays ``IoU``, ``Acc``, ``Dice``, ``Fscore``, ``Fbeta``, ``Precision`` and ``Recall`` of
        shape ``(C,)``; their means, under the same names with an ``m`` in front; ``aAcc`` and
        ``kappa``.

    Raises:
        ValueError: If ``matrix`` is not square.
    """
    counts = np.asarray(matrix.cpu() if isinstance(matrix, torch.Tensor) else matrix, np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        raise ValueError(f'a confusion matrix has shape {counts.shape}, expected (C, C)')
    correct, truth, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    total = counts.sum()
    with np.errstate(divide='ignore', invalid='ignore'):
        by_chance = (truth * predicted).sum() / total
        fbeta = (1 + beta**2) * correct / (beta**2 * truth + predicted)
        arrays: Dict[str, Any] = dict(
            aAcc=correct.sum() / total,
            kappa=1 - (total - correct.sum()) / (total - by_chance),
            IoU=correct / (truth + predicted - correct),
            Acc=correct / truth,
            Dice=2 * correct / (truth + predicted),
            Precision=correct / predicted,
            Recall=correct / truth,
            Fscore=np.where(correct > 0, fbeta, np.nan),
            Fbeta=fbeta,
        )
    if nan_to_num is not None:
        arrays = {name: np.nan_to_num(value, nan=nan_to_num) for name, value in arrays.items()}
    result: Scores = dict(aAcc=float(arrays['aAcc']), kappa=float(arrays['kappa']))
    for name in _PER_CLASS:
        result[name], result[f'm{name}'] = arrays[name], mean_of_defined(arrays[name])
    return result


def mean_of_defined(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN; NaN, without a warning, if there are none."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else float('nan')
