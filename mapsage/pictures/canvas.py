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

    def legend(
        self,
        left: int,
        top: int,
        entries: Sequence[Tuple[str, np.ndarray]],
        columns: int,
        column_width: int,
        line_height: int,
    ) -> None:
        """Write names next to color swatches, ``columns`` entries per line; lengths in pixels.

        Args:
            left: Left edge of the first swatch.
            top: Upper edge of the first swatch.
            entries: Names and swatches, ``(18, 18, 3)`` uint8 RGB.
            columns: Number of entries per line.
            column_width: Distance from one entry of a line to the next.
            line_height: Distance from one line to the next.
        """
        for index, (name, swatch) in enumerate(entries):
            x, y = left + index % columns * column_width, top + index // columns * line_height
            self.picture(x, y, swatch)
            self.text(x + 26, y + 14, name, size=10)

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
