"""The charts of docs/benchmarks.md show the figures of its tables."""

from __future__ import annotations

import sys
from html import unescape

import pytest
from support import ROOT, main_leg

sys.path.insert(0, str(ROOT / 'scripts' / 'docs_site'))

pytestmark = main_leg


@pytest.mark.parametrize('name', ['windows', 'peers', 'steps', 'cards'])
def test_a_chart_shows_the_figures_of_its_table(name: str) -> None:
    import chart_benchmarks as charts

    page = charts.PAGE.read_text(encoding='utf-8')
    chart = {chart.name: chart for chart in charts.CHARTS}[name]
    figures = charts.read_figures(page, chart)
    assert len(figures) > 2
    kept = unescape((charts.FOLDER / f'{name}.svg').read_text(encoding='utf-8'))
    assert charts.describe(figures) in kept, 'run scripts/docs_site/chart_benchmarks.py'
    assert f'](images/benchmarks/{name}.svg)' in page
