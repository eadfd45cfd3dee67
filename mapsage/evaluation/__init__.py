"""What a trained model is worth: numbers, and pictures to look at."""
from .preview import PreviewSample, render_preview, save_preview
from .single_class_baseline import SingleClassBaseline, single_class_miou

__all__ = [
    'PreviewSample', 'SingleClassBaseline', 'render_preview', 'save_preview', 'single_class_miou'
]
