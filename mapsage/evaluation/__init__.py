"""What a trained model is worth: numbers, and pictures to look at."""
from .boundary import boundary_counts, boundary_iou
from .confusion_matrix import confusion_matrix, count_pixels, plot_confusion, scores
from .confusion_matrix_metric import ConfusionMatrixMetric
from .preview import PreviewSample, render_preview, save_preview
from .single_class_baseline import SingleClassBaseline, single_class_miou

__all__ = [
    'ConfusionMatrixMetric', 'PreviewSample', 'SingleClassBaseline', 'boundary_counts',
    'boundary_iou', 'confusion_matrix', 'count_pixels', 'plot_confusion', 'render_preview',
    'save_preview', 'scores', 'single_class_miou'
]
