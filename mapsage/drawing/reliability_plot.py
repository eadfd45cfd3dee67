"""A reliability diagram: how often a model is right, against how sure it is."""
from __future__ import annotations

from typing import Any

import numpy as np

from .canvas import FAINT, INK, Canvas, save_png
from .confusion_plot import short_count

_MARGIN, _HEADER, _SIDE, _LOW, _GAP, _LEFT = 28, 84, 480, 120, 56, 62
_RIGHT_COLOR, _GAP_COLOR = '#2f6fb3', '#d1495b'


def render_reliability(pixels: Any, confidence: Any, right: Any, title: str = 'Calibration',
                       subtitle: str = '') -> np.ndarray:
    """Draw the share of right pixels of each bin of probability, and how many pixels it has.

    On the diagonal probabilities are what they say. A bar that ends below it belongs to a model
    that is too sure; the distance is drawn in red.

    Args:
        pixels: Number of pixels of each bin of equal width, ``(M,)``.
        confidence: Mean probability of each bin, 0..1, ``(M,)``; not used without pixels.
        right: Share of right pixels of each bin, as ``confidence``.
        title: First line.
        subtitle: Second line.

    Returns:
        Picture, RGB uint8 ``(H, W, 3)``.

    Raises:
        ValueError: If the three differ in length, or are empty.
    """
    pixels, confidence, right = (np.asarray(each, float) for each in (pixels, confidence, right))
    bins = len(pixels)
    if not bins or not len(confidence) == len(right) == bins:
        raise ValueError(f'{bins} counts, {len(confidence)} probabilities, {len(right)} shares of '
                         'right pixels, expected one of each for every bin')
    there = pixels > 0
    width, middles = 1 / bins, (np.arange(bins) + 0.5)[there] / bins
    accuracy, confidence = right[there], confidence[there]
    left, top = _MARGIN + _LEFT, _HEADER + 14
    canvas = Canvas(left + _SIDE + _MARGIN + 30, top + _SIDE + _GAP + _LOW + _GAP + _MARGIN)
    canvas.text(_MARGIN, 32, title, size=15, weight='bold')
    canvas.text(_MARGIN, 56, subtitle, size=11, color=FAINT)
    axes = canvas.axes(left, top, _SIDE, _SIDE)
    axes.bar(middles, accuracy, width * 0.94, color=_RIGHT_COLOR)
    axes.bar(middles, confidence - accuracy, width * 0.94, bottom=accuracy, color=_GAP_COLOR,
             alpha=0.45, edgecolor=_GAP_COLOR, linewidth=1)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle='--')
    axes.set_ylabel('share of right pixels', color=INK)
    share = canvas.axes(left, top + _SIDE + _GAP, _SIDE, _LOW)
    share.bar(middles, pixels[there] / max(1, pixels.sum()), width * 0.94, color='#8a929b')
    share.set_ylabel('share of pixels', color=INK)
    share.set_xlabel(f'probability of the predicted class ({short_count(int(pixels.sum()))} '
                     'pixels)', color=INK)
    for each in (axes, share):
        each.set_xlim(0, 1)
        each.set_ylim(0, 1)
        each.grid(color='#e3e6ea', linewidth=0.8)
        each.set_axisbelow(True)
        each.tick_params(labelsize=9, labelcolor=INK, length=0)
        for spine in each.spines.values():
            spine.set_color('#a8aeb6')
    return canvas.pixels()


def plot_reliability(path: str, pixels: Any, confidence: Any, right: Any,
                     title: str = 'Calibration', subtitle: str = '') -> None:
    """Draw a reliability diagram and write it to ``path`` in one step, as PNG.

    Args:
        path: Path of the file; its folder is created.
        pixels, confidence, right, title, subtitle: Arguments of :func:`render_reliability`.

    Raises:
        ValueError: For the same reason as in :func:`render_reliability`.
        OSError: If the folder cannot be written.
    """
    save_png(path, render_reliability(pixels, confidence, right, title, subtitle))
