"""Metrics of segmentation, and their formulas.

Formulas are pure functions on counts (`confusion_matrix`, `boundary`); the metric
classes sum integer counts over images and ranks, so the scores do not depend on the number of
ranks.
"""

from .boundary import boundary_counts, boundary_iou
from .confusion_matrix import confusion_matrix, count_pixels, scores
from .confusion_matrix_metric import ConfusionMatrixMetric
from .reward_variance import reward_variance
from .single_class_baseline import SingleClassBaseline, single_class_miou

__all__ = [
    'ConfusionMatrixMetric',
    'SingleClassBaseline',
    'boundary_counts',
    'boundary_iou',
    'confusion_matrix',
    'count_pixels',
    'reward_variance',
    'scores',
    'single_class_miou',
]
