"""Draw the charts of docs/benchmarks.md from the tables of that page.

    python scripts/docs_site/chart_benchmarks.py

A figure that changes in a table changes in its chart when this has run again: each SVG holds the
figures that it shows, and tests/unit/test_benchmark_charts.py compares them with the page.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Dict, List, NamedTuple, Tuple

import matplotlib

matplotlib.use('Agg')
import matplotlib.pyplot as plt  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from mapsage.pictures.report.charts import COLORS  # noqa: E402

PAGE = ROOT / 'docs/benchmarks.md'
FOLDER = ROOT / 'docs/images/benchmarks'


class Chart(NamedTuple):
    """Bars from a table of the page.

    Attributes:
        name: Name of the file without suffix.
        title: What the bars show, with the unit.
        head: First cells of the table's head, by which it is found.
        columns: Position and name of each column of figures that is drawn.
        line: Value of a line across the bars, such as where both sides are equal; 0 for none.
    """

    name: str
    title: str
    head: str
    columns: Dict[int, str]
    line: float = 0


CHARTS = (
    Chart(
        'windows',
        'A random window with its labels, milliseconds (shorter is better)',
        '| scenes, ms a sample |',
        {
            5: 'MapSage, fast copy',
            6: 'rasterio by hand, fast copy',
            2: 'MapSage',
            4: 'rasterio by hand',
            3: 'TorchGeo',
        },
    ),
    Chart(
        'peers',
        'Time of the usual way over the time of MapSage (longer is better)',
        '| job | MapSage | peer |',
        {3: 'times as long'},
        line=1,
    ),
    Chart(
        'steps',
        'What MapSage adds to a stock training step, milliseconds',
        '| model | stock step, ms |',
        {1: 'stock step', 3: 'MapSage adds'},
    ),
    Chart(
        'cards',
        'Score of the demo (mIoU) by the number of cards',
        '| cards | ranks | mIoU |',
        {2: 'mIoU'},
    ),
)
Figures = List[Tuple[str, List[float]]]


def read_figures(page: str, chart: Chart) -> Figures:
    """Return the label of each row of a chart's table, and the first number of each column.

    Rows that lack one of the numbers, and those of other units (exchange), are left out.
    """
    table = re.search(rf'^{re.escape(chart.head)}.*\n\|[-| ]+\|\n((?:\|.*\n)+)', page, re.MULTILINE)
    if table is None:
        raise ValueError(f'{PAGE} has no table that begins with {chart.head!r}')
    figures: Figures = []
    before = ''
    for row in table[1].splitlines():
        cells = [cell.strip() for cell in row.strip('|').split('|')]
        numbers = [re.match(r'\+?([0-9.]+)', cells[column]) for column in chart.columns]
        label = before if cells[0] == 'the same' else cells[0].partition(', ')[0]
        before = label
        if all(numbers) and not label.startswith('exchange'):
            peer = re.match(r'(.*): [0-9.]+$', cells[2]) if chart.name == 'peers' else None
            label = f'{label}, {peer[1]}' if peer else label
            if chart.name == 'windows':
                label = cells[0]
            label = label.replace('`', '')
            figures.append((label, [float(number[1]) for number in numbers if number]))
    return figures


def describe(figures: Figures) -> str:
    """Return the text that an SVG holds on its figures."""
    return json.dumps(figures, ensure_ascii=False)


def draw(chart: Chart, figures: Figures) -> None:
    """Write a chart as SVG that reads on light and dark pages, and on a phone."""
    plt.rcParams.update({'svg.hashsalt': chart.name, 'svg.fonttype': 'none', 'font.size': 11})
    plt.rcParams['font.family'] = 'sans-serif'
    names = list(chart.columns.values())
    figure, axes = plt.subplots(figsize=(7.5, 1.2 + 0.28 * len(figures) * (len(names) + 0.6)))
    height = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [row + (index - (len(names) - 1) / 2) * height for row in range(len(figures))]
        values = [numbers[index] for _, numbers in figures]
        bars = axes.barh(places, values, height * 0.9, color=COLORS[index], label=name)
        axes.bar_label(bars, fmt='%g', padding=3, fontsize=10)
    axes.set_yticks(range(len(figures)), [label for label, _ in figures])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[['top', 'right']].set_visible(False)
    if chart.line:
        axes.axvline(chart.line, color='#7f7f7f', linestyle='--', linewidth=1)
    if len(names) > 1:
        axes.legend(frameon=False, loc='best', fontsize=10)
    figure.suptitle(chart.title, fontsize=12, x=0.02, ha='left')
    figure.tight_layout()
    FOLDER.mkdir(parents=True, exist_ok=True)
    metadata = {'Date': None, 'Description': describe(figures)}
    figure.savefig(FOLDER / f'{chart.name}.svg', metadata=metadata, facecolor='white')
    plt.close(figure)


if __name__ == '__main__':
    text = PAGE.read_text(encoding='utf-8')
    for chart in CHARTS:
        draw(chart, read_figures(text, chart))
