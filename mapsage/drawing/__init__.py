"""All pictures: a canvas, tiles, and the galleries and charts made of them."""
from .confusion_plot import plot_confusion
from .preview import PreviewSample, render_preview, save_preview

__all__ = ['PreviewSample', 'plot_confusion', 'render_preview', 'save_preview']
