"""Runs of earlier versions have a log and scalars alone, and their report comes from these."""
from __future__ import annotations

import json
from pathlib import Path
from typing import Optional

import pytest

from mapsage.report import ReportError, compare_runs, write_report
from mapsage.report.record import config_of_file, flat_config
from mapsage.report.runs import read_runs

STAMP, LATER = '20251230_235900', '20260102_080000'
HEAD = '''2025/12/30 23:59:01 - mmengine - INFO - accelerator cpu (1 device(s), \
gradients over gloo) [cuda: torch is a CPU build; gcu: no torch_gcu]; world size 3, backend gloo
2025/12/30 23:59:01 - mmengine - INFO - config: configs/of mine/fpn.py against ../base.py
  max_iters  80000  ->  40
'''
TABLE = '''2025/12/30 23:59:30 - mmengine - INFO - per class results:
2025/12/30 23:59:30 - mmengine - INFO - \n
+-------+-------+------+
| Class |  IoU  | Acc  |
+-------+-------+------+
|  land | {land} | 90.5 |
|  road |  nan  | 0.0  |
+-------+-------+------+
2025/12/30 23:59:31 - mmengine - INFO - Iter(val) [4/4]    aAcc: 80.1000  mIoU: {land}  time: 0.1
'''


def write_start(work_dir: Path, stamp: str, land: float, resumed: int = 0,
                lr: str = '0.1', end: Optional[str] = None) -> Path:
    folder = work_dir / stamp
    (folder / 'vis_data').mkdir(parents=True)
    lines = HEAD
    if resumed:
        lines += f'2025/12/30 23:59:02 - mmengine - INFO - resumed epoch: 0, iter: {resumed}\n'
    rows = []
    for step in range(resumed + 10, resumed + 30, 10):
        lines += (f'2025/12/30 23:59:20 - mmengine - INFO - Iter(train) [{step:>5}/80000]  '
                  f'lr: 1e-01  eta: 0:01:00  time: 0.5  loss: 1.5\n')
        rows.append(dict(lr=.1, loss=2 - step / 100, time=.5, iter=step, step=step))
        for done in (2, 4):
            lines += ('2025/12/30 23:59:25 - mmengine - INFO - '
                      f'Iter(val) [{done}/4]    eta: 0:00:01  time: 1.0\n')
        lines += TABLE.format(land=land + step)
        rows.append(dict(mIoU=land + step, data_time=.1, time=.2, step=step))
    lines += end or '2026/01/01 00:04:00 - mmengine - INFO - Saving\n'
    (folder / f'{stamp}.log').write_text(lines)
    (folder / 'vis_data' / 'scalars.json').write_text(
        '\n'.join(map(json.dumps, rows)) + '\n{"loss": 0.5, "st')  # cut off by a kill
    (folder / 'vis_data' / 'config.py').write_text(
        f'optim_wrapper = dict(optimizer=dict(lr={lr}))\nnames = (\n    "a", )\nhook = Hook\n')
    return folder


def test_run_without_a_record(tmp_path: Path) -> None:
    write_start(tmp_path, STAMP, 30.0)
    (run,) = read_runs(tmp_path)
    assert run.last.log.world_size == 3 and run.config_name == 'fpn.py' and run.iterations == 20
    assert run.last.log.device == 'cpu (1 device(s), gradients over gloo)'
    assert run.curves()['loss'] == [(10, 1.9), (20, 1.8)]
    assert run.curves()['time'] == [(10, .5), (20, .5)]  # not those of validations
    assert run.score() == ('mIoU', [(10, 40.0), (20, 50.0)])
    (table,) = run.final().tables
    assert table.classes == ['land', 'road']
    assert table.columns == dict(IoU=[50.0, None], Acc=[90.5, 0.0])
    assert run.seconds == pytest.approx(24 * 3600 + 300)  # over the end of a year
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert 'could not be made' not in text and 'max_iters  80000' in text


def test_resumed_start_continues_and_a_fresh_one_does_not(tmp_path: Path) -> None:
    write_start(tmp_path, STAMP, 30.0)
    write_start(tmp_path, '20251231_000500', 35.0, resumed=10)
    write_start(tmp_path, LATER, 20.0, lr='0.2')
    first, second = read_runs(tmp_path)
    assert [x for x, _ in first.curves()['loss']] == [10, 20, 30]
    assert first.curves()['loss'][1] == (20, 1.8)
    assert [(each.iteration, each.metrics['mIoU']) for each in first.evaluations()] == [
        (10, 40.0), (20, 55.0), (30, 65.0)]
    assert len(second.starts) == 1 and first.name.endswith(STAMP)
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert '-25.00' in text and 'optim_wrapper.optimizer.lr' in text


def test_comparison_of_runs(tmp_path: Path) -> None:
    for name, land in (('one', 30.0), ('other', 40.0)):
        write_start(tmp_path / name, STAMP, land, lr=str(land))
    write_start(tmp_path / 'other', LATER, 20.0)
    found = compare_runs([tmp_path / 'one', tmp_path / 'other', tmp_path / 'other' / STAMP],
                         tmp_path / 'made' / 'page.html')
    rows = {line.split()[0]: line.split()[1:] for line in found.table.splitlines() if line.strip()}
    assert rows['mIoU'] == rows['land'] == ['50.00', '40.00', '60.00'] and 'road' in rows
    page = found.page.read_text(encoding='utf-8')
    assert '<span class="best">60.00</span>' in page and '<code>30.0</code>' in page
    assert page.count('<polyline') >= 12 and 'could not be made' not in page


@pytest.mark.parametrize('paths, message', [
    (['one'], '1 run(s) to compare'), (['one', 'one'], 'are the same run'),
    (['one', 'none'], 'does not exist'), (['one', 'empty'], 'no folder of a run')])
def test_bad_comparisons(tmp_path: Path, paths: list, message: str) -> None:
    write_start(tmp_path / 'one', STAMP, 30.0)
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ReportError) as caught:
        compare_runs([tmp_path / path for path in paths], tmp_path / 'page.html')
    assert message in str(caught.value)


def test_other_classes_and_other_labels_are_said(tmp_path: Path) -> None:
    folders = [write_start(tmp_path / name, STAMP, 30.0) for name in ('one', 'other')]
    tables = [dict(name='', classes=['land', name], columns=dict(IoU=[50.0, 60.0]),
                   matrix=[[5, 5], [0, size]]) for name, size in (('road', 9), ('way', 9),
                                                                  ('road', 8))]

    def told(*used: dict) -> str:
        for folder, table in zip(folders, used):
            (folder / 'run.json').write_text(json.dumps(dict(evaluations=[dict(
                phase='val', iteration=20, metrics=dict(mIoU=55.0), tables=[table])])))
        return compare_runs([tmp_path / 'one', tmp_path / 'other'], tmp_path / 'page.html').table

    assert 'different classes' in told(tables[0], tables[1])
    assert 'different labels' in told(tables[0], tables[2])
    assert 'different' not in told(tables[0], tables[0])
    later = write_start(tmp_path / 'one', LATER, 30.0)
    (later / 'run.json').write_text((folders[1] / 'run.json').read_text())
    assert 'different' not in write_report(tmp_path / 'one').read_text(encoding='utf-8')
    told(tables[2], tables[0])
    assert 'different labels' in write_report(tmp_path / 'one').read_text(encoding='utf-8')


def test_damaged_parts_leave_the_rest(tmp_path: Path) -> None:
    folder = write_start(tmp_path, STAMP, 30.0)
    (folder / 'run.json').write_text('{"started": ')
    (tmp_path / 'preview.png').write_bytes(b'no picture')
    (tmp_path / 'dynamic_sampling').mkdir()
    (tmp_path / 'dynamic_sampling' / 'steps.jsonl').write_text('[]\n{}\n')
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert 'cannot be read' in text and 'steps.jsonl' in text and '50.00' in text


def test_a_part_that_fails_leaves_the_rest(tmp_path: Path) -> None:
    folder = write_start(tmp_path, STAMP, 30.0)
    (folder / 'run.json').write_text(json.dumps(dict(groups=[3])))  # of another version, say
    text = write_report(tmp_path).read_text(encoding='utf-8')
    assert text.count('could not be made') == 1 and 'Curves' in text and 'Starts' in text


def test_150_classes(tmp_path: Path) -> None:
    folder = write_start(tmp_path, STAMP, 30.0)
    names = [f'class {index}' for index in range(150)]
    matrix = [[int(row == column) * 9 + (row + column) % 2 for column in range(150)]
              for row in range(150)]
    (folder / 'run.json').write_text(json.dumps(dict(evaluations=[dict(
        phase='val', iteration=20, metrics=dict(mIoU=55.0), tables=[dict(
            name='', classes=names, columns=dict(IoU=[50.0] * 150), matrix=matrix)])])))
    path = write_report(tmp_path)
    assert path.stat().st_size < 1e6 and 'class 149' in path.read_text(encoding='utf-8')


def test_configs_of_files_and_of_memory_are_alike(tmp_path: Path) -> None:
    path = tmp_path / 'config.py'
    path.write_text('a = dict(b=[dict(c=1), dict(c=(1, 2))], d={"e.f": None})\nx = [1,\n  2]\n')
    expected = {'a.b[0].c': '1', 'a.b[1].c': '(1, 2)', 'a.d.e.f': 'None', 'x': '[1, 2]'}
    assert config_of_file(path) == expected == flat_config(
        dict(a=dict(b=[dict(c=1), dict(c=(1, 2))], d={'e.f': None}), x=[1, 2]))
    assert flat_config(dict(x=[[dict(a=1, b=2)]])) == flat_config(dict(x=[[dict(b=2, a=1)]]))
    path.write_text('a = (')
    assert config_of_file(path) == {}
