"""Reliability diagram: share of correct pixels against the model's probability.

The numbers come from `evaluation.calibration.reliability`. The lower chart shows the pixels of the
bins, because a bin with few pixels says little.
"""

from __future__ import annotations

from typing import Sequence, Union

import numpy as np

from mapsage.pictures.canvas import INK, Canvas, save_png
from mapsage.pictures.confusion_plot import short_count

# In pixels.
_MARGIN, _HEADER, _SIDE, _LOW, _GAP, _LEFT = 28, 84, 480, 120, 56, 62
_RIGHT_COLOR, _GAP_COLOR = '#2f6fb3', '#d1495b'
_Numbers = Union[np.ndarray, Sequence[float]]


def render_reliability(
    pixels: _Numbers,
    confidence: _Numbers,
    right: _Numbers,
    title: str = 'Calibration',
    subtitle: str = '',
) -> np.ndarray:
    """Draw the share of correct pixels and the number of pixels by bin of probability.

    On the diagonal a model is calibrated. A bar that ends below it means that the model is
    overconfident there; the distance is drawn in red.

    Args:
        pixels: Pixels in the bins, which have equal width, ``(M,)``.
        confidence: Mean probability in the bins, 0..1, ``(M,)``; ignored in bins without pixels.
        right: Share of correct pixels in the bins, like ``confidence``.
        title: First line.
        subtitle: Second line.

    Returns:
        Picture, RGB uint8 ``(H, W, 3)``.

    Raises:
        ValueError: If the three differ in length, or are empty.
    """
    pixels, confidence, right = (
        np.asarray(values, float) for values in (pixels, confidence, right)
    )
    bins = len(pixels)
    if not bins or not len(confidence) == len(right) == bins:
        raise ValueError(
            f'{bins} counts, {len(confidence)} probabilities, {len(right)} shares of '
            'right pixels, expected one of each for every bin'
        )
    used = pixels > 0
    width, centers = 1 / bins, (np.arange(bins) + 0.5)[used] / bins
    accuracy, confidence = right[used], confidence[used]
    left, top = _MARGIN + _LEFT, _HEADER + 14
    canvas = Canvas(left + _SIDE + _MARGIN + 30, top + _SIDE + _GAP + _LOW + _GAP + _MARGIN)
    canvas.heading(_MARGIN, 32, title, subtitle)
    axes = canvas.axes(left, top, _SIDE, _SIDE)
    axes.bar(centers, accuracy, width * 0.94, color=_RIGHT_COLOR)
    axes.bar(
        centers,
        confidence - accuracy,
        width * 0.94,
        bottom=accuracy,
        color=_GAP_COLOR,
        alpha=0.45,
        edgecolor=_GAP_COLOR,
        linewidth=1,
    )
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle='--')
    axes.set_ylabel('share of right pixels', color=INK)
    share_axes = canvas.axes(left, top + _SIDE + _GAP, _SIDE, _LOW)
    share_axes.bar(centers, pixels[used] / max(1, pixels.sum()), width * 0.94, color='#8a929b')
    share_axes.set_ylabel('share of pixels', color=INK)
    share_axes.set_xlabel(
        f'probability of the predicted class ({short_count(int(pixels.sum()))} pixels)', color=INK
    )
    for chart in (axes, share_axes):
        chart.set_xlim(0, 1)
        chart.set_ylim(0, 1)
        chart.grid(color='#e3e6ea', linewidth=0.8)
        chart.set_axisbelow(True)
        chart.tick_params(labelsize=9, labelcolor=INK, length=0)
        for spine in chart.spines.values():
            spine.set_color('#a8aeb6')
    return canvas.pixels()


def plot_reliability(
    path: str,
    pixels: _Numbers,
    confidence: _Numbers,
    right: _Numbers,
    title: str = 'Calibration',
    subtitle: str = '',
) -> None:
    """Draw a reliability diagram and write it to ``path`` as PNG, atomically.

    Args:
        path: Path of the file; its folder is created.
        pixels, confidence, right, title, subtitle: Arguments of :func:`render_reliability`.

    Raises:
        ValueError: As in :func:`render_reliability`.
        OSError: If the folder cannot be written.
    """
    save_png(path, render_reliability(pixels, confidence, right, title, subtitle))
