"""Charts are SVG text whose points lie where the axes say."""
from __future__ import annotations

import math
import re
from typing import List, Tuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mapsage.report.charts import MAX_POINTS, ChartLine, line_chart, text, thinned, ticks


def points_of(chart: str) -> List[List[Tuple[float, float]]]:
    return [[tuple(map(float, pair.split(','))) for pair in found.split()]  # type: ignore[misc]
            for found in re.findall(r'points="([^"]*)"', chart)]


def test_points_lie_where_the_axes_say() -> None:
    chart = line_chart('t', [ChartLine('a', [(0, 0.0), (50, 5.0), (100, 10.0)])])
    (spots,) = points_of(chart)
    marks = {float(label): (float(x), float(y)) for x, y, label in re.findall(
        r'<text x="([\d.]+)" y="([\d.]+)" text-anchor="end">([\d.]+)<', chart)}
    across = {float(label): float(x) for x, label in re.findall(
        r'<text x="([\d.]+)" y="[\d.]+" text-anchor="middle">([\d.]+)<', chart)}
    for (x, y), (left, top) in zip([(0, 0.0), (100, 10.0)], [spots[0], spots[2]]):
        assert left == pytest.approx(across[x], abs=.11)
        assert top == pytest.approx(marks[y][1] - 3.5, abs=.11)
    assert spots[1] == pytest.approx(
        [(spots[0][axis] + spots[2][axis]) / 2 for axis in (0, 1)], abs=.11)


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12))
def test_ticks_enclose_the_range_and_are_few(low: float, span: float) -> None:
    high = low + span
    found = ticks(low, high)
    if high > low and abs(low) < 1e6 * span:
        assert 2 <= len(found) <= 8
        step = found[1] - found[0]
        assert found[0] <= low + 1e-6 * step and found[-1] >= high - 1e-6 * step
    assert all(map(math.isfinite, found))


def test_odd_values() -> None:
    assert line_chart('t', [ChartLine('a', [])]) == '' == line_chart('t', [])
    for points in ([(3, 7.0)], [(1, 2.0), (2, 2.0)], [(0, 0.0)], [(1, -1e300), (2, 1e300)]):
        chart = line_chart('<t>', [ChartLine('&', points)])
        assert 'nan' not in chart and 'inf' not in chart and '&lt;t&gt;' in chart
    assert len(thinned([(x, 1.0) for x in range(10001)])) <= MAX_POINTS
    assert thinned([(x, float(x)) for x in range(1000)])[-1][0] == 999


def test_any_text() -> None:
    assert text('<a "b">&\udcb5') == '&lt;a &quot;b&quot;&gt;&amp;\\udcb5'
