"""All pictures: a canvas, tiles, and the galleries and charts made of them."""
from .confusion_plot import plot_confusion
from .contact_sheet import LabeledImage, render_contact_sheet
from .preview import PreviewSample, render_preview, save_preview
from .reliability_plot import plot_reliability

__all__ = [
    'LabeledImage', 'PreviewSample', 'plot_confusion', 'plot_reliability', 'render_contact_sheet',
    'render_preview', 'save_preview'
]
