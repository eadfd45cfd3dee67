"""The comparison of segmentors continues where it was killed, and its table says what it holds."""

import json
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

import segmentors_compared as compared  # noqa: E402
from _segmentors import VARIANTS, model_of  # noqa: E402

TWO = ('vit linear', 'vit eomt fixed')


# Each result comes from a fork, and a process with as many threads as this one must not fork.
PROGRAM = f"""
import sys
from pathlib import Path

sys.path.append({str(ROOT / 'tools' / 'benchmarks')!r})
import segmentors_compared as compared

compared.CALIBRATION = 1, 2
folder = Path(sys.argv[1])
compared.Comparison(compared.Results(folder / 'out.jsonl'), dict(demo=str(folder)),
                    dict(demo=0.1)).run({TWO!r}, [0])
"""


def start(folder: Path) -> Any:
    (folder / 'program.py').write_text(PROGRAM)
    return subprocess.Popen(
        [warm_python(), str(folder / 'program.py'), str(folder)],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )


def compare(folder: Path) -> None:
    assert start(folder).wait(PATIENT) == 0


def rows_of(folder: Path) -> List[Dict[str, Any]]:
    return compared.Results(folder / 'out.jsonl').rows()


@main_leg
@pytest.mark.long
def test_a_killed_comparison_goes_on_and_runs_nothing_twice(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    write_tiny_data(tmp_path, train=4, val=2)
    killed_run = start(tmp_path)
    deadline = time.monotonic() + PATIENT
    while len(rows_of(tmp_path)) < 3 and time.monotonic() < deadline:
        time.sleep(0.01)
    killed_run.kill()
    killed_run.wait()
    out = tmp_path / 'out.jsonl'
    killed = out.read_text()
    assert 3 <= len(killed.splitlines()) < 8
    out.write_text(killed + '{"kind": "run", "da')  # as a kill within a write leaves it

    compare(tmp_path)
    assert out.read_text().startswith(killed)
    rows = rows_of(tmp_path)
    keys = [tuple(row.get(name) for name in ('kind', 'variant', 'seed', 'rate')) for row in rows]
    assert len(keys) == len(set(keys))
    assert [row['variant'] for row in rows if row['kind'] == 'run'] == list(TWO)
    for row in rows:
        if row['kind'] == 'run':
            assert (
                row['rate']
                == max(
                    (
                        each
                        for each in rows
                        if each['kind'] == 'pilot' and each['variant'] == row['variant']
                    ),
                    key=lambda each: each['miou'],
                )['rate']
            )
            assert row['rare'] == pytest.approx(
                sum(
                    row['iou'][number]
                    for number in next(each for each in rows if each['kind'] == 'rare')['classes']
                )
                / 2,
                abs=0.02,
            )

    whole = out.read_text()
    compare(tmp_path)
    assert out.read_text() == whole
    capsys.readouterr()
    compared.print_table(rows)
    assert [
        line.split('|')[1].strip()
        for line in capsys.readouterr().out.splitlines()
        if line.startswith('| vit')
    ] == list(TWO)


def test_a_run_that_fails_ends_the_comparison_and_keeps_what_is_there(
    tmp_path: Path, capfd: pytest.CaptureFixture
) -> None:
    results = compared.Results(tmp_path / 'out.jsonl')
    assert results.get_or_run(lambda: dict(step=2.0), kind='step', data='demo')['step'] == 2
    with pytest.raises(SystemExit, match='are kept'):
        results.get_or_run(lambda: dict(step=1 / 0), kind='step', data='nwpu')
    assert 'ZeroDivisionError' in capfd.readouterr().err
    assert [row['data'] for row in map(json.loads, results.path.read_text().splitlines())] == [
        'demo'
    ]


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_variant_has_a_query_for_each_class_or_two(variant: str) -> None:
    head = model_of(variant, 11, 256)['decode_head']
    expected = 11 if 'fixed' in variant else 22 if 'hungarian' in variant else None
    assert head.get('num_queries') == expected
    with pytest.raises(ValueError, match='expected one of vit linear'):
        model_of(f'{variant} x', 11, 256)
