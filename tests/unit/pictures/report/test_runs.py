"""Runs as read from the files of a work dir, and their reports."""

from __future__ import annotations

import html
import json
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, Dict, List

import pytest
from support import ROOT

from mapsage.pictures.report import ReportError, compare_runs, write_report
from mapsage.pictures.report.record import config_of_file, flat_config
from mapsage.pictures.report.runs import read_runs

STAMP, LATER = '20251230_235900', '20260102_080000'
STARTED = datetime(2025, 12, 30, 23, 59).timestamp()
LOG = """2025/12/30 23:59:01 - mmengine - INFO - accelerator cpu (1 device(s), \
gradients over gloo) [cuda: torch is a CPU build; gcu: no torch_gcu]; world size 3, backend gloo
2025/12/30 23:59:01 - mmengine - INFO - config: configs/of mine/fpn.py against ../base.py
  max_iters  80000  ->  40
2025/12/30 23:59:20 - mmengine - INFO - Iter(train) [   10/80000]  lr: 1e-01  loss: 1.5
"""


def evaluation(iteration: int, land: float) -> Dict[str, Any]:
    return dict(
        phase='val',
        iteration=iteration,
        metrics=dict(aAcc=80.1, mIoU=land),
        tables=[
            dict(name='', classes=['land', 'road'], columns=dict(IoU=[land, None], Acc=[90.5, 0.0]))
        ],
    )


def write_start(
    work_dir: Path, stamp: str, land: float, resumed: int = 0, lr: str = '0.1', **record: Any
) -> Path:
    """Write the files of a start: 20 steps with a validation after 10 and after 20."""
    folder = work_dir / stamp
    (folder / 'vis_data').mkdir(parents=True)
    rows, evaluations = [], []
    for step in range(resumed + 10, resumed + 30, 10):
        rows.append(dict(lr=0.1, loss=2 - step / 100, time=0.5, iter=step, step=step))
        rows.append(dict(mIoU=land + step, data_time=0.1, time=0.2, step=step))
        evaluations.append(evaluation(step, land + step))
    (folder / f'{stamp}.log').write_text(LOG)
    # The process was killed while it wrote the last line.
    (folder / 'vis_data' / 'scalars.json').write_text(
        '\n'.join(map(json.dumps, rows)) + '\n{"loss": 0.5, "st'
    )
    (folder / 'vis_data' / 'config.py').write_text(
        f'optim_wrapper = dict(optimizer=dict(lr={lr}))\nnames = (\n    "a", )\nhook = Hook\n'
    )
    (folder / 'run.json').write_text(
        json.dumps(
            dict(
                dict(
                    kind='train',
                    config='fpn.py',
                    world_size=3,
                    begin_iter=resumed,
                    accelerator='cpu (1 device(s), gradients over gloo)',
                    evaluations=evaluations,
                ),
                **record,
            )
        )
    )
    return folder


def test_killed_run(tmp_path: Path) -> None:
    write_start(tmp_path, STAMP, 30.0, started=STARTED, written=STARTED + 90)
    (run,) = read_runs(tmp_path)
    assert run.config_name == 'fpn.py' and run.iterations == 20 and run.last.status == 'running'
    # Lines of evaluations have times too, which do not belong to the curve of training.
    assert run.curves()['loss'] == [(10, 1.9), (20, 1.8)]
    assert run.curves()['time'] == [(10, 0.5), (20, 0.5)]
    assert run.score() == ('mIoU', [(10, 40.0), (20, 50.0)])
    (table,) = run.final().tables
    assert table.classes == ['land', 'road']
    assert table.columns == dict(IoU=[50.0, None], Acc=[90.5, 0.0])
    assert run.seconds == 90
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert 'could not be made' not in text and 'no end recorded' in text


SCENES = {'train_dataloader.num_workers': '2', 'train_dataloader.dataset.type': 'GeoTiffDataset'}
COPIES = {'train_dataloader.dataset.fast_copy.folder': '/copies'}
WORKERS = 'raise train_dataloader.num_workers=2 if processor cores are idle'


@pytest.mark.parametrize(
    ('config', 'wait', 'expected'),
    [
        ({'train_dataloader.num_workers': '2'}, 0.05, ''),
        ({'train_dataloader.num_workers': '2'}, 0.1, f' for 20% of their time: {WORKERS}.'),
        (SCENES, 0.1, f' for 20% of their time: {WORKERS}, or set fast_copy in train_dataloader'),
        (dict(SCENES, **COPIES), 0.1, f' for 20% of their time: {WORKERS}.'),
        # The loader of the validation has no part in it.
        ({'val_dataloader.num_workers': '9'}, 0.1, '.num_workers=0 if processor cores are idle.'),
    ],
)
def test_the_wait_for_data_has_a_share_and_a_remedy(
    config: Dict[str, str], wait: float, expected: str, tmp_path: Path
) -> None:
    folder = write_start(tmp_path, STAMP, 70.0, flat_config=config)
    rows = [dict(time=0.5, data_time=wait, loss=1, iter=step, step=step) for step in (10, 20)]
    (folder / 'vis_data' / 'scalars.json').write_text('\n'.join(map(json.dumps, rows)))
    page = html.unescape(write_report(tmp_path).read_text(encoding='utf-8'))
    assert f'0.5 s a step, {wait:.3g} s of it waiting for data ({wait / 0.5:.0%})' in page
    assert expected in page
    assert ('The steps waited for data' in page) == bool(expected)


def test_settings_against_the_bases_come_from_the_log(tmp_path: Path) -> None:
    folder = write_start(tmp_path, STAMP, 30.0)
    (run,) = read_runs(tmp_path)
    assert run.last.config_report() == (
        'config: configs/of mine/fpn.py against ../base.py\n  max_iters  80000  ->  40'
    )
    assert 'max_iters  80000' in write_report(tmp_path).read_text(encoding='utf-8')
    (folder / f'{STAMP}.log').unlink()
    assert run.last.config_report() == ''
    assert 'The log does not list it.' in write_report(tmp_path).read_text(encoding='utf-8')


def test_run_without_a_record_has_curves(tmp_path: Path) -> None:
    """A run without the report hook, or of MMEngine's Runner."""
    folder = write_start(tmp_path, STAMP, 30.0)
    (folder / 'run.json').unlink()
    (run,) = read_runs(tmp_path)
    assert run.iterations == 20 and run.curves()['loss'] == [(10, 1.9), (20, 1.8)]
    assert run.final() is None and run.seconds == 0 and run.last.started == STARTED
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert 'could not be made' not in text and 'there is no run.json' in text
    assert ' 0 s' not in text and '>0 s' not in text


def test_resumed_start_continues_and_a_fresh_one_does_not(tmp_path: Path) -> None:
    write_start(tmp_path, STAMP, 30.0)
    write_start(tmp_path, '20251231_000500', 35.0, resumed=10)
    write_start(tmp_path, LATER, 20.0, lr='0.2')
    first, second = read_runs(tmp_path)
    assert [x for x, _ in first.curves()['loss']] == [10, 20, 30]
    assert first.curves()['loss'][1] == (20, 1.8)
    assert [
        (validation.iteration, validation.metrics['mIoU']) for validation in first.evaluations()
    ] == [(10, 40.0), (20, 55.0), (30, 65.0)]
    assert len(second.starts) == 1 and first.name.endswith(STAMP)
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert '-25.00' in text and 'optim_wrapper.optimizer.lr' in text


def test_comparison_of_runs(tmp_path: Path) -> None:
    for name, land in (('one', 30.0), ('other', 40.0)):
        write_start(tmp_path / name, STAMP, land, lr=str(land))
    write_start(tmp_path / 'other', LATER, 20.0)
    comparison = compare_runs(
        [tmp_path / 'one', tmp_path / 'other', tmp_path / 'other' / STAMP],
        tmp_path / 'new' / 'page.html',
    )
    rows = {
        line.split()[0]: line.split()[1:] for line in comparison.table.splitlines() if line.strip()
    }
    assert rows['mIoU'] == rows['land'] == ['50.00', '40.00', '60.00'] and 'road' in rows
    page = comparison.page.read_text(encoding='utf-8')
    assert '<span class="best">60.00</span>' in page and '<code>30.0</code>' in page
    assert page.count('<polyline') >= 12 and 'could not be made' not in page


@pytest.mark.parametrize(
    'paths, message',
    [
        (['one'], '1 run(s) to compare'),
        (['one', 'one'], 'are the same run'),
        (['one', 'none'], 'does not exist'),
        (['one', 'empty'], 'no folder of a run'),
    ],
)
def test_bad_comparisons(tmp_path: Path, paths: list, message: str) -> None:
    write_start(tmp_path / 'one', STAMP, 30.0)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ReportError) as caught:
        compare_runs([tmp_path / path for path in paths], tmp_path / 'page.html')
    assert message in str(caught.value)


def test_different_classes_and_labels_cause_a_warning(tmp_path: Path) -> None:
    folders = [write_start(tmp_path / name, STAMP, 30.0) for name in ('one', 'other')]
    tables = [
        dict(
            name='',
            classes=['land', name],
            columns=dict(IoU=[50.0, 60.0]),
            matrix=[[5, 5], [0, size]],
        )
        for name, size in (('road', 9), ('way', 9), ('road', 8))
    ]

    def compare_tables(*tables_of_runs: dict) -> str:
        for folder, table in zip(folders, tables_of_runs):
            (folder / 'run.json').write_text(
                json.dumps(
                    dict(
                        evaluations=[
                            dict(phase='val', iteration=20, metrics=dict(mIoU=55.0), tables=[table])
                        ]
                    )
                )
            )
        return compare_runs([tmp_path / 'one', tmp_path / 'other'], tmp_path / 'page.html').table

    assert 'different classes' in compare_tables(tables[0], tables[1])
    assert 'different labels' in compare_tables(tables[0], tables[2])
    assert 'different' not in compare_tables(tables[0], tables[0])
    later = write_start(tmp_path / 'one', LATER, 30.0)
    (later / 'run.json').write_text((folders[1] / 'run.json').read_text())
    assert 'different' not in write_report(tmp_path / 'one').read_text(encoding='utf-8')
    compare_tables(tables[2], tables[0])
    assert 'different labels' in write_report(tmp_path / 'one').read_text(encoding='utf-8')


def test_damaged_parts_leave_the_rest(tmp_path: Path) -> None:
    folder = write_start(tmp_path, STAMP, 30.0)
    (folder / 'run.json').write_text('{"started": ')
    write_start(tmp_path, LATER, 30.0)
    (tmp_path / 'preview.png').write_bytes(b'no picture')
    (tmp_path / 'dynamic_sampling').mkdir()
    (tmp_path / 'dynamic_sampling' / 'steps.jsonl').write_text('[]\n{}\n')
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert 'cannot be read' in text and 'steps.jsonl' in text and '50.00' in text


def test_a_part_that_fails_leaves_the_rest(tmp_path: Path) -> None:
    # For example a record of another version.
    write_start(tmp_path, STAMP, 30.0, groups=[3])
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert text.count('could not be made') == 1 and 'Curves' in text and 'Starts' in text


def test_150_classes(tmp_path: Path) -> None:
    names = [f'class {index}' for index in range(150)]
    matrix = [
        [int(row == column) * 9 + (row + column) % 2 for column in range(150)] for row in range(150)
    ]
    write_start(
        tmp_path,
        STAMP,
        30.0,
        evaluations=[
            dict(
                phase='val',
                iteration=20,
                metrics=dict(mIoU=55.0),
                tables=[
                    dict(name='', classes=names, columns=dict(IoU=[50.0] * 150), matrix=matrix)
                ],
            )
        ],
    )
    path = write_report(tmp_path)
    assert path.stat().st_size < 1e6 and 'class 149' in path.read_text(encoding='utf-8')


def test_configs_of_files_and_of_memory_are_alike(tmp_path: Path) -> None:
    path = tmp_path / 'config.py'
    path.write_text('a = dict(b=[dict(c=1), dict(c=(1, 2))], d={"e.f": None})\nx = [1,\n  2]\n')
    expected = {'a.b[0].c': '1', 'a.b[1].c': '(1, 2)', 'a.d.e.f': 'None', 'x': '[1, 2]'}
    assert (
        config_of_file(path)
        == expected
        == flat_config(dict(a=dict(b=[dict(c=1), dict(c=(1, 2))], d={'e.f': None}), x=[1, 2]))
    )
    assert flat_config(dict(x=[[dict(a=1, b=2)]])) == flat_config(dict(x=[[dict(b=2, a=1)]]))
    path.write_text('a = (')
    assert config_of_file(path) == {}


WITHOUT_HOSTS = '''
import sys

class Absent:
    """A finder by which this Python has no PyTorch and no MM package."""
    def find_spec(self, name, path=None, target=None):
        if name.split('.')[0] in ('torch', 'mmengine', 'mmcv', 'mmseg'):
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Absent())
sys.argv = ['mapsage', *sys.argv[1:]]
from mapsage_launcher.command import main
main()
'''


@pytest.mark.parametrize(
    'arguments, page',
    [(['report', 'one'], 'one/report.html'), (['compare', 'one', 'two'], 'compare.html')],
)
def test_reports_need_no_pytorch(arguments: List[str], page: str, tmp_path: Path) -> None:
    """On the machine where the logs are looked at, which is not that of the training."""
    for name in ('one', 'two'):
        write_start(tmp_path / name, '20261122_090000', 50)
    done = subprocess.run(
        [sys.executable, '-c', WITHOUT_HOSTS, *arguments],
        cwd=str(tmp_path),
        timeout=200,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        universal_newlines=True,
    )
    assert done.returncode == 0, done.stdout
    assert '</html>' in (tmp_path / page).read_text(encoding='utf-8')
