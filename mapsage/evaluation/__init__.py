"""Metrics of segmentation."""
from .boundary import boundary_counts, boundary_iou
from .confusion_matrix import confusion_matrix, count_pixels, scores
from .confusion_matrix_metric import ConfusionMatrixMetric
from .single_class_baseline import SingleClassBaseline, single_class_miou

__all__ = [
    'ConfusionMatrixMetric', 'SingleClassBaseline', 'boundary_counts', 'boundary_iou',
    'confusion_matrix', 'count_pixels', 'scores', 'single_class_miou'
]
