"""`mapsage assess` as a user types it: plan, labels, report, comparison; and what goes wrong."""

from __future__ import annotations

import contextlib
import csv
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any, List

import cv2
import numpy as np
import pyogrio.raw
import pytest
import rasterio
import shapely
from assess_maps import KnownMap, edit, label, read_points, true_labels, write_map
from geo_scenes import CLASSES, DEGREES, PIXELS, UTM, write_raster
from qgis_here import label_points, read_legends
from support import ROOT

from mapsage.extras.assess.assess import main


@pytest.fixture(scope='module')
def labeled(tmp_path_factory: Any) -> Any:
    """A map of 300 x 300 pixels with a plan of 400 labeled points; do not write there."""
    folder = tmp_path_factory.mktemp('assess')
    known = write_map(folder, side=300)
    points = folder / 'points.gpkg'
    assert main(['plan', str(known.path), '--points', '400', '--out', str(points)]) == 0
    label(points, true_labels(points, known))
    return known, points


@pytest.fixture
def copied(labeled: Any, tmp_path: Path) -> Path:
    """A copy of the labeled points, to be damaged."""
    return Path(shutil.copy(labeled[1], tmp_path / 'points.gpkg'))


def report(known: KnownMap, points: Path, *options: str) -> int:
    return main(
        [
            'report',
            str(points),
            str(known.path),
            '--out',
            str(points.with_name('out.html')),
            *options,
        ]
    )


def table(points: Path) -> dict:
    with open(points.with_name('out.csv'), newline='') as file:
        return {(row['quantity'], row['class']): row for row in csv.DictReader(file)}


def test_a_report_contains_the_truth(labeled: Any, copied: Path, capsys: Any) -> None:
    known = labeled[0]
    assert report(known, copied) == 0
    output = capsys.readouterr().out
    assert 'overall accuracy' in output and 'map: 1/1 windows' in output
    valid = known.mapped != 255
    for number, name in enumerate(CLASSES):
        row = table(copied)['area', name]
        share = (known.truth[valid] == number).mean()
        assert float(row['low']) < share < float(row['high'])
        assert (
            float(row['area']) == pytest.approx(float(row['value']) * valid.sum() * 0.25, rel=1e-3)
            and row['area_unit'] == 'm²'
        )
    page = copied.with_name('out.html').read_text(encoding='utf-8')
    for text in (
        'User&#x27;s accuracy',
        'Estimated error matrix',
        'Strata',
        'data:image/png',
        'model-assisted',
    ):
        assert text in page
    assert 'http' not in page.split('</head>')[1]
    picture = cv2.imread(str(copied.with_name('out_areas.png')))
    blue = np.array([0xB2, 0x72, 0x00])
    # Three whiskers of the color of estimates.
    assert (abs(picture.astype(int) - blue).sum(2) < 30).sum() > 300


def test_the_points_of_a_plan(labeled: Any) -> None:
    known, points = labeled
    layers = {name for name, _ in pyogrio.list_layers(str(points))}
    assert {'points', 'mapsage_design', 'mapsage_plan'} <= layers
    fields = set(pyogrio.read_info(str(points), layer='points')['fields'])
    # The class of the map is no field of the layer: it would influence the interpreter.
    assert fields == {'point', 'reference', 'note'}
    rows = pyogrio.raw.read(str(points), layer='mapsage_design', read_geometry=False)[3]
    names = list(pyogrio.read_info(str(points), layer='mapsage_design')['fields'])
    inclusion = rows[names.index('inclusion_probability')]
    assert (1 / inclusion).sum() == pytest.approx((known.mapped != 255).sum(), rel=1e-6)


def test_the_form_of_the_points_in_qgis(labeled: Any) -> None:
    (legend,) = read_legends(f'{labeled[1]}|layername=points')
    assert [entry[0] for entry in legend['entries']] == [*CLASSES, 'to be labeled']


def test_labels_that_were_set_in_qgis_count(labeled: Any, tmp_path: Path) -> None:
    known, points = labeled
    assert report(known, points) == 0
    again = tmp_path / 'points.gpkg'
    assert main(['plan', str(known.path), '--points', '400', '--out', str(again)]) == 0
    labels = true_labels(again, known)
    assert label_points(again, dict(enumerate(labels[:20], 1))) == 20
    edit(
        again,
        'UPDATE points SET reference = ? WHERE point = ?',
        [(text, number) for number, text in enumerate(labels, 1) if number > 20],
    )
    assert report(known, again) == 0
    assert table(again) == table(points)


def test_labels_are_not_overwritten(labeled: Any, capsys: Any) -> None:
    known, points = labeled
    assert main(['plan', str(known.path), '--points', '9', '--out', str(points)]) == 1
    assert 'may hold labels, so it is not replaced' in capsys.readouterr().err


@pytest.mark.parametrize(
    'statement, message',
    [
        (
            'UPDATE points SET reference = NULL WHERE point IN (3, 4)',
            '2 of 400 points .* have no label, such as point 3',
        ),
        (
            "UPDATE points SET reference = 'hous' WHERE point = 5",
            "point 5 has the label 'hous'.*Did you mean 'house'.*--extra-class 'hous'",
        ),
        ('DELETE FROM points WHERE point = 7', 'point 7 of the plan was deleted'),
        ('UPDATE points SET point = 8 WHERE point = 9', 'point 8 occurs 2 times, with the labels'),
        ('UPDATE points SET point = 401 WHERE point = 9', 'point 401 is not of the plan'),
        (
            'UPDATE points SET geom = (SELECT geom FROM points WHERE point = 1) WHERE point = 2',
            'point 2 lies at .* the plan of .*map.tif drew it at',
        ),
        ('DROP TABLE mapsage_plan', 'has no table mapsage_plan.*plan and label them in its file'),
        (
            "UPDATE mapsage_plan SET record = '{'",
            'the plan in its table mapsage_plan cannot be read',
        ),
        (
            'UPDATE mapsage_plan SET record = replace(record, \'"area": [\', \'"area": [-1, \')',
            'area holds .* expected numbers',
        ),
        ('DELETE FROM mapsage_design WHERE point = 1', 'mapsage_design does not fit the plan'),
        (
            'UPDATE points SET reference = NULL WHERE point IN (SELECT point FROM mapsage_design WHERE '
            "stratum = 'water')",
            'have no label',
        ),
    ],
)
def test_damaged_labels(
    labeled: Any, copied: Path, statement: str, message: str, capsys: Any
) -> None:
    edit(copied, statement)
    assert report(labeled[0], copied) == 1
    error = capsys.readouterr().err
    assert error.startswith('AssessError: ') and re.search(message, error), error
    assert not copied.with_name('out.html').exists()


def test_unlabeled_points_and_classes_that_the_map_lacks(
    labeled: Any, copied: Path, capsys: Any
) -> None:
    edit(copied, "UPDATE points SET reference = 'tree' WHERE point < 60")
    edit(copied, "UPDATE points SET reference = '' WHERE point = 100")
    assert report(labeled[0], copied, '--skip-unlabeled', '--extra-class', 'tree') == 0
    rows = table(copied)
    assert float(rows['area', 'tree']['value']) > 0.05
    assert ("user's accuracy", 'tree') not in rows
    assert float(rows["producer's accuracy", 'tree']['value']) == 0


def test_a_stratum_without_labels(labeled: Any, copied: Path, capsys: Any) -> None:
    edit(
        copied,
        'UPDATE points SET reference = NULL WHERE point IN (SELECT point FROM '
        "mapsage_design WHERE stratum = 'water')",
    )
    assert report(labeled[0], copied, '--skip-unlabeled') == 1
    assert "stratum 'water' has 0 labeled point(s)" in capsys.readouterr().err


def make_earlier_plan(points: Path) -> None:
    """Turn a plan into one of the version before, whose points were drawn by area."""
    record = json.loads(read_record(points))
    for name, area, count in zip(record['strata'], record['area'], record['points']):
        edit(
            points,
            'UPDATE mapsage_design SET inclusion_probability = '
            f'min(1, pixel_area * {count / area!r}) WHERE stratum = ?',
            [(name,)],
        )
    edit(
        points,
        """CREATE TABLE earlier AS SELECT point, stratum, map_class,
         inclusion_probability, pixel_column, pixel_row, x, y, probabilities FROM mapsage_design""",
    )
    edit(points, 'DROP TABLE mapsage_design')
    edit(points, 'ALTER TABLE earlier RENAME TO mapsage_design')
    assert record.pop('draw') == 'simple'
    edit(points, 'UPDATE mapsage_plan SET record = ?', [(json.dumps(record),)])


def read_record(points: Path) -> str:
    with contextlib.closing(sqlite3.connect(str(points))) as file:
        return str(file.execute('SELECT record FROM mapsage_plan').fetchone()[0])


def test_a_plan_of_an_earlier_version_of_equal_pixels(
    labeled: Any, copied: Path, capsys: Any
) -> None:
    assert report(labeled[0], copied) == 0
    now = table(copied)
    make_earlier_plan(copied)
    assert report(labeled[0], copied) == 0
    assert 'approximations' not in capsys.readouterr().out
    for key, row in table(copied).items():
        assert float(row['value']) == pytest.approx(float(now[key]['value']), rel=1e-4)


def test_a_plan_of_an_earlier_version_in_degrees(tmp_path: Path, capsys: Any) -> None:
    place = dict(DEGREES, transform=rasterio.transform.from_origin(10, 80, 0.25, 0.25))
    known = write_map(tmp_path, side=300, place=place)
    points = tmp_path / 'points.gpkg'
    assert main(['plan', str(known.path), '--points', '400', '--out', str(points)]) == 0
    label(points, true_labels(points, known))
    make_earlier_plan(points)
    assert report(known, points) == 0
    output = capsys.readouterr().out
    assert 'with chances in proportion to the area of the pixels' in output
    assert 'The inclusion probabilities in it are approximations' in points.with_name(
        'out.html'
    ).read_text(encoding='utf-8')


def test_another_map_needs_to_be_named_so(labeled: Any, copied: Path, capsys: Any) -> None:
    other = write_map(copied.parent / 'other', side=300, seed=1)
    assert report(other, copied) == 1
    assert 'was planned for' in capsys.readouterr().err
    assert report(other, copied, '--other-map') == 0
    # A map that knows nothing of this truth.
    assert float(table(copied)['overall accuracy', '']['value']) < 0.65
    small = write_map(copied.parent / 'small', side=100)
    assert report(small, copied, '--other-map') == 1
    error = capsys.readouterr().err
    assert 'points of' in error and 'lie outside' in error and '(100 x 100 pixels)' in error


def test_two_maps_are_compared_on_the_same_points(labeled: Any, copied: Path, capsys: Any) -> None:
    known = labeled[0]
    worse = np.where(known.mapped == 1, 0, known.mapped).astype(np.uint8)
    path = write_map(copied.parent / 'worse', side=300).path
    with rasterio.open(path, 'r+') as file:
        file.write(worse, 1)
    assert main(['compare', str(copied), str(known.path), str(path)]) == 0
    output = capsys.readouterr().out
    overall = next(line for line in output.splitlines() if line.startswith('overall'))
    assert 'first is better' in overall
    assert copied.with_name('points_comparison.csv').is_file()
    assert main(['compare', str(copied), str(path), str(path)]) == 0
    same = [line for line in capsys.readouterr().out.splitlines() if '%' not in line]
    assert not any('is better' in line for line in same)


def test_suggested_windows_are_refused(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / 'next_tiles.gpkg'
    pyogrio.raw.write(
        str(path),
        shapely.to_wkb(np.array([shapely.box(0, 0, 1, 1)])),
        [np.array([1]), np.array([0.5]), np.array(['a or b'], object)],
        ['rank', 'score', 'reason'],
        geometry_type='Polygon',
        crs='EPSG:32650',
        driver='GPKG',
        layer='tiles',
    )
    known = write_map(tmp_path / 'map', side=50)
    assert report(known, path) == 1
    assert 'windows of mapsage suggest' in capsys.readouterr().err


@pytest.mark.parametrize('place, unit', [(DEGREES, 'ha'), (PIXELS, 'pixels')])
def test_maps_in_degrees_and_in_pixels(place: dict, unit: str, tmp_path: Path) -> None:
    known = write_map(tmp_path, side=200, place=place)
    points = tmp_path / 'points.gpkg'
    assert main(['plan', str(known.path), '--points', '200', '--out', str(points)]) == 0
    label(points, true_labels(points, known))
    assert report(known, points) == 0
    row = table(points)['area', 'ground']
    assert row['area_unit'] == unit
    if place is DEGREES:
        # 200 x 193 arc seconds at 60 degrees north: 30.9 m x 15.5 m each.
        total = float(row['area']) / float(row['value'])
        assert total == pytest.approx(200 * 193 * 30.95 * 15.48 / 1e4, rel=0.01)


def test_a_map_that_names_no_classes(tmp_path: Path, capsys: Any) -> None:
    values = np.random.RandomState(0).choice([0, 3, 7], (80, 80)).astype(np.uint8)
    path = write_raster(tmp_path / 'map.tif', values, UTM)
    points = tmp_path / 'points.gpkg'
    assert main(['plan', str(path), '--points', '90', '--nodata', '0', '--out', str(points)]) == 0
    label(points, ['3'] * len(read_points(points)))
    assert main(['report', str(points), str(path), '--nodata', '0']) == 0
    assert main(['report', str(points), str(path)]) == 1
    assert 'was planned for' in capsys.readouterr().err
    wide = write_raster(tmp_path / 'wide.tif', values.astype(np.uint16), UTM)
    assert main(['plan', str(wide), '--points', '90', '--out', str(tmp_path / 'b.gpkg')]) == 1
    assert 'expected a class map: one band of uint8' in capsys.readouterr().err


@pytest.mark.parametrize(
    'arguments',
    [
        ['plan', 'map.tif', '--out', 'p.gpkg'],
        ['plan', 'map.tif', '--points', '0', '--out', 'p.gpkg'],
        ['plan', 'map.tif', '--points', '9', '--out', 'p.shp'],
        ['report', 'p.gpkg'],
        [],
        ['plan', 'map.tif', '--half-width', '0', '--out', 'p.gpkg'],
        ['plan', 'map.tif', '--points', '9', '--out', 'p.gpkg', '--seed', '-1'],
        ['plan', 'map.tif', '--points', '9', '--out', 'p.gpkg', '--doubtful-share', '60'],
    ],
)
def test_wrong_command_lines(arguments: List[str]) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(arguments)
    assert exit_info.value.code == 2


def test_no_framework_is_imported(tmp_path: Path) -> None:
    script = (
        'import sys\n'
        'names = "torch", "mmengine", "mmcv", "mmseg"\n'
        'sys.modules.update({name: None for name in names})\n'
        'from mapsage.extras.assess.assess import main\n'
        'sys.exit(main(sys.argv[1:]))'
    )
    known = write_map(tmp_path, side=60)
    done = subprocess.run(
        [
            sys.executable,
            '-c',
            script,
            'plan',
            str(known.path),
            '--points',
            '60',
            '--out',
            str(tmp_path / 'p.gpkg'),
        ],
        cwd=str(ROOT),
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        universal_newlines=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
