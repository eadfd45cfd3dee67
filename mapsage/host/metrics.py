"""The metrics of a validation or test, and the confusion matrix that some of them count.

Metrics are MMEngine's, MapSage's or a user's, so a matrix is asked for by its name.
"""

from __future__ import annotations

from typing import Any, List, Optional

import numpy as np
from mmengine.evaluator import BaseMetric
from mmseg.evaluation import IoUMetric


def metrics_of(loop: object) -> List[BaseMetric]:
    """Return the metrics of a loop; empty for a user's loop without an evaluator."""
    metrics = getattr(getattr(loop, 'evaluator', None), 'metrics', ())
    return [metric for metric in metrics if isinstance(metric, BaseMetric)]


def confusion_matrix(metric: object) -> Optional[np.ndarray]:
    """Return the confusion matrix that a metric has counted, (C, C); None without one.

    Any metric may have a matrix, not only MapSage's. Rows are the truth.
    """
    return getattr(metric, 'matrix', None)


def score_names(metric: Any) -> Optional[List[str]]:
    """Return the names that a metric will give its scores, or None if only an evaluation tells.

    MapSage's metrics have a method ``score_names``. The options of ``IoUMetric`` name its scores,
    see ``IoUMetric.total_area_to_metrics``.
    """
    if type(metric) is IoUMetric:
        further = dict(
            mIoU=['mIoU', 'mAcc'],
            mDice=['mDice', 'mAcc'],
            mFscore=['mFscore', 'mPrecision', 'mRecall'],
        )
        names = ['aAcc', *(name for option in metric.metrics for name in further.get(option, ()))]
        names = [] if metric.format_only else names
    # A subclass may give other scores than the class that names them.
    elif 'score_names' in vars(type(metric)):
        names = metric.score_names()
    else:
        return None
    return [f'{metric.prefix}/{name}' if metric.prefix else name for name in names]
