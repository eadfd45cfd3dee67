"""Work dirs with anything in their files: the page is written, or an error says what there is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict

from fuzzing import damaged, documents
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mapsage.pictures.report import ReportError, compare_runs, write_report
from mapsage.pictures.report.pictures import find_maps
from mapsage.pictures.report.record import config_of_file

RECORD: Dict[str, Any] = dict(
    kind='train',
    started=1e9,
    ended=1e9 + 5,
    written=1e9 + 5,
    status='finished',
    begin_iter=0,
    end_iter=20,
    max_iters=20,
    config='configs/a.py',
    devices=[dict(rank=0, device='cpu')],
    evaluations=[
        dict(
            phase='val',
            iteration=20,
            metrics=dict(mIoU=50.0),
            tables=[
                dict(
                    name='',
                    classes=['a', 'b'],
                    columns=dict(IoU=[40.0, None]),
                    matrix=[[3, 1], [0, 2]],
                )
            ],
        )
    ],
)
SCALARS = dict(step=10, iter=10, loss=0.5, lr=0.1, time=0.1, data_time=0.1, memory=5)
MAP = dict(settings={}, files=['a.tif', 'a_preview.png'])


def work_dir(folder: Path, number: int = 0) -> Path:
    start = folder / f'work{number}' / '20261101_101010'
    (start / 'vis_data').mkdir(parents=True, exist_ok=True)
    (start / 'run.json').write_text(json.dumps(RECORD))
    (start / 'vis_data/scalars.json').write_text(json.dumps(SCALARS))
    return start


def look_at(start: Path, other: Path) -> None:
    try:
        write_report(start.parent)
        compare_runs([start.parent, other.parent], start.parent / 'compared.html')
    except ReportError as error:
        assert str(start.parent) in str(error)


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(documents(RECORD))
def test_any_record(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    start = work_dir(folder)
    (start / 'run.json').write_bytes(content)
    look_at(start, work_dir(folder, 1))


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(documents(SCALARS))
def test_any_line_of_scalars(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp()
    start = work_dir(folder)
    path = start / 'vis_data/scalars.json'
    path.write_bytes(json.dumps(SCALARS).encode() + b'\n' + content + b'\n')
    look_at(start, work_dir(folder, 1))


@given(documents(MAP))
def test_any_report_of_a_map_in_a_work_dir(tmp_path_factory: Any, content: bytes) -> None:
    folder = tmp_path_factory.getbasetemp() / 'work_of_maps'
    (folder / 'map').mkdir(parents=True, exist_ok=True)
    (folder / 'map/a.json').write_bytes(content)
    for picture in find_maps(folder):
        assert picture.preview.parent == folder / 'map'


CONFIG = b'a = dict(b=[dict(c=1), (1, 2)], d={"e": None})\nx = [1,\n  -2.5]\nf = g(h)\n'


@given(st.one_of(st.binary(max_size=60), damaged(CONFIG), st.text().map(str.encode)))
@example(b'a = ' + b'[' * 5000 + b']' * 5000)
@example(b'a = ' + b'(' * 50000)
@example(b'a = ' + b'-' * 100000 + b'1')
@example(b'a = {[]: 1}')
@example(b'a = dict(b={{}: 1})')
@example(b'a = ' + b'9' * 5000)
@example(b'a = "\\ud800"')
def test_any_config(tmp_path_factory: Any, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / 'config.py'
    path.write_bytes(content)
    values = config_of_file(path)
    assert all(isinstance(text, str) for pair in values.items() for text in pair)
