"""Comparison of several runs: a table for the terminal and an HTML page.

Columns are runs, in the order given. Scores are comparable only if the runs have the same classes
and labels; a warning says so if they do not.
"""

from __future__ import annotations

from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Callable, Dict, List, NamedTuple, Optional, Sequence, Union

from mapsage.base.files import atomic_write

from . import class_sections, fragments, sections
from .charts import ChartLine, line_chart, number, text
from .page import guarded, page
from .pictures import picture_url
from .record import ReportError
from .runs import ClassTable, Run, find_run, not_comparable


class RunsCompared(NamedTuple):
    """A finished comparison: the table for the terminal, and the path of the page."""

    table: str
    page: Path


def compare_runs(paths: Sequence[Union[str, Path]], out: Union[str, Path]) -> RunsCompared:
    """Compare runs, in the order given.

    Args:
        paths: Work dirs, or folders of one start, ``WORK_DIR/TIMESTAMP``; at least two.
        out: HTML file to write.

    Raises:
        ReportError: If there are fewer than two paths, two paths are the same run, or a folder
            contains no run.
        OSError: If the page cannot be written.
    """
    if len(paths) < 2:
        raise ReportError(f'{len(paths)} run(s) to compare, expected two or more work dirs')
    runs = [find_run(path)[0] for path in paths]
    for index, run in enumerate(runs):
        for earlier, path in zip(runs[:index], paths):
            if earlier.starts[0].folder.resolve() == run.starts[0].folder.resolve():
                raise ReportError(
                    f'{path} and {paths[index]} are the same run, expected every run '
                    f'once; an earlier run of a folder is WORK_DIR/TIMESTAMP'
                )
    makers = _overview, _curves, _classes, _config, _confusion, _previews
    html = page('Runs compared', [guarded(partial(maker, runs)) for maker in makers])
    target = Path(out)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, html.encode('utf-8', 'backslashreplace'))
    return RunsCompared(_as_text(runs), target)


def _label(runs: Sequence[Run], run: Run) -> str:
    """Return a short name that is unique among the runs."""
    if [candidate.name for candidate in runs].count(run.name) == 1:
        return run.name
    return str(run.work_dir / run.starts[0].folder.name)


def _scores(run: Run) -> Dict[str, float]:
    final = run.final()
    return dict(final.metrics) if final else {}


def _score_names(runs: Sequence[Run]) -> List[str]:
    return list(dict.fromkeys(name for run in runs for name in _scores(run)))


def _text_rows(runs: Sequence[Run], **describe: Callable[[Run], str]) -> List[List[str]]:
    """Return a row for each name, with what its function says of the runs, as HTML."""
    return [[name, *(text(function(run)) for run in runs)] for name, function in describe.items()]


def _overview(runs: Sequence[Run]) -> str:
    rows = _text_rows(
        runs,
        config=lambda run: run.config_name,
        started=lambda run: fragments.date(run.starts[0].started),
        end=lambda run: sections.status_words(run.last),
    )
    for name in _score_names(runs):
        values = [_scores(run).get(name) for run in runs]
        rows.append(
            [
                text(name),
                *(
                    _with_best(values)
                    if sections.is_percentage(name)
                    else map(fragments.figure, values)
                ),
            ]
        )
    rows += _text_rows(
        runs, steps=sections.steps_line, time=sections.time_line, devices=sections.device_line
    )
    return fragments.section(
        'Runs', fragments.table(rows, _head(runs), 'config'), _not_comparable(runs)
    )


def _head(runs: Sequence[Run]) -> List[str]:
    return ['', *(text(_label(runs, run)) for run in runs)]


def _with_best(values: Sequence[Optional[float]]) -> List[str]:
    known = [value for value in values if value is not None]
    best = max(known) if len(set(known)) > 1 else None
    return [
        f'<span class="best">{value:.2f}</span>'
        if value is not None and value == best
        else fragments.figure(value)
        for value in values
    ]


def _tables(runs: Sequence[Run]) -> List[Optional[ClassTable]]:
    """Return the first class table of each run's last evaluation."""
    finals = [run.final() for run in runs]
    return [final.tables[0] if final is not None and final.tables else None for final in finals]


def _not_comparable(runs: Sequence[Run]) -> str:
    """Return a warning if the runs were scored on different labels or classes."""
    return not_comparable([table for table in _tables(runs) if table is not None])


def _curves(runs: Sequence[Run]) -> str:
    labels = [_label(runs, run) for run in runs]
    curves_of_runs = [run.curves() for run in runs]
    scores = [run.score() for run in runs]
    metric = next((name for name, _ in scores if name), 'score')
    limits = (0.0, float(max(run.iterations for run in runs) or 1))
    charts = [(metric, '', [points for _, points in scores])] + [
        (title, unit, [curves.get(key, []) for curves in curves_of_runs])
        for key, title, unit in (
            ('loss', 'Loss', ''),
            ('lr', 'Learning rate', ''),
            ('time', 'Time of a step', 's'),
        )
    ]
    body = ''.join(
        line_chart(title, list(map(ChartLine, labels, lines)), unit, limits)
        for title, unit, lines in charts
    )
    return fragments.section('Curves', f'<div class="charts">{body}</div>' if body else '')


def _class_rows(runs: Sequence[Run]) -> Dict[str, List[Optional[float]]]:
    """Return class -> its first metric (usually IoU) in every run."""
    tables = _tables(runs)
    names = dict.fromkeys(name for table in tables if table for name in table.classes)
    scores_of_runs = [
        dict(zip(table.classes, next(iter(table.columns.values()), ()))) if table else {}
        for table in tables
    ]
    return {name: [scores.get(name) for scores in scores_of_runs] for name in names}


def _classes(runs: Sequence[Run]) -> str:
    rows = [[text(name), *_with_best(values)] for name, values in _class_rows(runs).items()]
    column = next((next(iter(table.columns), 'IoU') for table in _tables(runs) if table), 'IoU')
    if not rows:
        return fragments.section('Classes', '', 'No run has scores by class.')
    return fragments.section(
        'Classes',
        fragments.table(rows, _head(runs), 'figures'),
        f'{column} of the last evaluation in percent; the best is bold.',
    )


def _config(runs: Sequence[Run]) -> str:
    unknown = [_label(runs, run) for run in runs if not run.config()]
    if unknown:
        return fragments.section(
            'Config', '', f'The config of {", ".join(unknown)} is not recorded.'
        )
    rows = sections.config_rows(runs)
    return fragments.section(
        'Config',
        fragments.table(rows, _head(runs), 'config') if rows else '',
        '' if rows else 'The same settings.',
    )


def _confusion(runs: Sequence[Run]) -> str:
    body = ''.join(
        f'<h3>{text(_label(runs, run))}</h3>{class_sections.confusion_table(table)}'
        for run, table in zip(runs, _tables(runs))
        if table is not None and table.matrix
    )
    return fragments.section('Confusion', body)


def _previews(runs: Sequence[Run]) -> str:
    body = ''
    for run in runs:
        preview = run.work_dir / 'preview.png'
        if run.is_last and preview.is_file():
            body += (
                f'<h3>{text(_label(runs, run))}</h3>'
                f'{fragments.picture(picture_url(preview), "samples and predictions")}'
            )
    return fragments.section('Previews', body)


def _as_text(runs: Sequence[Run]) -> str:
    """Return the comparison as text for a terminal, with the runs as numbered columns."""
    lines = [
        f'[{index}] {_label(runs, run)}: {run.config_name}, {sections.status_words(run.last)}'
        for index, run in enumerate(runs, 1)
    ]
    warning = _not_comparable(runs)
    if warning:
        lines.append(warning)
    rows: List[List[str]] = [['', *(f'[{index}]' for index in range(1, len(runs) + 1))]]
    for name in _score_names(runs):
        rows.append([name, *(fragments.figure(_scores(run).get(name)) for run in runs)])
    rows.append(['steps', *(number(run.iterations) for run in runs)])
    rows.append(['time', *(fragments.duration(run.seconds) if run.seconds else '' for run in runs)])
    class_rows = _class_rows(runs)
    if class_rows:
        rows.append(['', *([''] * len(runs))])
        rows += [[name, *map(fragments.figure, values)] for name, values in class_rows.items()]
    return '\n'.join([*lines, '', *_aligned(rows)])


def _aligned(rows: Sequence[Sequence[str]]) -> List[str]:
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue='')]
    return [
        '  '.join(
            [
                f'{row[0]:<{widths[0]}}',
                *(f'{cell:>{width}}' for cell, width in zip(row[1:], widths[1:])),
            ]
        ).rstrip()
        for row in rows
    ]
