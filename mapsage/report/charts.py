"""Line charts as SVG text in a page.

A page is written at the end of every run, beside other ranks that wait to leave: a chart takes
about a millisecond so, and its text is the reader's font, which has the characters of any language.
"""
from __future__ import annotations

import math
from html import escape
from typing import List, NamedTuple, Optional, Sequence, Tuple

from mapsage.xml_text import xml_text

# The colors of Okabe and Ito, which can be distinguished with every common color blindness
# (https://jfly.uni-koeln.de/color/); yellow, which no white paper shows, is left out.
COLORS = ('#0072b2', '#e69f00', '#009e73', '#d55e00', '#cc79a7', '#56b4e9', '#7f7f7f')
_WIDTH, _HEIGHT, _LEFT, _RIGHT, _TOP, _BOTTOM = 460, 210, 52, 12, 8, 26
MAX_POINTS = 400  # more than pixels would not be seen
_MAX_DOTS = 30


class ChartLine(NamedTuple):
    """A line of a chart: its name and its points (x, y), x ascending."""

    name: str
    points: Sequence[Tuple[float, float]]


def text(value: object) -> str:
    """Return any text as HTML, also a file name whose bytes are no UTF-8."""
    return escape(xml_text(str(value).encode('utf-8', 'backslashreplace').decode('utf-8')))


def line_chart(title: str, lines: Sequence[ChartLine], unit: str = '',
               limits: Optional[Tuple[float, float]] = None) -> str:
    """Return a chart as HTML; '' without a point.

    Args:
        title: Text above it.
        lines: At least one line; colors repeat behind the seventh.
        unit: Unit of y.
        limits: Smallest and largest x; None for those of the points.
    """
    lines = [ChartLine(line.name, thinned(line.points)) for line in lines if line.points]
    if not lines:
        return ''
    every = [point for line in lines for point in line.points]
    low_x, high_x = limits or (min(x for x, _ in every), max(x for x, _ in every))
    low, high = min(y for _, y in every), max(y for _, y in every)
    if low == high:
        low, high = low - (abs(low) * 0.1 or 1), high + (abs(high) * 0.1 or 1)
    marks = ticks(low, high)
    low, high = min(low, marks[0]), max(high, marks[-1])

    def place(x: float, y: float) -> Tuple[float, float]:
        across = (x - low_x) / ((high_x - low_x) or 1)
        return (_LEFT + across * (_WIDTH - _LEFT - _RIGHT),
                _HEIGHT - _BOTTOM - (y - low) / (high - low) * (_HEIGHT - _TOP - _BOTTOM))

    parts = [_axes(marks, ticks(low_x, high_x, 5) if high_x > low_x else [low_x], place,
                   (low_x, high_x), low)]
    for index, line in enumerate(lines):
        color = COLORS[index % len(COLORS)]
        spots = [(*place(x, y), x, y) for x, y in line.points]
        way = ' '.join(f'{left:.1f},{top:.1f}' for left, top, _, _ in spots)
        parts.append(f'<polyline points="{way}" stroke="{color}"/>')
        if len(spots) <= _MAX_DOTS:
            parts += [f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.5" fill="{color}"><title>'
                      f'{text(line.name)} {number(y)} at {number(x)}</title></circle>'
                      for left, top, x, y in spots]
    legend = ''.join(
        f'<span><i style="background:{COLORS[index % len(COLORS)]}"></i>{text(line.name)}</span>'
        for index, line in enumerate(lines)) if len(lines) > 1 else ''
    unit = f' <small>{text(unit)}</small>' if unit else ''
    return (f'<figure class="chart"><figcaption><b>{text(title)}</b>{unit}'
            f'<div class="legend">{legend}</div></figcaption>'
            f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{text(title)}">'
            f'{"".join(parts)}</svg></figure>')


def thinned(points: Sequence[Tuple[float, float]]) -> List[Tuple[float, float]]:
    """Return at most :data:`MAX_POINTS` points, each the mean of neighbors."""
    size = -(-len(points) // MAX_POINTS) or 1
    if size == 1:
        return list(points)
    groups = [points[begin:begin + size] for begin in range(0, len(points), size)]
    return [(group[-1][0], sum(y for _, y in group) / len(group)) for group in groups]


def ticks(low: float, high: float, at_most: int = 5) -> List[float]:
    """Return round numbers, evenly spaced, of which the first and last enclose the range by y."""
    span = (high - low) / at_most
    if not span > 0 or not math.isfinite(span):
        return [low]
    power = 10.0 ** math.floor(math.log10(span))
    step = next((factor * power for factor in (1, 2, 2.5, 5) if factor * power >= span),
                10 * power)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Return a number in few characters: 0.00025, 12.5, 80k."""
    for factor, unit in ((1e9, 'G'), (1e6, 'M'), (1e3, 'k')):
        if abs(value) >= factor * 10:
            return f'{value / factor:.4g}{unit}'
    return f'{value:.4g}'


def _axes(y_marks: Sequence[float], x_marks: Sequence[float], place: object,
          limits: Tuple[float, float], low: float) -> str:
    parts = []
    for mark in y_marks:
        _, top = place(limits[0], mark)  # type: ignore[operator]
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>'
                     f'<text x="{_LEFT - 6}" y="{top + 3.5:.1f}" text-anchor="end">'
                     f'{number(mark)}</text>')
    for mark in x_marks:
        if limits[0] <= mark <= limits[1]:
            left, _ = place(mark, low)  # type: ignore[operator]
            parts.append(f'<text x="{left:.1f}" y="{_HEIGHT - 8}" text-anchor="middle">'
                         f'{number(mark)}</text>')
    return ''.join(parts)
