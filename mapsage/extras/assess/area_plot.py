"""Areas of classes with their intervals, and the areas that a count of the map's pixels gives.

`mapsage assess` makes the estimates. A class has a line of its own, from the lower to the
upper end of the interval; the scale is logarithmic if the areas differ by a factor above 20, since
a rare class would be a dot at zero otherwise.
"""

from __future__ import annotations

from typing import NamedTuple, Sequence

import numpy as np

from mapsage.pictures.canvas import FAINT, INK, Canvas

# In pixels.
_LEFT, _RIGHT, _HEADER, _LINE, _AXIS, _WIDTH = 190, 40, 96, 44, 66, 620
_ESTIMATE, _DOUBTFUL, _MAPPED = '#0072b2', '#d55e00', '#7f7f7f'
_LARGEST_RATIO = 20


class AreaLine(NamedTuple):
    """A class: its name, estimate, interval and area on the map, and whether it has a warning."""

    name: str
    value: float
    low: float
    high: float
    mapped: float
    is_doubtful: bool


def render_areas(lines: Sequence[AreaLine], unit: str, title: str, subtitle: str) -> np.ndarray:
    """Draw the areas of classes.

    Args:
        lines: The classes, from top to bottom; at least one.
        unit: Unit of the areas.
        title: First line.
        subtitle: Second line.

    Returns:
        Picture, RGB uint8 ``(H, W, 3)``.
    """
    height = _LINE * len(lines)
    canvas = Canvas(_LEFT + _WIDTH + _RIGHT, _HEADER + height + _AXIS)
    canvas.text(24, 32, title, size=14, weight='bold')
    canvas.text(24, 54, subtitle, size=10, color=FAINT)
    axes = canvas.axes(_LEFT, _HEADER, _WIDTH, height)
    for name, marker, color, number in (
        ('estimate, 95 % interval', 'o', _ESTIMATE, 0),
        ('cautious interval: see the warning', 's', _DOUBTFUL, 1),
        ('area on the map', '|', _MAPPED, 2),
    ):
        if color == _DOUBTFUL and not any(line.is_doubtful for line in lines):
            continue
        axes.plot(
            [],
            [],
            marker=marker,
            color=color,
            linestyle='none',
            label=name,
            markersize=7 if number < 2 else 13,
            markeredgewidth=2,
        )
    axes.legend(
        loc='lower left',
        bbox_to_anchor=(-0.01, 1.0),
        ncol=3,
        frameon=False,
        fontsize=9,
        handletextpad=0.3,
        columnspacing=1.4,
    )
    highest = max(max(line.high, line.mapped) for line in lines)
    positive = [
        value for line in lines for value in (line.value, line.mapped, line.low) if value > 0
    ]
    is_wide = bool(positive) and highest > _LARGEST_RATIO * min(
        max(line.value, line.mapped) or highest for line in lines
    )
    lowest = max(min(positive) / 1.5, highest / 1e6) if is_wide else 0.0
    for number, line in enumerate(lines):
        color = _DOUBTFUL if line.is_doubtful else _ESTIMATE
        axes.plot(
            [max(line.mapped, lowest)],
            [number],
            marker='|',
            color=_MAPPED,
            markersize=26,
            markeredgewidth=2,
        )
        axes.plot(
            [max(line.low, lowest), max(line.high, lowest)],
            [number, number],
            color=color,
            linewidth=2,
        )
        for end in (line.low, line.high):
            axes.plot(
                [max(end, lowest)] * 2, [number - 0.14, number + 0.14], color=color, linewidth=2
            )
        axes.plot(
            [max(line.value, lowest)],
            [number],
            marker='s' if line.is_doubtful else 'o',
            color=color,
            markersize=7,
        )
        canvas.text(24, _HEADER + round(_LINE * (number + 0.5)) + 4, _shortened(line.name), size=10)
    axes.set_ylim(len(lines) - 0.5, -0.5)
    if is_wide:
        from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

        axes.set_xscale('log')
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda area, _: f'{area:,.6g}'))
        axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(lowest, highest * (1.3 if is_wide else 1.05))
    axes.set_yticks([])
    axes.tick_params(labelsize=9, colors=FAINT)
    axes.set_xlabel(
        f'area, {unit}' + (' (logarithmic scale)' if is_wide else ''), color=INK, fontsize=10
    )
    axes.grid(axis='x', color='#e3e7eb', linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ('top', 'right', 'left'):
        axes.spines[side].set_visible(False)
    return canvas.pixels()


def _shortened(name: str, longest: int = 22) -> str:
    return name if len(name) <= longest else f'{name[: longest - 1]}…'
