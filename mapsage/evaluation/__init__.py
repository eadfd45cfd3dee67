"""Metrics of segmentation, their formulas, and rewards.

Formulas are pure functions on counts (`confusion_matrix`, `boundary`, `calibration`); the metric
classes sum integer counts over images and ranks, so the scores do not depend on the number of
ranks.
"""

from .boundary import boundary_counts, boundary_iou
from .calibration_metric import CalibrationError, calibration_error, count_confidence, reliability
from .confusion_matrix import confusion_matrix, count_pixels, scores
from .confusion_matrix_metric import ConfusionMatrixMetric
from .reward_metric import MeanReward, reward_variance
from .rewards import ComponentsFound, PolygonCount, UnbrokenLength
from .single_class_baseline import SingleClassBaseline, single_class_miou

__all__ = [
    'CalibrationError',
    'ComponentsFound',
    'ConfusionMatrixMetric',
    'MeanReward',
    'PolygonCount',
    'SingleClassBaseline',
    'UnbrokenLength',
    'boundary_counts',
    'boundary_iou',
    'calibration_error',
    'confusion_matrix',
    'count_confidence',
    'count_pixels',
    'reliability',
    'reward_variance',
    'scores',
    'single_class_miou',
]
