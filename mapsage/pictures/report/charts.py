"""Line charts as SVG text in an HTML page.

Rank 0 writes the page at the end of a run while the other ranks wait, so a chart must be fast: SVG
text takes about a millisecond. The browser draws the letters, with fonts for any language.
"""

from __future__ import annotations

import math
from html import escape
from typing import Callable, List, NamedTuple, Optional, Sequence, Tuple

from mapsage.base.files import xml_text

# The palette of Okabe and Ito is distinguishable with every common color blindness
# (https://jfly.uni-koeln.de/color/). Its yellow is left out, because it is invisible on white.
COLORS = ('#0072b2', '#e69f00', '#009e73', '#d55e00', '#cc79a7', '#56b4e9', '#7f7f7f')
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 210, 52, 12, 8, 26
# The plot is about 400 pixels wide: more points would not be visible.
MAX_POINTS = 400
_MAX_DOTS = 30


class ChartLine(NamedTuple):
    """A line of a chart: its name and its points (x, y), sorted by x."""

    name: str
    points: Sequence[Tuple[float, float]]


def text(value: object) -> str:
    """Return any text as HTML, also a file name with bytes that are not UTF-8."""
    return escape(xml_text(str(value).encode('utf-8', 'backslashreplace').decode('utf-8')))


def line_chart(
    title: str,
    lines: Sequence[ChartLine],
    unit: str = '',
    limits: Optional[Tuple[float, float]] = None,
) -> str:
    """Return a chart as HTML; '' if no line has a point.

    Args:
        title: Text above the chart.
        lines: Lines of the chart; colors repeat after the seventh.
        unit: Unit of y.
        limits: Smallest and largest x; None for the range of the points.
    """
    lines = [ChartLine(line.name, thinned(line.points)) for line in lines if line.points]
    if not lines:
        return ''
    points = [point for line in lines for point in line.points]
    low_x, high_x = limits or (min(x for x, _ in points), max(x for x, _ in points))
    low, high = min(y for _, y in points), max(y for _, y in points)
    # A constant line gets a range of y around it.
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    marks = ticks(low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])

    def to_pixels(x: float, y: float) -> Tuple[float, float]:
        across = (x - low_x) / ((high_x - low_x) or 1)
        return (
            _LEFT + across * (_WIDTH - _LEFT - _RIGHT),
            _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM),
        )

    elements = [
        _axes(
            marks,
            ticks(low_x, high_x, 5) if high_x > low_x else [low_x],
            to_pixels,
            (low_x, high_x),
            low,
        )
    ]
    for index, line in enumerate(lines):
        color = COLORS[index % len(COLORS)]
        vertices = [(*to_pixels(x, y), x, y) for x, y in line.points]
        path = ' '.join(f'{left:.1f},{top:.1f}' for left, top, _, _ in vertices)
        elements.append(f'<polyline points="{path}" stroke="{color}"/>')
        if len(vertices) <= _MAX_DOTS:
            elements += [
                f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{color}"><title>'
                f'{text(line.name)} {number(y)} at {number(x)}</title></circle>'
                for left, top, x, y in vertices
            ]
    legend = (
        ''.join(
            f'<span><i style="background:{COLORS[index % len(COLORS)]}"></i>{text(line.name)}</span>'
            for index, line in enumerate(lines)
        )
        if len(lines) > 1
        else ''
    )
    unit = f' <small>{text(unit)}</small>' if unit else ''
    return (
        f'<figure class="chart"><figcaption><b>{text(title)}</b>{unit}'
        f'<div class="legend">{legend}</div></figcaption>'
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(title)}">'
        f'{"".join(elements)}</svg></figure>'
    )


def thinned(points: Sequence[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """Return at most :data:`MAX_POINTS` points, by averaging groups of neighbors."""
    size = -(-len(points) // MAX_POINTS) or 1
    if size == 1:
        return list(points)
    groups = [points[begin : begin + size] for begin in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float, at_most: int = 5) -> List[float]:
    """Return evenly spaced round numbers that enclose the range from ``low`` to ``high``."""
    span = (high - low) / at_most
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= span), 10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Return a number as short text: 0.00025, 12.5, 80k."""
    for factor, unit in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(value) >= factor * 10:
            return f'{value / factor:.4g}{unit}'
    return f'{value:.4g}'


def _axes(
    y_marks: Sequence[float],
    x_marks: Sequence[float],
    to_pixels: Callable[[float, float], Tuple[float, float]],
    limits: Tuple[float, float],
    low: float,
) -> str:
    elements = []
    for mark in y_marks:
        _, top = to_pixels(limits[0], mark)
        elements.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>'
            f'<text x="{_LEFT - 6}" y="{top + 3.5:.1f}" text-anchor="end">{number(mark)}</text>'
        )
    for mark in x_marks:
        if limits[0] <= mark <= limits[1]:
            left, _ = to_pixels(mark, low)
            elements.append(
                f'<text x="{left:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">{number(mark)}</text>'
            )
    return ''.join(elements)
