"""All pictures: a canvas, tiles, and the galleries and charts that are made of them.

Everything except `save_*` and `plot_*` is a function from arrays to a uint8 RGB array. `canvas.py`
places text and tiles at exact pixels, `tiles.py` turns images and label maps into tiles.
"""

from .confusion_plot import plot_confusion
from .contact_sheet import LabeledImage, render_contact_sheet
from .preview import PreviewSample, render_preview, save_preview

__all__ = [
    'LabeledImage',
    'PreviewSample',
    'plot_confusion',
    'render_contact_sheet',
    'render_preview',
    'save_preview',
]
