"""Decisions in a GeoPackage: whole after a kill, shared by viewers, read by QGIS."""

from __future__ import annotations

import contextlib
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Dict, Optional

import numpy as np
import pyogrio
import pyogrio.raw
import pytest
import shapely
from qgis_here import qgis_python, read_legends
from support import ROOT

from mapsage.extras.viewer import ViewError
from mapsage.extras.viewer.decisions import (
    DECISIONS,
    ReviewFile,
    ReviewKey,
    StateChangedError,
    is_review,
    read_windows,
)

FACTS: Dict[str, Any] = dict(
    score=0.25, measure='error', path='/scenes/影像.tif', checksum=2**32 - 1
)
BOX = shapely.box(300000, 3399744, 300256, 3400000)


def key(column: int = 0, name: str = '影像.tif') -> ReviewKey:
    return ReviewKey(name, column, 0, 512, 512)


def save(
    file: ReviewFile,
    where: ReviewKey,
    decision: Optional[str],
    outline: Any = BOX,
    crs: str = 'EPSG:32631',
) -> None:
    before = file.read().get(where)
    file.save(where, decision, before.state if before else '', FACTS, outline, crs)


def rows(path: Path) -> Any:
    """Return the fields of each row, with its polygon, as GDAL reads them."""
    meta, _, shapes, values = pyogrio.raw.read(str(path), layer='review')
    return meta, [
        dict(zip(meta['fields'], each), polygon=shapely.from_wkb(shape))
        for shape, each in zip(shapes, zip(*values))
    ]


def test_gdal_reads_what_was_decided(tmp_path: Path) -> None:
    file = ReviewFile(tmp_path / 'review.gpkg', 'EPSG:32631')
    assert file.read() == {} and not file.path.exists()
    save(file, key(), 'wrong map')
    save(file, key(512), 'unsure', shapely.box(2.9, 30.7, 2.91, 30.71), 'EPSG:4326')
    save(file, key(0, 'b.tif'), 'right', None)  # a map without coordinates
    save(file, key(), 'wrong label')
    meta, found = rows(file.path)
    assert meta['crs'] == 'EPSG:32631' and [each['decision'] for each in found] == [
        'unsure',
        'right',
        'wrong label',
    ]
    last = found[2]
    assert {name: last[name] for name in FACTS} == FACTS and last['map'] == '影像.tif'
    assert [last[name] for name in ('column', 'row', 'width', 'height')] == [0, 0, 512, 512]
    assert last['polygon'].equals(BOX) and found[1]['polygon'] is None
    assert 490000 < found[0]['polygon'].bounds[0] < 491000  # on the same ground in this CRS
    info = pyogrio.read_info(str(file.path), layer='review', force_total_bounds=True)
    assert info['features'] == 3 and info['total_bounds'][0] <= 300000
    with contextlib.closing(sqlite3.connect(str(file.path))) as base:
        box = base.execute(
            "SELECT min_x, min_y, max_x, max_y FROM gpkg_contents WHERE table_name = 'review'"
        ).fetchone()
        assert base.execute('PRAGMA integrity_check').fetchall() == [('ok',)]
    assert box == pytest.approx(shapely.total_bounds([found[0]['polygon'], BOX]))
    assert [each[:1] + each[2:] for each in read_windows(file.path)] == [
        ('unsure', (512, 0, 512, 512), True),
        ('right', (0, 0, 512, 512), False),
        ('wrong label', (0, 0, 512, 512), True),
    ]


def test_qgis_shows_each_decision_in_its_color(tmp_path: Path) -> None:
    file = ReviewFile(tmp_path / 'review.gpkg', 'EPSG:32631')
    for number, decision in enumerate(DECISIONS):
        save(file, key(number), decision)
    with contextlib.closing(sqlite3.connect(str(file.path))) as base:
        ((name, style),) = base.execute(
            'SELECT f_table_name, styleQML FROM layer_styles'
        ).fetchall()
    assert name == 'review' and all(each in style for each in DECISIONS)
    if qgis_python():
        (legend,) = read_legends(f'{file.path}|layername=review')
        assert [label for label, _ in legend['entries']] == list(DECISIONS)
        assert legend['drawn'] == legend['features'] == len(DECISIONS)


def test_taking_back_and_what_somebody_else_decided(tmp_path: Path) -> None:
    one, other = (ReviewFile(tmp_path / 'review.gpkg', 'EPSG:32631') for _ in range(2))
    mine = one.save(key(), 'wrong map', '', FACTS, BOX, 'EPSG:32631')
    assert mine is not None and other.read() == {key(): mine}
    with pytest.raises(StateChangedError, match='decided: wrong map') as caught:
        other.save(key(), 'right', '', FACTS)
    assert caught.value.current == mine and one.read() == {key(): mine}
    assert other.save(key(), None, mine.state, FACTS) is None and one.read() == {}
    with pytest.raises(StateChangedError, match='taken back'):
        one.save(key(), 'right', mine.state, FACTS)
    assert one.save(key(512), 'right', '', FACTS) is not None  # and others are free


def test_after_a_gis_has_edited_or_saved_it(tmp_path: Path) -> None:
    file = ReviewFile(tmp_path / 'review.gpkg', 'EPSG:32631')
    save(file, key(), 'wrong map')
    meta, _, shapes, values = pyogrio.raw.read(str(file.path), layer='review')
    values[list(meta['fields']).index('decision')][:] = 'unsure'
    again = ReviewFile(tmp_path / 'again.gpkg', '')
    pyogrio.raw.write(
        str(again.path),
        shapes,
        values,
        list(meta['fields']),
        layer='review',
        geometry_type='Polygon',
        crs='EPSG:32631',
        driver='GPKG',
        SPATIAL_INDEX='YES',
    )
    assert again.read()[key()].decision == 'unsure'
    with pytest.raises(StateChangedError):
        again.save(key(), 'right', file.read()[key()].state, FACTS)
    save(again, key(), 'right')  # its spatial index has triggers
    save(again, key(512), 'wrong map')
    found = pyogrio.raw.read(
        str(again.path), layer='review', bbox=(299990, 3399990, 300010, 3400010)
    )
    assert len(found[2]) == 2
    with contextlib.closing(sqlite3.connect(str(file.path))) as base, base:
        base.execute('UPDATE review SET decision = NULL')  # the field was emptied
    assert file.read() == {} and read_windows(file.path) == []
    save(file, key(), 'right')
    assert [each.decision for each in read_windows(file.path)] == ['right']


def test_files_that_are_no_review_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / 'review.gpkg'
    pyogrio.raw.write(
        str(path),
        shapely.to_wkb(np.array([BOX])),
        [np.array([1])],
        ['rank'],
        layer='tiles',
        geometry_type='Polygon',
        crs='EPSG:32631',
        driver='GPKG',
    )
    for content in (path.read_bytes(), b'SQLite format 2, or so' * 99):
        path.write_bytes(content)
        assert not is_review(path) and not is_review(tmp_path) and not is_review(tmp_path / 'no')
        for act in (
            lambda: ReviewFile(path, '').read(),
            lambda: ReviewFile(path, '').save(key(), 'right', '', FACTS),
        ):
            with pytest.raises(ViewError, match='is not a review.*--review'):
                act()
        assert path.read_bytes() == content
    with pytest.raises(ViewError, match='does not exist'):
        read_windows(tmp_path / 'no.gpkg')


def test_a_lock_and_a_folder_that_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr('mapsage.extras.viewer.decisions._PATIENCE', 0.1)
    file = ReviewFile(tmp_path / 'review.gpkg', 'EPSG:32631')
    save(file, key(), 'right')
    with contextlib.closing(sqlite3.connect(str(file.path), isolation_level=None)) as editor:
        editor.execute('BEGIN EXCLUSIVE')
        for act in (lambda: save(file, key(512), 'right'), lambda: is_review(file.path)):
            with pytest.raises(ViewError, match='kept locked by another program, such as QGIS'):
                act()
    save(file, key(512), 'right')
    (tmp_path / 'file').write_text('')
    for folder in (tmp_path / 'file', tmp_path / 'missing', Path('/proc/self')):
        with pytest.raises(ViewError, match='cannot .*name a file elsewhere with --review'):
            ReviewFile(folder / 'review.gpkg', 'EPSG:32631').save(key(), 'right', '', FACTS)


WRITER = """
import sys
sys.path[:0] = [sys.argv[2]]
sys.modules.update(dict.fromkeys(['torch', 'mmengine', 'mmcv', 'mmseg']))  # a viewer needs none
import shapely
from mapsage.extras.viewer.decisions import ReviewFile, ReviewKey
file = ReviewFile(sys.argv[1], 'EPSG:32631')
column = len(file.read())
while True:
    print('deciding', flush=True)
    file.save(ReviewKey('a.tif', column, 0, 9, 9), 'unsure', '', dict(
        score=0.5, measure='error', path='', checksum=7), shapely.box(0, 0, 9, 9), 'EPSG:32631')
    column += 1
    print(column, flush=True)
"""


def test_what_was_answered_is_there_after_a_kill(tmp_path: Path) -> None:
    """Each process is killed at another moment, the first perhaps while it makes the file."""
    path, moments = tmp_path / 'review.gpkg', random.Random(16)
    for run in range(6):
        writer = subprocess.Popen(
            [sys.executable, '-c', WRITER, str(path), str(ROOT)],
            stdout=subprocess.PIPE,
            universal_newlines=True,
        )
        assert writer.stdout is not None
        for _ in range(1 + 2 * run):  # "deciding", and how many are answered
            last = writer.stdout.readline()
        time.sleep(moments.uniform(0, 0.02))
        writer.send_signal(signal.SIGKILL)
        said = [
            int(line)
            for line in [last, *writer.communicate()[0].split('\n')]
            if line.strip().isdigit()
        ]
        there = ReviewFile(path, '').read()
        assert {each.column for each in there} == set(range(len(there)))
        assert len(there) >= max(said, default=0)
    assert len(there) >= 15 and len(rows(path)[1]) == len(there)
    with contextlib.closing(sqlite3.connect(str(path))) as base:
        assert base.execute('PRAGMA integrity_check').fetchall() == [('ok',)]
