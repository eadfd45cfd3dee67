"""Picture of a confusion matrix: one row per true class, in percent of the row.

Percentages make rows comparable although classes differ in size; the pixels of a row are written
next to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Sequence, Union

import numpy as np

from .canvas import FAINT, INK, Canvas, save_png

# Not imported at run time: the room draws pictures on machines without PyTorch too.
if TYPE_CHECKING:
    import torch
    from matplotlib.axes import Axes

# All in pixels.
_MARGIN, _HEADER, _LETTER, _SUMS, _SIDE = 28, 84, 7, 96, 1280
_MIN_CELL, _MAX_CELL = 11, 84
# The smallest cell with room for '100.0' and '999.9k'.
_TEXT_CELL = 46


def render_confusion(
    matrix: Union[np.ndarray, torch.Tensor],
    classes: Sequence[str],
    title: str = 'Confusion matrix',
    subtitle: str = '',
) -> np.ndarray:
    """Draw a confusion matrix with cells in percent of their row.

    A higher percentage gives a darker blue, so the picture is readable without color vision. If
    there is room, a cell contains its percentage and its number of pixels. Rows of classes that do
    not occur are gray.

    Args:
        matrix: Confusion matrix, integers ``(C, C)``; rows are the truth.
        classes: Names of the C classes.
        title: First line.
        subtitle: Second line.

    Returns:
        Picture, RGB uint8 ``(H, W, 3)``.

    Raises:
        ValueError: If the number of names differs from the number of classes.
    """
    counts = np.asarray(matrix if isinstance(matrix, np.ndarray) else matrix.cpu())
    number = len(classes)
    if counts.shape != (number, number):
        raise ValueError(
            f'a confusion matrix of shape {counts.shape} has {number} class names, '
            'expected one name for every row and column'
        )
    names = [name if len(name) <= 24 else f'{name[:21]}...' for name in map(str, classes)]
    cell = max(_MIN_CELL, min(_MAX_CELL, _SIDE // number))
    size = 7.0 if cell < 16 else 9.5
    label_space = _LETTER * max(4, *(len(name) for name in names)) + 14
    left, top, side = _MARGIN + 22 + label_space, _HEADER + 26 + label_space, cell * number
    canvas = Canvas(max(left + side + _SUMS, 460) + _MARGIN, top + side + _MARGIN)
    canvas.heading(_MARGIN, 32, title, subtitle)
    canvas.text(left, _HEADER + 8, 'predicted, % of the row', size=10, color=FAINT)
    canvas.text(left + side + 14, top - 10, 'pixels', size=10, color=FAINT)
    canvas.text(_MARGIN, top - 10, 'truth', size=10, color=FAINT)
    axes = canvas.axes(left, top, side, side)
    _draw_cells(axes, counts, cell)
    axes.set_xticks(range(number))
    axes.set_yticks(range(number))
    # Without parse_math=False, a class named 'a$b$' would be drawn as a formula.
    axes.set_xticklabels(names, rotation=90, fontsize=size, parse_math=False)
    axes.set_yticklabels(names, fontsize=size, parse_math=False)
    axes.tick_params(
        length=0, top=True, labeltop=True, bottom=False, labelbottom=False, labelcolor=INK, pad=5
    )
    for row, total in enumerate(counts.sum(1)):
        canvas.text(
            left + side + 14, top + row * cell + cell // 2 + 4, short_count(int(total)), size=size
        )
    return canvas.pixels()


def _draw_cells(axes: Axes, counts: np.ndarray, cell: int) -> None:
    number, totals = len(counts), counts.sum(1, keepdims=True)
    shares = np.ma.masked_array(
        100 * counts / np.maximum(totals, 1), np.broadcast_to(totals == 0, counts.shape)
    )
    axes.imshow(shares, cmap='Blues', vmin=0, vmax=100, aspect='auto', interpolation='nearest')
    axes.set_facecolor('#d8dbdf')
    edges = np.arange(1, number) - 0.5
    axes.hlines(edges, -0.5, number - 0.5, color='#ffffff', linewidth=0.8)
    axes.vlines(edges, -0.5, number - 0.5, color='#ffffff', linewidth=0.8)
    for spine in axes.spines.values():
        spine.set_color('#a8aeb6')
    if cell < _TEXT_CELL:
        return
    for (row, column), count in np.ndenumerate(counts):
        if totals[row, 0]:
            color = '#ffffff' if shares[row, column] > 65 else INK
            for below, text, sizes in (
                (-0.13, f'{shares[row, column]:.1f}', (8.5, 10)),
                (0.22, short_count(int(count)), (7, 8)),
            ):
                axes.text(
                    column,
                    row + below,
                    text,
                    ha='center',
                    va='center',
                    fontsize=sizes[cell > 60],
                    color=color,
                )


def plot_confusion(
    path: str,
    matrix: Union[np.ndarray, torch.Tensor],
    classes: Sequence[str],
    title: str = 'Confusion matrix',
    subtitle: str = '',
) -> None:
    """Draw a confusion matrix and write it to ``path`` as PNG, atomically.

    Args:
        path: Path of the file; its folder is created.
        matrix, classes, title, subtitle: Arguments of :func:`render_confusion`.

    Raises:
        ValueError: As in :func:`render_confusion`.
        OSError: If the folder cannot be written.
    """
    save_png(path, render_confusion(matrix, classes, title, subtitle))


def short_count(count: int) -> str:
    """Return a count in at most six characters: 999, 12.3k, 4.5M, 678.9G."""
    for factor, unit in ((10**9, 'G'), (10**6, 'M'), (10**3, 'k')):
        # A count that would round to 1000.0 of a unit is written as 1.0 of the next unit.
        if count >= factor * 0.99995 and count >= 1000:
            return f'{count / factor:.1f}{unit}'
    return str(count)
