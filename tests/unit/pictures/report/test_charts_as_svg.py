"""Charts as SVG text: the points agree with the axes."""

from __future__ import annotations

import math
import re
from typing import List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.pictures.report.charts import MAX_POINTS, ChartLine, line_chart, text, thinned, ticks


def points_of(chart: str) -> List[List[Tuple[float, float]]]:
    return [
        [tuple(map(float, pair.split(','))) for pair in points.split()]  # type: ignore[misc]
        for points in re.findall(r'points="([^"]*)"', chart)
    ]


def test_points_agree_with_the_axes() -> None:
    chart = line_chart('t', [ChartLine('a', [(0, 0.0), (50, 5.0), (100, 10.0)])])
    (vertices,) = points_of(chart)
    marks = {
        float(label): (float(x), float(y))
        for x, y, label in re.findall(
            r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="end">([\d.]+)<', chart
        )
    }
    across = {
        float(label): float(x)
        for x, label in re.findall(
            r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([\d.]+)<', chart
        )
    }
    for (x, y), (left, top) in zip([(0, 0.0), (100, 10.0)], [vertices[0], vertices[2]]):
        assert left == pytest.approx(across[x], abs=0.11)
        assert top == pytest.approx(marks[y][1] - 3.5, abs=0.11)
    assert vertices[1] == pytest.approx(
        [(vertices[0][axis] + vertices[2][axis]) / 2 for axis in (0, 1)], abs=0.11
    )


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_enclose_the_range_and_are_few(low: float, span: float) -> None:
    high = low + span
    marks = ticks(low, high)
    if high > low and abs(low) < 1e6 * span:
        assert 2 <= len(marks) <= 8
        step = marks[1] - marks[0]
        assert marks[0] <= low + 1e-6 * step and marks[-1] >= high - 1e-6 * step
    assert all(map(math.isfinite, marks))


def test_odd_values() -> None:
    assert line_chart('t', [ChartLine('a', [])]) == '' == line_chart('t', [])
    for points in ([(3, 7.0)], [(1, 2.0), (2, 2.0)], [(0, 0.0)], [(1, -1e300), (2, 1e300)]):
        chart = line_chart('<t>', [ChartLine('&', points)])
        assert 'nan' not in chart and 'inf' not in chart and '&lt;t&gt;' in chart
    assert len(thinned([(x, 1.0) for x in range(10001)])) <= MAX_POINTS
    assert thinned([(x, float(x)) for x in range(1000)])[-1][0] == 999


def test_any_text() -> None:
    assert text('<a "b">&\udcb5') == '&lt;a &quot;b&quot;&gt;&amp;\\udcb5'
