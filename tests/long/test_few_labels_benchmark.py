"""The comparison of few labels continues where it was killed, and compares what it says."""

import csv
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, List

import pytest
from support import PATIENT, ROOT, main_leg, write_tiny_data
from warm_python import warm_python

sys.path.append(str(ROOT / 'tools' / 'benchmarks'))

import few_labels  # noqa: E402

pytestmark = main_leg

# Each result comes from a fork, and a process with as many threads as this one must not fork.
PROGRAM = f"""
import os
import sys
from pathlib import Path

sys.path.append({str(ROOT / 'tools' / 'benchmarks')!r})
import few_labels

few_labels.CALIBRATION = 0, 2
few_labels.LABELS = dict(demo=(2, 3))
few_labels.FIRST, few_labels.NEXT = 2, 2
folder = Path(sys.argv[1])
os.environ['MAPSAGE_DEMO'] = str(folder)
few_labels.Comparison(folder / 'work', dict(demo=0.5)).run([0])
"""


def start(folder: Path) -> Any:
    (folder / 'program.py').write_text(PROGRAM)
    return subprocess.Popen(
        [warm_python(), str(folder / 'program.py'), str(folder)],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )


def rows_of(folder: Path) -> List[Dict[str, Any]]:
    return few_labels.Results(folder / 'work/results.jsonl').rows()


def test_a_killed_comparison_goes_on_and_has_a_row_for_all_that_it_compares(
    tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_data(tmp_path, train=8, val=2, size=128)
    running = start(tmp_path)
    deadline = time.monotonic() + PATIENT
    while len(rows_of(tmp_path)) < 6 and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.01)
    running.kill()
    running.wait()
    before = (tmp_path / 'work/results.jsonl').read_text()
    assert 6 <= len(before.splitlines()) < 19

    assert start(tmp_path).wait(PATIENT) == 0
    assert (tmp_path / 'work/results.jsonl').read_text().startswith(before)
    rows = rows_of(tmp_path)
    found = [(row['labels'], row['method']) for row in rows if row['kind'] == 'run']
    assert found == [(labels, method) for labels in (2, 3) for method in few_labels.METHODS]
    for labels in (2, 3):
        best = max(
            (row for row in rows if row['kind'] == 'run' and row['labels'] == labels),
            key=lambda row: row['miou'],
        )
        stages = [row for row in rows if row['kind'] == 'stage' and row['labels'] == labels]
        assert [row['method'] for row in stages] == list(few_labels.STAGES)
        assert {row['after'] for row in stages} == {best['method']}
    pseudo = next(row for row in rows if row.get('method') == few_labels.METHODS[1])
    assert pseudo['predicted'] > 0 and pseudo['first'] >= 2

    lists = {path.stem: path.read_text().split() for path in tmp_path.glob('work/lists/*.txt')}
    assert lists['demo_0_3'][:2] == lists['demo_0_4'][:2] == lists['demo_0_2']
    table = next(tmp_path.glob('work/runs/*/next_tiles.csv'))
    with open(table, encoding='utf-8', newline='') as file:
        suggested = [Path(row['path']).stem for row in csv.DictReader(file)]
    assert lists['demo_0_suggested'] == lists['demo_0_2'] + suggested
    assert len(set(lists['demo_0_suggested'])) == 4

    monkeypatch.setattr(few_labels, 'LABELS', dict(demo=(2, 3)))
    monkeypatch.setattr(few_labels, 'FIRST', 2)
    monkeypatch.setattr(few_labels, 'NEXT', 2)
    capsys.readouterr()
    few_labels.print_table(rows)
    lines = [line for line in capsys.readouterr().out.splitlines() if line[:4] in ('| 2 ', '| 3 ')]
    assert len(lines) == 2 * (len(few_labels.METHODS) + len(few_labels.STAGES))
    score = {
        row['method']: row['miou'] for row in rows if row['kind'] == 'run' and row['labels'] == 2
    }
    assert float(lines[2].split('|')[-2]) == pytest.approx(
        score['FixMatch'] - score['labels alone'], abs=0.051
    )
