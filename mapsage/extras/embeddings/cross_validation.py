"""Scores of a classifier by spatial cross-validation, with intervals.

Neighboring cells look alike, so a classifier that is tested next to the cells it was fitted on
seems better than it is. Labels are therefore held out by blocks, squares on the ground: each fold
leaves out whole blocks. The blocks are also the units of the intervals, because the labels inside
one are no independent evidence.

Shapes: N labels, K classes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Callable, Dict, List, Optional, Sequence, Tuple

import numpy as np

from .classifiers import Classifier

_FOLDS = 5
# Blocks along the longer side of the labeled area.
_BLOCKS_ALONG = 10
_LEVEL = 0.95
FEWEST_BLOCKS = 6
"""Blocks below which an interval says little."""


@dataclass(frozen=True)
class Score:
    """A score between 0 and 1 with its interval of 95 %."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class CrossValidation:
    """Scores of a method from labels that it was not fitted on.

    Attributes:
        method: Name of the method.
        accuracy: Share of labels that are right.
        mean_iou: Mean over the classes of intersection over union.
        iou: Intersection over union of each class.
        blocks: Number of blocks.
    """

    method: str
    accuracy: Score
    mean_iou: Score
    iou: List[Score]
    blocks: int


def assign_blocks(places: np.ndarray, side: Optional[float]) -> Tuple[np.ndarray, float]:
    """Return the block of each place, ``(N,)`` numbers from 0, and the side of a block.

    Args:
        places: Coordinates, ``(N, 2)``.
        side: Side of a block in their unit; None for a tenth of the longer side of the area.
    """
    corner = places.min(0)
    if side is None:
        side = max(float(np.ptp(places, axis=0).max()) / _BLOCKS_ALONG, 1e-9)
    cells = np.floor((places - corner) / side).astype(np.int64)
    return np.unique(cells, axis=0, return_inverse=True)[1].reshape(-1), side


def assign_folds(blocks: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return the fold of each label, ``(N,)``; the labels of a block are in one fold.

    The largest blocks are placed first, each where the labels of its classes are fewest, so that
    folds have about as many labels of each class.
    """
    # The last column counts all labels, so that no fold stays empty.
    table = np.zeros((blocks.max() + 1, labels.max() + 2))
    np.add.at(table, (blocks, labels), 1)
    table[:, -1] = np.bincount(blocks)
    share = table / table.sum(0).clip(1)
    folds = np.zeros((min(_FOLDS, len(table)), table.shape[1]))
    fold_of_block = np.zeros(len(table), np.int64)
    for block in np.argsort(-share.max(1), kind='stable'):
        fold = int(((folds + share[block]) ** 2 - folds**2).sum(1).argmin())
        fold_of_block[block] = fold
        folds[fold] += share[block]
    return fold_of_block[blocks]


def cross_validate(
    method: str, vectors: np.ndarray, labels: np.ndarray, blocks: np.ndarray, classes: int
) -> CrossValidation:
    """Return the scores of a method.

    Args:
        method: One of ``classifiers.METHODS``.
        vectors: ``(N, C)`` float32.
        labels: Class of each vector, ``(N,)``.
        blocks: Block of each vector, from two or more.
        classes: Number of classes.
    """
    folds, predicted = assign_folds(blocks, labels), np.zeros(len(labels), np.int64)
    for fold in np.unique(folds):
        test = folds == fold
        classifier = Classifier(method, vectors[~test], labels[~test], classes)
        predicted[test] = classifier.predict(vectors[test])[0]
    # Confusion matrix of each block: row of the label, column of the prediction.
    matrices = np.zeros((blocks.max() + 1, classes, classes))
    np.add.at(matrices, (blocks, labels, predicted), 1)
    scores = [_jackknife(matrices, partial(_iou_of, index=index)) for index in range(classes)]
    return CrossValidation(
        method,
        _jackknife(matrices, _accuracy),
        _jackknife(matrices, lambda matrix: float(np.nanmean(_iou(matrix)))),
        scores,
        len(matrices),
    )


def _iou_of(matrix: np.ndarray, index: int) -> float:
    return float(_iou(matrix)[index])


def _accuracy(matrix: np.ndarray) -> float:
    return float(np.trace(matrix) / max(matrix.sum(), 1))


def _iou(matrix: np.ndarray) -> np.ndarray:
    """Return intersection over union of each class, NaN for one that does not occur."""
    hits = np.diag(matrix)
    union = matrix.sum(0) + matrix.sum(1) - hits
    return np.where(union > 0, hits / np.maximum(union, 1), np.nan)


def _jackknife(matrices: np.ndarray, score: Callable[[np.ndarray], float]) -> Score:
    """Return a score with its interval, from the scores without one block each.

    The standard error is the delete-one jackknife's (Efron and Tibshirani 1993, equation 11.5) with
    the quantile of Student's t for B - 1 degrees of freedom. Where no block makes a difference, as
    when all labels are right, the limit is the share p of bad blocks that B good ones still allow:
    (1 - p)**B = 0.025.
    """
    total, count = matrices.sum(0), len(matrices)
    value = score(total)
    without = np.array([score(total - matrix) for matrix in matrices])
    without = np.where(np.isnan(without), value, without)
    error = np.sqrt((count - 1) / count * ((without - without.mean()) ** 2).sum())
    tail = (1 - _LEVEL) / 2
    margin = error * _student_t(1 - tail, count - 1)
    margin = max(float(margin), 1 - tail ** (1 / count) if error < 1e-12 else 0.0)
    return Score(value, max(0.0, value - margin), min(1.0, value + margin))


def _student_t(probability: float, freedom: int) -> float:
    """Return a quantile of Student's t distribution."""
    # A dependency of scikit-learn, which the extra needs only where it classifies.
    from scipy.stats import t

    return float(t.ppf(probability, freedom))


def as_table(results: Sequence[CrossValidation], classes: Sequence[str]) -> List[str]:
    """Return the scores of several methods in percent as lines of text."""
    rows: List[Tuple[str, List[Score]]] = [
        ('accuracy', [result.accuracy for result in results]),
        ('mIoU', [result.mean_iou for result in results]),
    ]
    rows += [(name, [result.iou[i] for result in results]) for i, name in enumerate(classes)]
    width = max(len(name) for name, _ in rows) + 2
    cells = [[_format(score) for score in scores] for _, scores in rows]
    lines = [' ' * width + ''.join(f'{result.method:>22}' for result in results)]
    return lines + [
        f'{name:{width}}' + ''.join(f'{cell:>22}' for cell in row)
        for (name, _), row in zip(rows, cells)
    ]


def _format(score: Score) -> str:
    if score.value != score.value:
        return '-'
    return f'{100 * score.value:.1f} ({100 * score.low:.1f}..{100 * score.high:.1f})'


def as_record(result: CrossValidation, classes: Sequence[str]) -> Dict[str, object]:
    """Return the scores as JSON values: value, low, high, each 0..1; None where there is none."""

    def numbers(score: Score) -> Optional[List[float]]:
        values = score.value, score.low, score.high
        return None if score.value != score.value else [round(value, 4) for value in values]

    return dict(
        accuracy=numbers(result.accuracy),
        mean_iou=numbers(result.mean_iou),
        iou={name: numbers(score) for name, score in zip(classes, result.iou)},
        blocks=result.blocks,
    )
