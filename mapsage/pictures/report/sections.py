"""Sections of the report of one run, as HTML.

Every public function returns a piece of HTML, made of `fragments.py`, and reads nothing but the run
and files in its work dir. The sections about classes are in `class_sections.py`; `page.py` puts all
of them together, and `comparison.py` reuses some.
"""

from __future__ import annotations

from typing import Iterable, List, Optional, Sequence

from mapsage.pictures.sampling_records import (
    SamplingPlotError,
    headline,
    merged,
    read_steps,
    read_tiles,
)

from .charts import MAX_POINTS, ChartLine, line_chart, number, text
from .fragments import change, date, duration, picture, section, table
from .pictures import find_maps, picture_url, pixels_url
from .runs import Run, Start

_STATUS = dict(
    finished='finished',
    stopped='stopped at a request, and can be resumed',
    failed='failed',
    interrupted='interrupted',
    running='no end recorded: it is running, or was killed',
)
_STATUS['not recorded'] = 'not recorded, there is no run.json'
_PERCENT = (
    'mIoU',
    'aAcc',
    'mAcc',
    'mDice',
    'mFscore',
    'mPrecision',
    'mRecall',
    'mFbeta',
    'mBoundaryIoU',
    'kappa',
)
# Number of charts for keys without a chart of a fixed title; further keys are only named.
_MAX_OTHER_CHARTS = 12
# Share of the time of steps from which the report says how to shorten the wait for data.
_LONG_WAIT = 0.1
# Datasets that can make a fast copy of their scenes.
_SCENES = ('GeoTiffDataset', 'SceneStackDataset')


def overview(run: Run, previous: Optional[Run]) -> str:
    """Return the table at the top: how the run ended, score, time, devices."""
    rows = [
        ['Run', text(f'{run.config_name}, {date(run.starts[0].started)}')],
        ['End', text(status_words(run.last))],
    ]
    error = run.last.record.get('error')
    if error:
        rows.append(['Error', f'<pre>{text(error)}</pre>'])
    rows += [
        ['Score', score_line(run, previous)],
        ['Steps', text(steps_line(run))],
        ['Time', text(' '.join(filter(None, (time_line(run), wait_advice(run)))))],
        ['Devices', text(device_line(run))],
    ]
    peak = run.last.record.get('peak_memory')
    if peak:
        rows.append(['Peak memory', text(f'{peak / 2**30:.2f} GiB on the device of rank 0')])
    return table(rows, kind='facts')


def is_percentage(name: str) -> bool:
    """Return whether a metric is in percent and higher is better."""
    return name.split('/')[-1] in _PERCENT


def status_words(start: Start) -> str:
    """Return text that says how a start ended."""
    return _STATUS.get(start.status, start.status)


def score_line(run: Run, previous: Optional[Run] = None) -> str:
    """Return the last score, the best score, and the change to the previous run, as HTML."""
    name, points = run.score()
    if not points:
        return 'none: no validation was run'
    best = max(points, key=lambda point: point[1])
    phrases = [f'<b>{text(name)} {points[-1][1]:.2f}</b>']
    if is_percentage(name) and best[1] > points[-1][1]:
        phrases.append(f'best {best[1]:.2f} after {number(best[0])} steps')
    previous_points = previous.score()[1] if previous and previous.score()[0] == name else []
    if previous_points:
        phrases.append(f'{change(points[-1][1], previous_points[-1][1])} to the run before')
    return ', '.join(phrases)


def steps_line(run: Run) -> str:
    """Return the steps, the planned steps, and the number of starts, as text."""
    max_iters = run.last.record.get('max_iters')
    phrases = [f'{run.iterations:,}' + (f' of {max_iters:,}' if max_iters else '')]
    trainings = sum(start.trains for start in run.starts)
    if trainings > 1:
        phrases.append(f'in {trainings} starts')
    source = run.starts[0].record.get('resumed_from')
    if source and run.starts[0].begin:
        phrases.append(f'begun at {run.starts[0].begin:,} from {source}')
    return ', '.join(phrases)


def time_line(run: Run) -> str:
    """Return the wall-clock time, the mean logged time of a step, and its wait for data, as text."""
    curves = run.curves()
    phrases = [duration(run.seconds) if run.seconds else 'not recorded']
    step, wait = (
        sum(value for _, value in curves.get(key, ())) / max(1, len(curves.get(key, ())))
        for key in ('time', 'data_time')
    )
    if step:
        phrases.append(f'{step:.3g} s a step')
    if step and 'data_time' in curves:
        phrases.append(f'{wait:.3g} s of it waiting for data ({wait / step:.0%})')
    return ', '.join(phrases)


def wait_advice(run: Run) -> str:
    """Return what shortens the wait for data, as text; empty if it is at most 10 % of the steps."""
    curves = run.curves()
    step, wait = (sum(value for _, value in curves.get(key, ())) for key in ('time', 'data_time'))
    if wait <= _LONG_WAIT * step:
        return ''
    config = {
        key: value.strip('\'"')
        for key, value in run.config().items()
        if key.startswith('train_dataloader.')
    }
    workers = config.get('train_dataloader.num_workers', '0')
    remedies = [f'raise train_dataloader.num_workers={workers} if processor cores are idle']
    if any(value in _SCENES for value in config.values()) and not any(
        '.fast_copy.' in key for key in config
    ):
        remedies.append('set fast_copy in train_dataloader.dataset, so that windows decode faster')
    return (
        f'The steps waited for data for {wait / step:.0%} of their time: {", or ".join(remedies)}.'
    )


def device_line(run: Run) -> str:
    """Return the accelerator and the number of ranks, as text."""
    device = run.last.record.get('accelerator') or 'not recorded'
    ranks = run.last.record.get('world_size')
    return f'{device}, {ranks} rank(s)' if ranks else str(device)


def curves(run: Run) -> str:
    """Return the charts of training and validation."""
    scalars = run.curves()
    limits = (0.0, float(max(run.iterations, 1)))
    charts: List[str] = []
    validations = run.evaluations()
    names = list(dict.fromkeys(name for evaluation in validations for name in evaluation.metrics))
    lines = {
        name: ChartLine(
            name,
            [
                (evaluation.iteration, evaluation.metrics[name])
                for evaluation in validations
                if name in evaluation.metrics
            ],
        )
        for name in names
    }
    # The suffix also matches single_class_mIoU, the baseline of mIoU.
    percent = [line for name, line in lines.items() if name.endswith(_PERCENT)]
    charts.append(line_chart('Validation', percent, '%', limits))
    untitled = [line for line in lines.values() if line not in percent]
    losses = sorted(
        (key for key in scalars if 'loss' in key.split('.')[-1]), key=lambda key: key != 'loss'
    )
    # A single loss term equals the total.
    if len(losses) == 2 and scalars[losses[0]] == scalars[losses[1]]:
        losses = losses[:1]
    for title, keys_of_chart, unit in (
        ('Loss', losses, ''),
        ('Learning rate', _keys_named(scalars, 'lr'), ''),
        ('Time of a step', [key for key in ('time', 'data_time') if key in scalars], 's'),
        ('Memory', _keys_named(scalars, 'memory'), 'MiB'),
        ('Gradient norm', _keys_named(scalars, 'grad_norm'), ''),
    ):
        lines_of_chart = [ChartLine(key, scalars.pop(key)) for key in keys_of_chart]
        charts.append(line_chart(title, lines_of_chart, unit, limits))
    # The charts of dynamic sampling are in a separate section.
    untitled += [
        ChartLine(key, points)
        for key, points in scalars.items()
        if 'loss' not in key.split('.')[-1] and not key.startswith('dynamic_sampling/')
    ]
    charts += [line_chart(line.name, [line], '', limits) for line in untitled[:_MAX_OTHER_CHARTS]]
    body = ''.join(charts)
    if not run.curves():
        note = (
            'No training curves: there is no vis_data/scalars.json, which LocalVisBackend of '
            'vis_backends writes at every log interval.'
        )
    else:
        names_only = [line.name for line in untitled[_MAX_OTHER_CHARTS:]]
        note = f'Also logged: {", ".join(names_only)}.' if names_only else ''
    return section('Curves', f'<div class="charts">{body}</div>' if body else '', note)


def _keys_named(keys: Iterable[str], name: str) -> List[str]:
    return [key for key in keys if key == name or key.endswith(('/' + name, '.' + name))]


def pictures(run: Run) -> str:
    """Return the preview and the maps of the work dir, if they belong to this run."""
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
    maps = ''
    for map_picture in find_maps(run.work_dir):
        old = ', made before this run' if map_picture.made < run.starts[0].started - 1 else ''
        maps += (
            f'<h3>{text(map_picture.name)}{old}</h3>'
            f'{picture(picture_url(map_picture.preview), map_picture.name)}'
        )
    return section('Preview', body, note) + section('Map', maps)


def sampling(run: Run) -> str:
    """Return the charts of dynamic sampling; '' if the run did not use it."""
    folder = run.work_dir / 'dynamic_sampling'
    if not run.is_last or not (folder / 'steps.jsonl').is_file():
        return ''
    try:
        from mapsage.pictures.sampling_plot import render_sampling

        rows = read_steps(folder / 'steps.jsonl')
        pixels = render_sampling(merged(rows, MAX_POINTS), read_tiles(folder / 'tiles.npz'))
        body = picture(pixels_url(pixels[:, :, ::-1]), 'charts and samples of dynamic sampling')
    except SamplingPlotError as error:
        return section('Dynamic sampling', '', str(error))
    return section('Dynamic sampling', body, headline(rows))


def config(run: Run, previous: Optional[Run]) -> str:
    """Return the settings that differ from the previous run, and from the ``_base_`` files."""
    body = ''
    if previous is not None:
        rows = config_rows([previous, run])
        body += '<h3>Against the run before</h3>' + (
            table(rows, ['setting', 'before', 'now'], 'config')
            if rows
            else '<p class="note">The same settings.</p>'
        )
    against_bases = run.last.config_report()
    if against_bases:
        body += f'<h3>Against its bases</h3><pre>{text(against_bases)}</pre>'
    return section('Config', body, '' if body else 'The log does not list it.')


def config_rows(runs: Sequence[Run]) -> List[List[str]]:
    """Return the settings in which runs differ: the key and its value in every run, as HTML."""
    configs = [run.config() for run in runs]
    if not all(configs):
        return []
    rows = []
    for key in dict.fromkeys(key for config in configs for key in config):
        values = [config.get(key) for config in configs]
        if len(set(values)) > 1 and key not in ('work_dir', 'resume', 'filename'):
            rows.append(
                [
                    text(key),
                    *(
                        '<i>absent</i>'
                        if value is None
                        else f'<code>{text(_shorten(value))}</code>'
                        for value in values
                    ),
                ]
            )
    return rows


def _shorten(value: str) -> str:
    return value if len(value) <= 200 else f'{value[:197]}...'


def devices(run: Run) -> str:
    """Return devices and versions, one column per group of ranks with the same ones."""
    groups = run.last.record.get('groups') or []
    columns = [
        f'ranks {_format_ranks(group["ranks"])} on {", ".join(group["hosts"])}' for group in groups
    ]
    names = dict.fromkeys(
        name for group in groups for name in group['facts'] if name != 'CPU flags'
    )
    rows = [
        [text(name), *(text(group['facts'].get(name, '')) for group in groups)] for name in names
    ]
    body = table(rows, ['', *map(text, columns)], 'config') if rows else ''
    strategy = str(run.last.record.get('strategy') or '')
    return section('Devices and versions', body, strategy)


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f'{ranks[0]} to {ranks[-1]}'
    return ', '.join(map(str, ranks))


def starts(run: Run) -> str:
    """Return the table of the run's starts and their tests."""
    rows = []
    for start in run.starts:
        activity = f'steps {start.begin:,} to {start.end:,}' if start.trains else 'test'
        ranks = start.record.get('world_size') or ''
        tests = '; '.join(
            ', '.join(f'{name} {value:.2f}' for name, value in test.metrics.items())
            for test in start.evaluations
            if test.phase == 'test'
        )
        rows.append(
            [
                text(start.folder.name),
                text(activity),
                str(ranks),
                text(status_words(start)),
                text(duration(start.seconds) if start.seconds else ''),
                text(tests),
            ]
        )
    return section(
        'Starts', table(rows, ['folder', 'did', 'ranks', 'end', 'time', 'test'], 'config')
    )
