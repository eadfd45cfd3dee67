"""The parts of a report on one run, each as HTML."""
from __future__ import annotations

import time
from typing import Dict, Iterable, List, Optional, Sequence

from mapsage.drawing.sampling_records import (
    SamplingPlotError,
    headline,
    merged,
    read_steps,
    read_tiles,
)

from .charts import MAX_POINTS, ChartLine, line_chart, number, text
from .pictures import find_maps, picture_url, pixels_url
from .runs import ClassTable, Evaluation, Run, Start, not_comparable

_STATUS = dict(
    finished='finished', stopped='stopped at a request, and can be resumed', failed='failed',
    interrupted='interrupted', running='no end recorded: it is running, or was killed')
_STATUS['not recorded'] = 'made before MapSage recorded how runs end'
_PERCENT = ('mIoU', 'aAcc', 'mAcc', 'mDice', 'mFscore', 'mPrecision', 'mRecall', 'mFbeta',
            'mBoundaryIoU', 'kappa')
_CURVES = 12  # charts of other keys that are shown; the rest is named
_LABELED_CLASSES = 40  # with more, the cells of a confusion matrix have no text


def section(title: str, body: str, note: str = '') -> str:
    """Return a section of the page; '' without a body and a note."""
    if not body and not note:
        return ''
    said = f'<p class="note">{text(note)}</p>' if note else ''
    return f'<section><h2>{text(title)}</h2>{said}{body}</section>'


def table(rows: Iterable[Sequence[str]], head: Sequence[str] = (), kind: str = '') -> str:
    """Return a table of cells that are HTML; the first of a row is its heading."""
    top = f'<thead><tr>{"".join(f"<th>{cell}</th>" for cell in head)}</tr></thead>' if head else ''
    body = ''.join(f'<tr><th>{row[0]}</th>{"".join(f"<td>{cell}</td>" for cell in row[1:])}</tr>'
                   for row in rows)
    return f'<div class="wide"><table class="{kind}">{top}<tbody>{body}</tbody></table></div>'


def overview(run: Run, before: Optional[Run]) -> str:
    """Return the facts at the top: how it ended, score, time, devices."""
    rows = [['Run', text(f'{run.config_name}, {date(run.starts[0].started)}')],
            ['End', text(status_words(run.last))]]
    error = run.last.record.get('error')
    if error:
        rows.append(['Error', f'<pre>{text(error)}</pre>'])
    rows += [['Score', score_line(run, before)],
             ['Steps', text(steps_line(run))],
             ['Time', text(time_line(run))],
             ['Devices', text(device_line(run))]]
    peak = run.last.record.get('peak_memory')
    if peak:
        rows.append(['Peak memory', text(f'{peak / 2**30:.2f} GiB on the device of rank 0')])
    return table(rows, kind='facts')


def is_percentage(name: str) -> bool:
    """Return whether a figure is one of those in percent of which more is better."""
    return name.split('/')[-1] in _PERCENT


def status_words(start: Start) -> str:
    """Return how a start ended."""
    return _STATUS.get(start.status, start.status)


def score_line(run: Run, before: Optional[Run] = None) -> str:
    """Return the last score, the best one, and the change to the run before, as HTML."""
    name, points = run.score()
    if not points:
        return 'none: no validation was run'
    best = max(points, key=lambda point: point[1])
    parts = [f'<b>{text(name)} {points[-1][1]:.2f}</b>']
    if is_percentage(name) and best[1] > points[-1][1]:
        parts.append(f'best {best[1]:.2f} after {number(best[0])} steps')
    other = before.score()[1] if before and before.score()[0] == name else []
    if other:
        parts.append(f'{change(points[-1][1], other[-1][1])} to the run before')
    return ', '.join(parts)


def steps_line(run: Run) -> str:
    """Return the number of steps, of how many, and over how many starts."""
    wanted = run.last.record.get('max_iters')
    parts = [f'{run.iterations:,}' + (f' of {wanted:,}' if wanted else '')]
    trained = sum(each.trains for each in run.starts)
    if trained > 1:
        parts.append(f'in {trained} starts')
    source = run.starts[0].record.get('resumed_from')
    if source and run.starts[0].begin:
        parts.append(f'begun at {run.starts[0].begin:,} from {source}')
    return ', '.join(parts)


def time_line(run: Run) -> str:
    """Return the wall-clock time, and that of a step as it was logged."""
    curves = run.curves()
    parts = [duration(run.seconds)]
    for key, words in (('time', 's a step'), ('data_time', 's of it waiting for data')):
        values = [value for _, value in curves.get(key, ())]
        if values:
            parts.append(f'{sum(values) / len(values):.3g} {words}')
    return ', '.join(parts)


def device_line(run: Run) -> str:
    """Return the accelerator and the number of ranks."""
    last = run.last
    device = last.record.get('accelerator') or last.log.device or 'not recorded'
    ranks = last.record.get('world_size') or last.log.world_size
    return f'{device}, {ranks} rank(s)' if ranks else str(device)


def curves(run: Run) -> str:
    """Return the charts of training and validation."""
    found = run.curves()
    limits = (0.0, float(max(run.iterations, 1)))
    charts: List[str] = []
    validations = run.evaluations()
    names = list(dict.fromkeys(name for each in validations for name in each.metrics))
    lines = {name: ChartLine(name, [(each.iteration, each.metrics[name]) for each in validations
                               if name in each.metrics]) for name in names}
    percent = [line for name, line in lines.items()
               if name.endswith(_PERCENT)]  # single_class_mIoU too, to compare with
    charts.append(line_chart('Validation', percent, '%', limits))
    others = [line for line in lines.values() if line not in percent]
    losses = sorted((key for key in found if 'loss' in key.split('.')[-1]),
                    key=lambda key: key != 'loss')
    if len(losses) == 2 and found[losses[0]] == found[losses[1]]:
        losses = losses[:1]
    for title, keys, unit in (
            ('Loss', losses, ''), ('Learning rate', _named(found, 'lr'), ''),
            ('Time of a step', [key for key in ('time', 'data_time') if key in found], 's'),
            ('Memory', _named(found, 'memory'), 'MiB'),
            ('Gradient norm', _named(found, 'grad_norm'), '')):
        lines_of = [ChartLine(key, found.pop(key)) for key in keys]
        charts.append(line_chart(title, lines_of, unit, limits))
    rest = {key: points for key, points in found.items() if 'loss' not in key.split('.')[-1]
            and not key.startswith('dynamic_sampling/')}
    others += [ChartLine(key, points) for key, points in rest.items()]
    charts += [line_chart(line.name, [line], '', limits) for line in others[:_CURVES]]
    body = ''.join(charts)
    if not run.curves():
        note = 'No training curves: there is no vis_data/scalars.json, which LocalVisBackend of ' \
               'vis_backends writes at every log interval.'
    else:
        left = [line.name for line in others[_CURVES:]]
        note = f'Also logged: {", ".join(left)}.' if left else ''
    return section('Curves', f'<div class="charts">{body}</div>' if body else '', note)


def _named(found: Iterable[str], name: str) -> List[str]:
    return [key for key in found if key == name or key.endswith(('/' + name, '.' + name))]


def classes(run: Run, before: Optional[Run]) -> str:
    """Return the figures by class, with the change to the run before."""
    final = run.final()
    if final is None:
        return section('Classes', '', 'No validation was run, so there are no scores by class.')
    if not final.tables:
        return section('Classes', '', 'No evaluator gave figures by class. ConfusionMatrixMetric '
                                      'does, and the log of IoUMetric.')
    other = before.final() if before else None
    body, warning = '', ''
    for index, each in enumerate(final.tables):
        title = f'<h3>{text(each.name)}</h3>' if each.name else ''
        old = _counterpart(each, index, other)
        body += title + _class_table(each, old)
        warning = warning or (not_comparable([each, old]) if old else '')
    if other is not None and before is not None:
        note = f'Changes are to the run before, of {date(before.starts[0].started)}. {warning}'
    else:
        note = 'There is no run before this one in the folder to compare with.'
    return section('Classes', body, _which(run, final) + note)


def _which(run: Run, final: Evaluation) -> str:
    if final.phase == 'test':
        return 'Figures of the last test. '
    return f'Validation after {final.iteration:,} steps, in percent. '


def _counterpart(mine: ClassTable, index: int,
                 other: Optional[Evaluation]) -> Optional[ClassTable]:
    if other is None:
        return None
    same = [each for each in other.tables if each.name == mine.name]
    return same[min(index, len(same) - 1)] if same else None


def _class_table(mine: ClassTable, before: Optional[ClassTable]) -> str:
    totals = [sum(row) for row in mine.matrix] if mine.matrix else []
    head = ['class', *(text(column) for column in mine.columns)]
    old: Dict[str, Optional[float]] = {}
    main = next(iter(mine.columns), '')
    if before is not None and main in before.columns:
        old = dict(zip(before.classes, before.columns[main]))
        head.insert(2, 'change')
    if totals:
        head.append('share of pixels')
    rows = []
    for index, name in enumerate(mine.classes):
        row = [text(name)]
        for column, values in mine.columns.items():
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
    tables = [each for each in (final.tables if final else []) if each.matrix]
    if not tables:
        return section('Confusion', '', 'No confusion matrix was recorded; ConfusionMatrixMetric '
                                        'has one.' if final else '')
    body = ''.join((f'<h3>{text(each.name)}</h3>' if each.name else '') + confusion_table(each)
                   for each in tables)
    return section('Confusion', body, 'Rows are the truth: the percentage of its pixels that were '
                                      'predicted as each class.')


def confusion_table(each: ClassTable) -> str:
    """Return a confusion matrix as a table whose cells are the darker the more pixels they have."""
    matrix = each.matrix or []
    small = len(each.classes) > _LABELED_CLASSES
    rows = []
    for name, counts in zip(each.classes, matrix):
        total = sum(counts)
        cells = []
        for other, count in zip(each.classes, counts):
            share = 100 * count / total if total else 0
            if share < 0.05 and (small or not total):
                cells.append('<td></td>' if total else '<td class="none"></td>')
                continue
            shade = ' class="dark"' if share > 55 else ''
            label = '' if small else f'{share:.1f}'
            title = '' if small else \
                f' title="{text(name)} as {text(other)}: {count:,} pixels"'
            cells.append(f'<td{shade} style="--s:{share:.0f}%"{title}>{label}</td>')
        rows.append(f'<tr><th>{text(name)}</th>{"".join(cells)}</tr>')
    head = ''.join(f'<th><span>{text(name)}</span></th>' for name in each.classes)
    return (f'<div class="wide"><table class="confusion{" small" if small else ""}"><thead><tr>'
            f'<th></th>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>')


def pictures(run: Run) -> str:
    """Return the preview and the maps of the folder, where they are this run's."""
    if not run.is_last:
        return section('Preview', '', 'The pictures in the folder are of a later run.')
    preview = run.work_dir / 'preview.png'
    body, note = '', ''
    if preview.is_file():
        body = picture(picture_url(preview), 'preview of samples, truth and prediction')
        if preview.stat().st_mtime < run.starts[0].started - 1:
            note = 'preview.png is older than this run.'
    else:
        note = 'There is no preview.png: PreviewHook writes it after a validation.'
    parts = [section('Preview', body, note)]
    maps = ''
    for each in find_maps(run.work_dir):
        old = ', made before this run' if each.made < run.starts[0].started - 1 else ''
        maps += f'<h3>{text(each.name)}{old}</h3>{picture(picture_url(each.preview), each.name)}'
    parts.append(section('Map', maps))
    return ''.join(parts)


def picture(url: Optional[str], name: str) -> str:
    """Return an image of the page, or a sentence where it could not be read."""
    if url is None:
        return f'<p class="note">The picture of {text(name)} cannot be read.</p>'
    return f'<img src="{url}" alt="{text(name)}">'


def sampling(run: Run) -> str:
    """Return the picture of dynamic sampling, where the run used it."""
    folder = run.work_dir / 'dynamic_sampling'
    if not run.is_last or not (folder / 'steps.jsonl').is_file():
        return ''
    try:
        from mapsage.drawing.sampling_plot import render_sampling
        rows = read_steps(folder / 'steps.jsonl')
        pixels = render_sampling(merged(rows, MAX_POINTS), read_tiles(folder / 'tiles.npz'))
        body = picture(pixels_url(pixels[:, :, ::-1]), 'charts and samples of dynamic sampling')
    except SamplingPlotError as error:
        return section('Dynamic sampling', '', str(error))
    return section('Dynamic sampling', body, headline(rows))


def config(run: Run, before: Optional[Run]) -> str:
    """Return what is other than in the run before, and than in the files that it inherits from."""
    parts = ''
    if before is not None:
        rows = config_rows([before, run])
        parts += '<h3>Against the run before</h3>' + (
            table(rows, ['setting', 'before', 'now'], 'config') if rows
            else '<p class="note">The same settings.</p>')
    said = run.last.log.differences
    if said:
        parts += f'<h3>Against its bases</h3><pre>{text(said)}</pre>'
    return section('Config', parts, '' if parts else 'Its log does not say.')


def config_rows(runs: Sequence[Run]) -> List[List[str]]:
    """Return the settings in which runs differ: key and the value of each, as HTML."""
    configs = [each.config() for each in runs]
    if not all(configs):
        return []
    rows = []
    for key in dict.fromkeys(key for each in configs for key in each):
        values = [each.get(key) for each in configs]
        if len(set(values)) > 1 and key not in ('work_dir', 'resume', 'filename'):
            rows.append([text(key), *('<i>absent</i>' if value is None else
                                      f'<code>{text(_short(value))}</code>' for value in values)])
    return rows


def _short(value: str) -> str:
    return value if len(value) <= 200 else f'{value[:197]}...'


def devices(run: Run) -> str:
    """Return what the ranks computed with."""
    groups = run.last.record.get('groups') or []
    columns = [f'ranks {_listed(group["ranks"])} on {", ".join(group["hosts"])}'
               for group in groups]
    names = dict.fromkeys(name for group in groups for name in group['facts']
                          if name != 'CPU flags')
    rows = [[text(name), *(text(group['facts'].get(name, '')) for group in groups)]
            for name in names]
    body = table(rows, ['', *map(text, columns)], 'config') if rows else ''
    strategy = str(run.last.record.get('strategy') or '')
    return section('Devices and versions', body, strategy)


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f'{ranks[0]} to {ranks[-1]}'
    return ', '.join(map(str, ranks))


def starts(run: Run) -> str:
    """Return the starts that made the run, with the tests of it."""
    rows = []
    for each in run.starts:
        what = f'steps {each.begin:,} to {each.end:,}' if each.trains else 'test'
        ranks = each.record.get('world_size') or each.log.world_size or ''
        tests = '; '.join(', '.join(f'{name} {value:.2f}' for name, value in test.metrics.items())
                          for test in each.evaluations if test.phase == 'test')
        rows.append([text(each.folder.name), text(what), str(ranks), text(status_words(each)),
                     text(duration(each.seconds)), text(tests)])
    return section('Starts', table(rows, ['folder', 'did', 'ranks', 'end', 'time', 'test'],
                                   'config'))


def bar(value: Optional[float]) -> str:
    """Return a percentage with a bar behind it."""
    if value is None:
        return '<span class="none">undefined</span>'
    return f'<span class="bar" style="--p:{max(0.0, min(100.0, value)):.1f}%">{value:.2f}</span>'


def figure(value: Optional[float]) -> str:
    """Return a percentage."""
    return '' if value is None else f'{value:.2f}'


def change(now: Optional[float], before: Optional[float]) -> str:
    """Return a difference with its sign, colored."""
    if now is None or before is None:
        return ''
    difference = now - before
    kind = 'up' if difference > 0.005 else 'down' if difference < -0.005 else 'same'
    return f'<span class="{kind}">{difference:+.2f}</span>'


def date(seconds: float) -> str:
    """Return a time as text in this machine's time zone."""
    return time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(seconds))


def duration(seconds: float) -> str:
    """Return a duration as text: 42 s, 5 min 3 s, 7 h 12 min."""
    whole = round(seconds)
    if whole < 60:
        return f'{whole} s'
    if whole < 3600:
        return f'{whole // 60} min {whole % 60} s'
    return f'{whole // 3600} h {whole % 3600 // 60} min'
