"""A picture made of text, charts and arrays, placed at exact pixels.

Arrays are copied into the finished drawing, so their pixels are not resampled. Matplotlib is
imported on first use, and only through its object interface, so the figures of a training script
that uses pyplot are not affected.

Text that Matplotlib's font lacks, such as Chinese names of classes and scenes, gets another font.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING, List, Sequence, Tuple

import numpy as np

from mapsage.base.files import atomic_write

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


INK, FAINT, PAPER = '#1b1f24', '#5b636d', '#ffffff'
_DPI = 100
# Distance from one line of a legend to the next, in pixels.
_LEGEND_LINE = 26
# The first character of the Chinese, Japanese and Korean blocks of Unicode.
_FIRST_CHINESE = '\u2e80'


class Canvas:
    """A Matplotlib figure with coordinates in pixels from the top left corner.

    Args:
        width: Width in pixels.
        height: Height in pixels.
    """

    def __init__(self, width: int, height: int) -> None:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        self._width, self._height = width, height
        # Without the additional hundredth of a pixel, float rounding may cut off a row or column.
        self._figure: Figure = Figure(
            figsize=((width + 0.01) / _DPI, (height + 0.01) / _DPI), dpi=_DPI, facecolor=PAPER
        )
        self._canvas = FigureCanvasAgg(self._figure)
        self._pictures: List[Tuple[int, int, np.ndarray]] = []

    def text(
        self,
        left: int,
        baseline: int,
        text: str,
        size: float,
        weight: str = 'normal',
        color: str = INK,
    ) -> None:
        """Write a line of text; ``left`` and ``baseline`` are in pixels, ``size`` is in points."""
        # Without parse_math=False, a class named 'a$b$' would be drawn as a formula.
        self._figure.text(
            left / self._width,
            1 - baseline / self._height,
            text,
            fontsize=size,
            fontweight=weight,
            color=color,
            va='baseline',
            parse_math=False,
        )

    def axes(self, left: int, top: int, width: int, height: int) -> Axes:
        """Return new Matplotlib axes with a frame around these pixels."""
        return self._figure.add_axes(
            (
                left / self._width,
                1 - (top + height) / self._height,
                width / self._width,
                height / self._height,
            )
        )

    def picture(self, left: int, top: int, pixels: np.ndarray) -> None:
        """Place an array, RGB uint8 ``(height, width, 3)``, without resampling, in a thin frame."""
        self._pictures.append((left, top, pixels))

    def heading(self, left: int, baseline: int, title: str, subtitle: str) -> None:
        """Write the title of a picture and, 24 pixels below it, a second line."""
        self.text(left, baseline, title, size=15, weight='bold')
        self.text(left, baseline + 24, subtitle, size=11, color=FAINT)

    def pixels(self) -> np.ndarray:
        """Return the drawing as RGB uint8 ``(height, width, 3)``."""
        self._choose_fonts()
        self._canvas.draw()
        drawn = np.array(self._canvas.buffer_rgba(), dtype=np.uint8)[:, :, :3]
        for left, top, pixels in self._pictures:
            height, width = pixels.shape[:2]
            # Without a thin frame, white classes could not be distinguished from the background.
            drawn[top - 1 : top + height + 1, left - 1 : left + width + 1] = 168
            drawn[top : top + height, left : left + width] = pixels
        return np.ascontiguousarray(drawn)

    def _choose_fonts(self) -> None:
        """Add a font for the characters that Matplotlib's own lacks, also to the texts of axes."""
        from matplotlib.text import Text

        for text in self._figure.findobj(Text):
            if any(character >= _FIRST_CHINESE for character in text.get_text()):
                families = text.get_fontfamily()
                text.set_fontfamily(
                    [*families, *(name for name in chinese_families() if name not in families)]
                )


class Legend:
    """Names next to color swatches, in as many columns as fit.

    Args:
        entries: Names and swatches, ``(18, 18, 3)`` uint8 RGB.
        width: Width in pixels.

    Attributes:
        height: Height in pixels.
    """

    def __init__(self, entries: Sequence[Tuple[str, np.ndarray]], width: int) -> None:
        self._entries = entries
        # 8 pixels per letter at size 10.
        self._pitch = 42 + 8 * max((len(name) for name, _ in entries), default=0)
        self._columns = max(1, width // self._pitch)
        self.height = -(-len(entries) // self._columns) * _LEGEND_LINE

    def draw(self, canvas: Canvas, left: int, top: int) -> None:
        """Draw the legend with its upper left corner at these pixels."""
        for index, (name, swatch) in enumerate(self._entries):
            x = left + index % self._columns * self._pitch
            y = top + index // self._columns * _LEGEND_LINE
            canvas.picture(x, y, swatch)
            canvas.text(x + 26, y + 14, name, size=10)


def save_png(path: str, pixels: np.ndarray) -> None:
    """Write an array, RGB uint8 ``(height, width, 3)``, to ``path`` atomically.

    The folder is created if it does not exist.

    Raises:
        OSError: If the folder cannot be written.
    """
    import cv2

    encoded, data = cv2.imencode('.png', pixels[:, :, ::-1])
    if not encoded:
        raise OSError(f'OpenCV could not encode a picture of shape {pixels.shape} as PNG')
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    atomic_write(path, data.tobytes())


# Parts of the file names of usual fonts with Chinese characters, the preferred ones first.
_CHINESE = (
    'notosanscjk',
    'sourcehansans',
    'wqy',
    'msyh',
    'simhei',
    'pingfang',
    'droidsansfallback',
    'notoserifcjk',
    'simsun',
)


@functools.lru_cache(maxsize=1)
def chinese_families() -> List[str]:
    """Return the family of an installed font with Chinese characters; empty if there is none."""
    from matplotlib import font_manager

    paths = font_manager.findSystemFonts()
    for part in _CHINESE:
        for path in sorted(paths):
            name = os.path.basename(path).lower()
            if part in name and 'bold' not in name:
                # Matplotlib's list of fonts may be older than the font.
                font_manager.fontManager.addfont(path)
                return [font_manager.fontManager.ttflist[-1].name]
    return []
