"""The metrics of a validation or test, and the confusion matrix that some of them count.

Metrics are MMEngine's, MapSage's or a user's, so a matrix is asked for by its name.
"""

from __future__ import annotations

from typing import List, Optional

import numpy as np
from mmengine.evaluator import BaseMetric


def metrics_of(loop: object) -> List[BaseMetric]:
    """Return the metrics of a loop; empty for a user's loop without an evaluator."""
    metrics = getattr(getattr(loop, 'evaluator', None), 'metrics', ())
    return [metric for metric in metrics if isinstance(metric, BaseMetric)]


def confusion_matrix(metric: object) -> Optional[np.ndarray]:
    """Return the confusion matrix that a metric has counted, (C, C); None without one.

    Any metric may have a matrix, not only MapSage's. Rows are the truth.
    """
    return getattr(metric, 'matrix', None)
