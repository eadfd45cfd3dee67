"""Confusion matrices: counted on any device, scored in float64, drawn.

Throughout, row ``t`` and column ``p`` hold the pixels of class ``t`` that were predicted as ``p``.
"""
from __future__ import annotations

from typing import Any, Dict, NamedTuple, Optional, Sequence, Union

import numpy as np
import torch

from mapsage.accelerator import current_accelerator

from .canvas import FAINT, INK, Canvas, save_png

# A row of the counting table for every label up to the ignored one; 16 bits hold any label map's.
_MAX_IGNORE_INDEX = 2**16 - 1
# Pixels a host counts at once: what it computes on the way stays in its caches.
_CACHED = 2**17


class PixelCounts(NamedTuple):
    """What an image adds.

    Attributes:
        matrix: ``(C, C)`` int64, on the device of the labels.
        outside: ``(2,)`` int64, there too: pixels that are not ignored and whose truth is no class;
            pixels whose truth is a class and whose prediction is none.
    """

    matrix: torch.Tensor
    outside: torch.Tensor


def count_pixels(prediction: torch.Tensor, truth: torch.Tensor, num_classes: int,
                 ignore_index: int = 255) -> PixelCounts:
    """Count pixels by truth and prediction; nothing here waits for a lazy device.

    All shapes follow from the arguments' shapes. Ignored pixels and labels that name no class have
    bins of their own, which are cut off.

    Args:
        prediction: Labels of any shape and dtype; floats are truncated.
        truth: Labels of the same shape, on the same device.
        num_classes: C.
        ignore_index: The label of ``truth`` that is not counted; may be one of the classes.

    Raises:
        ValueError: If the shapes differ, or ``num_classes`` or ``ignore_index`` is out of range.
    """
    if prediction.shape != truth.shape:
        raise ValueError(f'the prediction has shape {tuple(prediction.shape)} and the truth '
                         f'{tuple(truth.shape)}, expected equal ones')
    if num_classes < 1 or abs(ignore_index) > _MAX_IGNORE_INDEX:
        raise ValueError(f'num_classes={num_classes}, ignore_index={ignore_index}: expected at '
                         f'least 1, and -{_MAX_IGNORE_INDEX} to {_MAX_IGNORE_INDEX}')
    # A row a label between these, one column either side of the classes: a mask would be one more
    # pass over the pixels.
    low, high = min(-1, ignore_index - 1), max(num_classes, ignore_index + 1)
    table = _table(prediction.reshape(-1), truth.reshape(-1), low, high, num_classes)
    labelled = table[-low:num_classes - low].clone()
    ignored = table[ignore_index - low].sum()
    if 0 <= ignore_index < num_classes:
        labelled[ignore_index] = 0
    matrix = labelled[:, 1:-1]
    outside = torch.stack([table.sum() - ignored - labelled.sum(), labelled.sum() - matrix.sum()])
    return PixelCounts(matrix, outside)


def _table(prediction: torch.Tensor, truth: torch.Tensor, low: int, high: int,
           num_classes: int) -> torch.Tensor:
    """Return ``(high - low + 1, C + 2)`` int64 counts of truth low..high, prediction -1..C."""
    columns = num_classes + 2
    bins = (high - low + 1) * columns
    step = max(_CACHED, bins) if truth.device.type == 'cpu' else max(1, len(truth))
    table = torch.zeros(bins, dtype=torch.int64, device=truth.device)
    for rows, places in zip(truth.split(step), prediction.split(step)):
        # clamped, a label fits 32 bits: half of the memory to go through
        codes = rows.long().clamp(low, high).int().mul_(columns)
        codes.add_(places.long().clamp(-1, num_classes).int()).add_(1 - low * columns)
        table += _histogram(codes, bins)
    return table.reshape(-1, columns)


def _histogram(codes: torch.Tensor, bins: int) -> torch.Tensor:
    """Return ``(bins,)`` int64 counts of int32 ``codes``, ``(N,)`` of 0..bins-1."""
    if codes.device.type != 'cpu' and current_accelerator().lazy:
        # bincount's shape depends on values, so torch_xla computes it on the host
        places = codes.long()
        return places.new_zeros(bins).scatter_add_(0, places, torch.ones_like(places))
    return torch.bincount(codes, minlength=bins)


def confusion_matrix(prediction: torch.Tensor, truth: torch.Tensor, num_classes: int,
                     ignore_index: int = 255) -> torch.Tensor:
    """Return the ``(C, C)`` int64 matrix of an image or a batch; see :func:`count_pixels`.

    Raises:
        ValueError: As there, and if a label names no class. To see that, it waits for the device.
    """
    counts = count_pixels(prediction, truth, num_classes, ignore_index)
    outside = counts.outside.tolist()
    if any(outside):
        raise ValueError(describe_outside(outside, num_classes, ignore_index))
    return counts.matrix


def describe_outside(outside: Sequence[int], num_classes: int, ignore_index: int) -> str:
    """Return the text of an error; ``outside`` as in :class:`PixelCounts`."""
    return (f'{outside[0]} truth pixel(s) and {outside[1]} predicted pixel(s) have labels outside '
            f'the classes, expected 0 to {num_classes - 1}, or {ignore_index} (ignored) in the '
            'truth; check reduce_zero_label and ignore_index, and that num_classes of the decode '
            "head is the number of the dataset's classes")


Scores = Dict[str, Union[float, np.ndarray]]
_PER_CLASS = ('IoU', 'Acc', 'Dice', 'Fscore', 'Precision', 'Recall')


def scores(matrix: Union[np.ndarray, torch.Tensor], beta: float = 1,
           nan_to_num: Optional[float] = None) -> Scores:
    """Score a confusion matrix; float64 fractions, undefined figures are NaN.

    With TP, T (row sum) and P (column sum) of a class: IoU = TP / (T + P - TP), Acc = Recall =
    TP / T, Precision = TP / P, Dice = 2 TP / (T + P), Fscore = (1 + b^2) TP / (b^2 T + P). aAcc =
    sum TP / N, kappa = 1 - (1 - aAcc) / (1 - sum T P / N^2) (Cohen 1960,
    https://doi.org/10.1177/001316446002000104). A mean is over the classes whose figure is defined.

    What is undefined is so in MMSeg's ``IoUMetric`` too: IoU and Dice of a class that neither
    occurs nor is predicted, Acc and Recall of one that does not occur, Precision of one that is
    never predicted, Fscore of one without a right pixel (there scikit-learn says 0), and all of a
    matrix of zeros. kappa is undefined where chance alone is always right.

    Args:
        matrix: ``(C, C)`` integers.
        beta: b, the weight of recall in the F-score.
        nan_to_num: What stands for undefined figures, and counts in the means; None leaves NaN.

    Returns:
        ``(C,)`` arrays ``IoU``, ``Acc``, ``Dice``, ``Fscore``, ``Precision``, ``Recall``; their
        means under these names with an ``m`` before them; ``aAcc`` and ``kappa``.

    Raises:
        ValueError: If ``matrix`` is not square.
    """
    counts = np.asarray(matrix.cpu() if isinstance(matrix, torch.Tensor) else matrix, np.float64)
    if counts.ndim != 2 or counts.shape[0] != counts.shape[1]:
        raise ValueError(f'a confusion matrix has shape {counts.shape}, expected (C, C)')
    right, truth, predicted = counts.diagonal(), counts.sum(1), counts.sum(0)
    total = counts.sum()
    with np.errstate(divide='ignore', invalid='ignore'):
        by_chance = (truth * predicted).sum() / total
        found: Dict[str, Any] = dict(
            aAcc=right.sum() / total,
            kappa=1 - (total - right.sum()) / (total - by_chance),
            IoU=right / (truth + predicted - right), Acc=right / truth,
            Dice=2 * right / (truth + predicted), Precision=right / predicted, Recall=right / truth,
            Fscore=np.where(right > 0, (1 + beta**2) * right / (beta**2 * truth + predicted),
                            np.nan))
    if nan_to_num is not None:
        found = {name: np.nan_to_num(value, nan=nan_to_num) for name, value in found.items()}
    result: Scores = dict(aAcc=float(found['aAcc']), kappa=float(found['kappa']))
    for name in _PER_CLASS:
        result[name], result[f'm{name}'] = found[name], mean_of_defined(found[name])
    return result


def mean_of_defined(values: np.ndarray) -> float:
    """Return the mean of what is not NaN; NaN, without a warning, if nothing is."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else float('nan')


# Pixels.
_MARGIN, _HEADER, _LETTER, _SUMS, _SIDE = 28, 84, 7, 96, 1280
_MIN_CELL, _MAX_CELL = 11, 84
_TEXT_CELL = 46  # holds '100.0' and '999.9k'


def render_confusion(matrix: Union[np.ndarray, torch.Tensor], classes: Sequence[str],
                     title: str = 'Confusion matrix', subtitle: str = '') -> np.ndarray:
    """Draw a confusion matrix: in each row the percentages of a class of the truth.

    Blue deepens with the percentage, so that brightness alone tells it. Where there is room, a cell
    holds its percentage and its pixels. Rows of classes that do not occur are grey.

    Args:
        matrix: ``(C, C)`` integers.
        classes: C names.
        title: First line.
        subtitle: Second line.

    Returns:
        ``(H, W, 3)`` uint8 RGB.

    Raises:
        ValueError: If there is not one name a class.
    """
    counts = np.asarray(matrix.cpu() if isinstance(matrix, torch.Tensor) else matrix)
    number = len(classes)
    if counts.shape != (number, number):
        raise ValueError(f'a confusion matrix of shape {counts.shape} has {number} class names, '
                         'expected one name a row and a column')
    names = [name if len(name) <= 24 else f'{name[:21]}...' for name in map(str, classes)]
    cell = max(_MIN_CELL, min(_MAX_CELL, _SIDE // number))
    size = 7.0 if cell < 16 else 9.5
    beside = _LETTER * max(4, *(len(name) for name in names)) + 14
    left, top, side = _MARGIN + 22 + beside, _HEADER + 26 + beside, cell * number
    canvas = Canvas(max(left + side + _SUMS, 460) + _MARGIN, top + side + _MARGIN)
    canvas.text(_MARGIN, 32, title, size=15, weight='bold')
    canvas.text(_MARGIN, 56, subtitle, size=11, colour=FAINT)
    canvas.text(left, _HEADER + 8, 'predicted, % of the row', size=10, colour=FAINT)
    canvas.text(left + side + 14, top - 10, 'pixels', size=10, colour=FAINT)
    canvas.text(_MARGIN, top - 10, 'truth', size=10, colour=FAINT)
    axes = canvas.axes(left, top, side, side)
    _draw_cells(axes, counts, cell)
    axes.set_xticks(range(number))
    axes.set_yticks(range(number))
    # as Canvas.text: a class called 'a$b$' is a name, not a formula
    axes.set_xticklabels(names, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticklabels(names, fontsize=size, parse_math=False)
    axes.tick_params(length=0, top=True, labeltop=True, bottom=False, labelbottom=False,
                     labelcolor=INK, pad=5)
    for row, total in enumerate(counts.sum(1)):
        canvas.text(left + side + 14, top + row * cell + cell // 2 + 4, short_count(int(total)),
                    size=size)
    return canvas.pixels()


def _draw_cells(axes: Any, counts: np.ndarray, cell: int) -> None:
    number, totals = len(counts), counts.sum(1, keepdims=True)
    shares = np.ma.masked_array(100 * counts / np.maximum(totals, 1),
                                np.broadcast_to(totals == 0, counts.shape))
    axes.imshow(shares, cmap='Blues', vmin=0, vmax=100, aspect='auto', interpolation='nearest')
    axes.set_facecolor('#d8dbdf')
    edges = np.arange(1, number) - 0.5
    axes.hlines(edges, -0.5, number - 0.5, color='#ffffff', linewidth=0.8)
    axes.vlines(edges, -0.5, number - 0.5, color='#ffffff', linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_color('#a8aeb6')
    if cell < _TEXT_CELL:
        return
    for (row, column), count in np.ndenumerate(counts):
        if totals[row, 0]:
            colour = '#ffffff' if shares[row, column] > 65 else INK
            axes.text(column, row - 0.13, f'{shares[row, column]:.1f}', ha='center', va='center',
                      fontsize=10 if cell > 60 else 8.5, color=colour)
            axes.text(column, row + 0.22, short_count(int(count)), ha='center', va='center',
                      fontsize=8 if cell > 60 else 7, color=colour)


def plot_confusion(path: str, matrix: Union[np.ndarray, torch.Tensor], classes: Sequence[str],
                   title: str = 'Confusion matrix', subtitle: str = '') -> None:
    """Draw a confusion matrix and put it at ``path`` in one step, as PNG.

    Args:
        path: The file to write; its folder is created.
        matrix, classes, title, subtitle: As for :func:`render_confusion`.

    Raises:
        ValueError: As there.
        OSError: If the folder cannot be written.
    """
    save_png(path, render_confusion(matrix, classes, title, subtitle))


def short_count(count: int) -> str:
    """Return a count in at most six letters: 999, 12.3k, 4.5M, 678.9G."""
    for factor, unit in ((10**9, 'G'), (10**6, 'M'), (10**3, 'k')):
        # what would be rounded to 1000.0 of a unit is 1.0 of the next
        if count >= factor * 0.99995 and count >= 1000:
            return f'{count / factor:.1f}{unit}'
    return str(count)
