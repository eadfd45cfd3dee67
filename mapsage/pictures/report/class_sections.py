"""Sections of a report about classes: scores with their change, and confusion matrices, as HTML.

Scores are compared with the run before only by the same evaluator. `sections.py` has the other
sections of a page.
"""

from __future__ import annotations

from typing import Dict, Optional

from .charts import text
from .fragments import bar, change, date, figure, section, table
from .runs import ClassTable, Evaluation, Run, mean_note, not_comparable

# With more classes, the cells of a confusion matrix are too small for text.
_MAX_LABELED_CLASSES = 40


def classes(run: Run, previous: Optional[Run]) -> str:
    """Return the scores by class, with the change to the previous run."""
    final = run.final()
    if final is None:
        return section('Classes', '', 'No validation was run, so there are no scores by class.')
    if not final.tables:
        return section(
            'Classes',
            '',
            'No evaluator recorded scores by class. IoUMetric and ConfusionMatrixMetric do.',
        )
    previous_final = previous.final() if previous else None
    body, warning = '', ''
    for index, scores in enumerate(final.tables):
        title = f'<h3>{text(scores.name)}</h3>' if scores.name else ''
        previous_scores = _counterpart(scores, index, previous_final)
        body += title + _class_table(scores, previous_scores)
        warning = warning or (not_comparable([scores, previous_scores]) if previous_scores else '')
    if previous_final is not None and previous is not None:
        note = (
            f'Changes are relative to the run before, of {date(previous.starts[0].started)}. '
            f'{warning}'
        )
    else:
        note = 'There is no run before this one in the folder to compare with.'
    absent = ' '.join(filter(None, map(mean_note, final.tables)))
    evaluation = (
        'Scores of the last test.'
        if final.phase == 'test'
        else f'Validation after {final.iteration:,} steps, in percent.'
    )
    return section('Classes', body, f'{evaluation} {absent} {note}')


def _counterpart(
    scores: ClassTable, index: int, previous: Optional[Evaluation]
) -> Optional[ClassTable]:
    """Return the previous run's table of the same evaluator: same prefix, then same position."""
    if previous is None:
        return None
    candidates = [table for table in previous.tables if table.name == scores.name]
    return candidates[min(index, len(candidates) - 1)] if candidates else None


def _class_table(scores: ClassTable, previous: Optional[ClassTable]) -> str:
    totals = [sum(row) for row in scores.matrix] if scores.matrix else []
    head = ['class', *(text(column) for column in scores.columns)]
    old: Dict[str, Optional[float]] = {}
    main = next(iter(scores.columns), '')
    if previous is not None and main in previous.columns:
        old = dict(zip(previous.classes, previous.columns[main]))
        head.insert(2, 'change')
    if totals:
        head.append('share of pixels')
    rows = []
    for index, name in enumerate(scores.classes):
        row = [text(name)]
        for column, values in scores.columns.items():
            value = values[index]
            row.append(bar(value) if column == main else figure(value))
            if column == main and old:
                row.append(change(value, old.get(name)))
        if totals:
            row.append(f'{100 * totals[index] / max(1, sum(totals)):.2f} %')
        rows.append(row)
    return table(rows, head, 'figures')


def confusion(run: Run) -> str:
    """Return the confusion matrices of the last evaluation."""
    final = run.final()
    tables = [scores for scores in (final.tables if final else []) if scores.matrix]
    if not tables:
        return section(
            'Confusion',
            '',
            'No confusion matrix was recorded; ConfusionMatrixMetric has one.' if final else '',
        )
    body = ''.join(
        (f'<h3>{text(scores.name)}</h3>' if scores.name else '') + confusion_table(scores)
        for scores in tables
    )
    return section(
        'Confusion',
        body,
        'Rows are the truth: the percentage of its pixels that were predicted as each class.',
    )


def confusion_table(scores: ClassTable) -> str:
    """Return a confusion matrix as a table; cells with more pixels are darker."""
    matrix = scores.matrix or []
    small = len(scores.classes) > _MAX_LABELED_CLASSES
    rows = []
    for name, counts in zip(scores.classes, matrix):
        total = sum(counts)
        cells = []
        for predicted, count in zip(scores.classes, counts):
            share = 100 * count / total if total else 0
            if share < 0.05 and (small or not total):
                cells.append('<td></td>' if total else '<td class="none"></td>')
                continue
            shade = ' class="dark"' if share > 55 else ''
            label = '' if small else f'{share:.1f}'
            title = '' if small else f' title="{text(name)} as {text(predicted)}: {count:,} pixels"'
            cells.append(f'<td{shade} style="--s:{share:.0f}%"{title}>{label}</td>')
        rows.append(f'<tr><th>{text(name)}</th>{"".join(cells)}</tr>')
    head = ''.join(f'<th><span>{text(name)}</span></th>' for name in scores.classes)
    return (
        f'<div class="wide"><table class="confusion{" small" if small else ""}"><thead><tr>'
        f'<th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )
