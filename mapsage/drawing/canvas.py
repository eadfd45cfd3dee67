"""A picture made of text, charts and arrays, placed pixel for pixel.

Matplotlib is imported on the first use and only its object interface is used: a training script
that plots with pyplot keeps its own figures.
"""
from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, List, Tuple

import numpy as np

from mapsage.atomic_write import atomic_write

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, PAPER = '#1b1f24', '#5b636d', '#ffffff'
_DPI = 100


class Canvas:
    """A Matplotlib figure addressed in pixels from the top left corner."""

    def __init__(self, width: int, height: int) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        self._width, self._height = width, height
        # The hundredth of a pixel keeps float rounding from cutting a row or a column.
        self._figure: Figure = Figure(
            figsize=((width + 0.01) / _DPI, (height + 0.01) / _DPI), dpi=_DPI, facecolor=PAPER)
        self._canvas = FigureCanvasAgg(self._figure)
        self._pictures: List[Tuple[int, int, np.ndarray]] = []

    def text(self, left: int, baseline: int, text: str, size: float, weight: str = 'normal',
             color: str = INK) -> None:
        """Write a line; ``left`` and ``baseline`` in pixels, ``size`` in points."""
        # parse_math: a class called 'a$b$' is a name, not a formula.
        self._figure.text(left / self._width, 1 - baseline / self._height, text, fontsize=size,
                          fontweight=weight, color=color, va='baseline', parse_math=False)

    def axes(self, left: int, top: int, width: int, height: int) -> Any:
        """Return Matplotlib axes with these pixels inside their frame."""
        return self._figure.add_axes((left / self._width, 1 - (top + height) / self._height,
                                      width / self._width, height / self._height))

    def picture(self, left: int, top: int, pixels: np.ndarray) -> None:
        """Place ``(height, width, 3)`` uint8 RGB, unresampled, in a hairline."""
        self._pictures.append((left, top, pixels))

    def pixels(self) -> np.ndarray:
        """Return the drawing as ``(height, width, 3)`` uint8 RGB."""
        self._canvas.draw()
        drawn = np.array(self._canvas.buffer_rgba(), dtype=np.uint8)[:, :, :3]
        for left, top, pixels in self._pictures:
            height, width = pixels.shape[:2]
            # A hairline, without which white classes melt into the paper.
            drawn[top - 1:top + height + 1, left - 1:left + width + 1] = 168
            drawn[top:top + height, left:left + width] = pixels
        return np.ascontiguousarray(drawn)


def save_png(path: str, pixels: np.ndarray) -> None:
    """Write ``(height, width, 3)`` uint8 RGB at ``path`` in one step; its folder is created.

    Raises:
        OSError: If the folder cannot be written.
    """
    import cv2
    encoded, data = cv2.imencode('.png', pixels[:, :, ::-1])
    if not encoded:
        raise OSError(f'OpenCV could not encode a picture of shape {pixels.shape} as PNG')
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, data.tobytes())
