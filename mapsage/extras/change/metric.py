"""Scores of change maps: precision, recall, F1 and IoU of change, and Open-CD's SeK for from-to.

All of them are computed from one confusion matrix of the change classes, which
`ConfusionMatrixMetric` sums exactly over the images of all ranks. The classes are explained in
`mapsage/geo/change_classes.py`.
"""

from __future__ import annotations

import logging
import math
from typing import Any, Dict, List, Optional, Sequence

import numpy as np
from mmengine.dist import get_dist_info
from mmengine.logging import MMLogger, print_log
from mmengine.registry import METRICS
from prettytable import PrettyTable

from mapsage.evaluation.confusion_matrix import scores
from mapsage.evaluation.confusion_matrix_metric import ConfusionMatrixMetric
from mapsage.geo.change_classes import UNCHANGED, ChangeClassError, transition_of


def change_scores(matrix: np.ndarray, unchanged: int = 0) -> Dict[str, float]:
    """Score change against no change, whatever the classes of change are.

    Args:
        matrix: Confusion matrix, integers (C, C), rows are the truth.
        unchanged: Index of the class without change.

    Returns:
        ``Precision``, ``Recall``, ``F1`` and ``IoU`` of change, ``mIoU`` of change and no change,
        and ``aAcc``, the share of correct pixels, all as fractions; NaN where undefined: all four
        scores of change if it neither occurs nor is predicted.
    """
    changed = [index for index in range(len(matrix)) if index != unchanged]
    groups = ([unchanged], changed)
    binary = np.array(
        [[matrix[np.ix_(truth, prediction)].sum() for prediction in groups] for truth in groups],
        np.int64,
    )
    result: Dict[str, Any] = scores(binary)
    return dict(
        F1=float(result['Fbeta'][1]),
        IoU=float(result['IoU'][1]),
        Precision=float(result['Precision'][1]),
        Recall=float(result['Recall'][1]),
        mIoU=float(result['mIoU']),
        aAcc=float(result['aAcc']),
    )


def land_confusion(matrix: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """Return the confusion matrix of the land classes of both dates, int64 (K + 1, K + 1).

    Every pixel counts twice: with its class before and with its class after the change. Class 0
    stands for "unchanged" at both dates, as in Open-CD's semantic labels.

    Args:
        matrix: Confusion matrix of from-to classes, integers (C, C), rows are the truth.
        names: Names of the from-to classes.

    Raises:
        ChangeClassError: If a name is neither 'unchanged' nor of the form 'before > after'.
    """
    pairs = [transition_of(name) for name in names]
    land: List[str] = []
    for name, pair in zip(names, pairs):
        if pair is None and name != UNCHANGED:
            raise ChangeClassError(
                f"class {name!r}, expected {UNCHANGED!r} or a name such as 'forest > building'."
            )
        land += [side for side in pair or () if side not in land]
    total = np.zeros((len(land) + 1, len(land) + 1), np.int64)
    for date in (0, 1):
        # One row for each from-to class: 1 at its land class of this date.
        member = np.zeros((len(names), len(land) + 1), np.int64)
        for index, pair in enumerate(pairs):
            member[index, 0 if pair is None else 1 + land.index(pair[date])] = 1
        total += member.T @ np.asarray(matrix, np.int64) @ member
    return total


def separated_kappa(land: np.ndarray) -> float:
    """Return SeK, the separated kappa coefficient, as a fraction; NaN where it is undefined.

    With q00, the pixels that are unchanged in truth and prediction, removed from the matrix:
    kappa = (po - pe) / (1 - pe), and SeK = kappa * exp(IoU of change - 1) (Yang et al. 2020,
    "Semantic Change Detection with Asymmetric Siamese Networks", and Open-CD's ``SCDMetric``).

    Args:
        land: Confusion matrix of both dates, integers (K + 1, K + 1), class 0 is "unchanged".
    """
    counts = np.array(land, np.float64)
    counts[0, 0] = 0
    total = counts.sum()
    if not total:
        return float('nan')
    observed = counts.diagonal().sum() / total
    expected = (counts.sum(0) * counts.sum(1)).sum() / total**2
    if expected == 1:
        return float('nan')
    iou = counts[1:, 1:].sum() / total
    return float((observed - expected) / (1 - expected) * math.exp(iou - 1))


@METRICS.register_module()
class ChangeMetric(ConfusionMatrixMetric):
    """Scores of change over the whole dataset, exact on any number of ranks.

    Reports, in percent with two digits: ``F1``, ``IoU``, ``Precision`` and ``Recall`` of change
    (all classes except 'unchanged' together), ``mIoU`` of change and no change, ``aAcc``. For
    from-to classes also ``SeK`` and ``SCD_Score`` = 0.3 mIoU + 0.7 SeK as in Open-CD's
    ``SCDMetric``, and ``from_to_mIoU``, the mean over the classes of change that occur or are
    predicted. The log has a row for each class of change, with the class that it is most often
    confused with; ``picture`` is the whole from-to confusion matrix.

    Args:
        ignore_index, picture, prefix, output_dir, format_only, collect_device: As in
            :class:`ConfusionMatrixMetric`.

    Raises:
        ChangeClassError: In the evaluation, if no class is called 'unchanged'.
    """

    def __init__(
        self,
        ignore_index: int = 255,
        picture: Optional[str] = None,
        prefix: Optional[str] = None,
        output_dir: Optional[str] = None,
        format_only: bool = False,
        collect_device: str = 'cpu',
    ) -> None:
        super().__init__(
            ignore_index=ignore_index,
            picture=picture,
            prefix=prefix,
            output_dir=output_dir,
            format_only=format_only,
            collect_device=collect_device,
        )

    def compute_metrics(self, results: List[Any]) -> Dict[str, float]:
        """Return the scores of ``results``, a list of one count vector, and log the table."""
        names = list(self._classes())
        if UNCHANGED not in names:
            raise ChangeClassError(
                f'ChangeMetric: the classes are {names}, expected one that is '
                f'called {UNCHANGED!r}; name it in metainfo of the dataset.'
            )
        unchanged = names.index(UNCHANGED)
        vector = results[0].numpy()
        self.matrix = matrix = vector[2 : 2 + len(names) ** 2].reshape(len(names), len(names))
        result = change_scores(matrix, unchanged)
        by_class: Dict[str, Any] = scores(matrix)
        if any(transition_of(name) for name in names):
            sek = separated_kappa(land_confusion(matrix, names))
            ious = np.delete(by_class['IoU'], unchanged)
            result.update(
                SeK=sek,
                SCD_Score=0.3 * result['mIoU'] + 0.7 * sek,
                from_to_mIoU=float(np.nanmean(ious)) if not np.isnan(ious).all() else float('nan'),
            )
        if get_dist_info()[0] == 0:
            self._log_classes(names, matrix, by_class)
            if not np.delete(matrix, unchanged, 0).any():
                print_log(
                    'no pixel of the evaluated truth is changed: recall and F1 of change say '
                    'nothing. Check the labels (Open-CD: 255 is changed, 0 is not).',
                    logger='current',
                    level=logging.WARNING,
                )
            if self.picture:
                self.plot(self.picture)
        return {key: float(np.round(value * 100, 2)) for key, value in result.items()}

    @staticmethod
    def _log_classes(names: Sequence[str], matrix: np.ndarray, by_class: Dict[str, Any]) -> None:
        table = PrettyTable(['Class', 'IoU', 'Precision', 'Recall', 'pixels', 'most confused with'])
        for index, name in enumerate(names):
            row = matrix[index]
            wrong = np.where(np.arange(len(row)) == index, -1, row)
            rival = int(wrong.argmax())
            confusion = (
                f'{names[rival]} ({100 * wrong[rival] / row.sum():.1f} %)'
                if wrong[rival] > 0
                else ''
            )
            if row.any() or matrix[:, index].any():
                table.add_row(
                    [
                        name,
                        *(
                            f'{100 * by_class[key][index]:.2f}'
                            for key in ('IoU', 'Precision', 'Recall')
                        ),
                        int(row.sum()),
                        confusion,
                    ]
                )
        print_log(
            'per class results:\n' + table.get_string(), logger=MMLogger.get_current_instance()
        )
