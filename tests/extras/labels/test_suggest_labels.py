"""Windows to label next, as tools/suggest_labels.py writes them for a model that knows colors."""

from __future__ import annotations

import contextlib
import csv
import sqlite3
from pathlib import Path
from typing import Any, Dict, List, Tuple

import cv2
import numpy as np
import pyogrio
import pyogrio.raw
import pytest
import shapely
from color_model import NAMES, paint, write_config
from geo_scenes import rectangle
from geotiff_data import write_vector
from labeling_files import (
    UTM,
    suggest,
    write_image,
    write_scene_training,
    write_sure_checkpoint,
    write_tiles,
    write_training,
    write_unsure_scene,
)
from qgis_here import qgis_python, read_legends
from rasterio.transform import Affine
from support import on_host

from mapsage.engine.loading.data_checks import DataError
from mapsage.extras.viewer.decisions import ReviewFile, ReviewKey
from mapsage.maps.errors import PredictError

pytestmark = on_host

# 64 pixels of a degree that are as wide as 32 m: a scene in another CRS, north of the first.
DEGREES: Dict[str, Any] = dict(crs='EPSG:4326', transform=Affine(5e-6, 0, 15.0, 0, -5e-6, 45.2))


def read(path: Path) -> List[Dict[str, Any]]:
    """Return the fields of each tile, and its polygon."""
    meta, _, shapes, values = pyogrio.raw.read(str(path), layer='tiles')
    return [
        dict(zip(meta['fields'], each), polygon=shapely.from_wkb(shape))
        for shape, each in zip(shapes, zip(*values))
    ]


def windows(path: Path) -> List[Tuple[str, int, int]]:
    return [(Path(each['path']).name, each['column'], each['row']) for each in read(path)]


@pytest.fixture(scope='module')
def scenes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two scenes of 4 x 4 windows: what is unsure in ``a.tif`` and ``b.tif``, in another CRS."""
    root = tmp_path_factory.mktemp('scenes')
    unsure = np.zeros((256, 256), bool)
    unsure[0:64, 0:64] = True  # window (0, 0), all of it
    unsure[64:96, 64:128] = True  # (64, 64), half of it
    unsure[192:208, 192:256] = True  # (192, 192), a quarter
    write_unsure_scene(root / 'scenes/a.tif', paint(256, 256), unsure)
    write_unsure_scene(
        root / 'scenes/b.tif', paint(256, 256), unsure & (np.arange(256) < 64), DEGREES
    )
    write_config(root)
    write_sure_checkpoint(root)
    return root


def test_uncertain_windows_with_reason_crs_and_style(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model, out = (scenes / 'color.py', scenes / 'color.pth'), tmp_path / 'next.gpkg'
    assert suggest(model, scenes / 'scenes', '--out', out, '--count', 3, '--tta') == 0
    # That of b.tif is as uncertain as the first and looks like it; (64, 64) is too near to it.
    assert windows(out) == [('a.tif', 0, 0), ('a.tif', 192, 192), ('b.tif', 0, 0)]
    first = read(out)[0]
    assert first['reason'].startswith('red or green') and first['rank'] == 1
    assert first['score'] > 0.3 and first['margin'] > 0.9 and first['disagreement'] == 0
    place = rectangle(UTM, 0, 0, 64, 64)
    assert first['polygon'].equals(place)
    # b.tif lies in another CRS, and its window is where it is on the ground.
    assert abs(read(out)[2]['polygon'].area / (64 * 5e-6 * 111_200) ** 2 - 0.7) < 0.02
    assert pyogrio.list_layers(str(out))[:, 0].tolist()[0] == 'tiles'
    assert pyogrio.read_info(str(out), layer='tiles')['crs'] == 'EPSG:32633'
    with contextlib.closing(sqlite3.connect(str(out))) as file:
        style = file.execute(
            'SELECT f_table_name, useAsDefault, styleQML FROM layer_styles'
        ).fetchall()
        assert file.execute('PRAGMA integrity_check').fetchall() == [('ok',)]
    assert [each[:2] for each in style] == [('tiles', 1)]
    assert 'attr="doubtful_class"' in style[0][2] and '<prop k="style" v="no"' in style[0][2]
    assert cv2.imread(str(out.with_suffix('.png'))).shape[2] == 3
    assert '1  ' in capsys.readouterr().out
    if qgis_python():
        (legend,) = read_legends(f'{out}|layername=tiles')
        assert legend['drawn'] == legend['features'] == 3
        assert (legend['crs'], legend['fill'], legend['outline']) == ('EPSG:32633', 'no', '0.8')
        shown = legend['attributes']
        assert (shown['rank'], Path(shown['path']).name, shown['width']) == (1, 'a.tif', 64)
        assert shown['doubtful_class'] in dict(legend['entries']) and shown['reason']


def test_a_second_round_and_a_second_run(
    scenes: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = scenes / 'color.py', scenes / 'color.pth'
    one, again, two = (tmp_path / f'{name}.gpkg' for name in ('one', 'again', 'two'))
    for out in (one, again):
        suggest(model, scenes / 'scenes', '--out', out, '--count', 2)
    assert windows(one) == windows(again) == [('a.tif', 0, 0), ('a.tif', 192, 192)]
    capsys.readouterr()
    suggest(model, scenes / 'scenes', '--out', two, '--exclude', one)
    assert windows(two) == [('b.tif', 0, 0), ('a.tif', 64, 64)]
    assert '2 windows of 50: the others are certain, or closer' in capsys.readouterr().out
    with pytest.raises(PredictError, match='may hold what you have drawn'):
        suggest(model, scenes / 'scenes', '--out', one)


def decide(path: Path, crs: Any, *decisions: Tuple[str, str, int, int]) -> None:
    """Write a review as tools/view.py does: decision, scene, column and row of windows."""
    file = ReviewFile(path, 'EPSG:32633')
    for decision, scene, column, row in decisions:
        shape = None if crs is None else rectangle(crs, column, row, column + 64, row + 64)
        file.save(
            ReviewKey(Path(scene).name, column, row, 64, 64),
            decision,
            '',
            dict(score=0, measure='', path=scene, checksum=0),
            shape,
            crs and crs['crs'],
        )


def test_a_review_leads_and_leaves_out(scenes: Path, tmp_path: Path) -> None:
    model, out = (scenes / 'color.py', scenes / 'color.pth'), tmp_path / 'next.gpkg'
    scene = str(scenes / 'scenes/a.tif')
    decide(
        tmp_path / 'review.gpkg',
        UTM,
        ('wrong map', scene, 128, 128),
        ('wrong map', scene, 192, 128),
        ('right', scene, 0, 0),
        ('unsure', scene, 192, 192),
    )
    suggest(model, scenes / 'scenes', '--out', out, '--exclude', tmp_path / 'review.gpkg')
    # The model is sure of both that lead, and they are neighbors.
    assert windows(out) == [
        ('a.tif', 128, 128),
        ('a.tif', 192, 128),
        ('b.tif', 0, 0),
        ('a.tif', 64, 64),
    ]
    found = read(out)
    assert found[0]['reason'].startswith('the review says wrong map; ') and not found[0]['score']
    assert 'review' not in found[2]['reason']
    one = tmp_path / 'one.gpkg'
    suggest(
        model, scenes / 'scenes', '--out', one, '--exclude', tmp_path / 'review.gpkg', '--count', 1
    )
    assert windows(one) == [('a.tif', 128, 128)]


def test_ground_with_labels_is_not_suggested_and_theirs_are_checked(
    scenes: Path, tmp_path: Path
) -> None:
    unsure = np.zeros((256, 256), bool)
    unsure[:64, :64] = unsure[:64, 128:192] = True
    write_unsure_scene(tmp_path / 'scenes/a.tif', paint(256, 256), unsure)
    # The whole first window and a bit of the third; two windows below, labels that are wrong:
    # the first says blue on 40 x 50 pixels of dark, the second on 10 x 50.
    shapes = [(0, 0, 64, 64), (128, 0, 140, 20), (0, 200, 40, 250), (240, 200, 250, 250)]
    write_vector(
        tmp_path / 'labels.gpkg',
        [rectangle(UTM, *each) for each in shapes],
        ['red', 'red', 'green', 'green'],
        'EPSG:32633',
    )
    model = write_scene_training(tmp_path), write_sure_checkpoint(tmp_path)
    suggest(model, tmp_path / 'scenes', '--out', tmp_path / 'next.gpkg')
    assert windows(tmp_path / 'next.gpkg') == [('a.tif', 128, 0)]
    suggest(model, tmp_path / 'scenes', '--out', tmp_path / 'check.gpkg', '--suspicious')
    found = read(tmp_path / 'check.gpkg')
    assert [(each['column'], each['row']) for each in found] == [(0, 192), (192, 192)]
    assert found[0]['reason'].startswith('labeled green, the model is sure of')
    assert found[1]['score'] == pytest.approx(500 / 64**2, abs=1e-4)
    scene = str(tmp_path / 'scenes/a.tif')  # its labels are right where the model contradicts most
    decide(
        tmp_path / 'review.gpkg', UTM, ('wrong map', scene, 0, 192), ('wrong label', scene, 0, 0)
    )
    suggest(
        model,
        tmp_path / 'scenes',
        '--out',
        tmp_path / 'again.gpkg',
        '--suspicious',
        '--exclude',
        tmp_path / 'review.gpkg',
    )
    assert windows(tmp_path / 'again.gpkg') == [('a.tif', 0, 0), ('a.tif', 192, 192)]
    assert read(tmp_path / 'again.gpkg')[0]['reason'].startswith('the review says wrong label; ')


def test_labels_that_the_split_keeps_from_every_dataset_are_labels(tmp_path: Path) -> None:
    """Ground between the parts is in no dataset, and needs no label again."""
    unsure = np.ones((256, 256), bool)
    write_unsure_scene(tmp_path / 'scenes/a.tif', paint(256, 256), unsure)
    write_vector(tmp_path / 'labels.gpkg', [rectangle(UTM, 0, 0, 256, 128)], ['red'], 'EPSG:32633')
    config = write_scene_training(tmp_path)
    split = dict(by='blocks', part='train', size=32, share=0.5, margin=8)
    config.write_text(f"{config.read_text()}train_dataloader['dataset']['split'] = {split}\n")
    model = config, write_sure_checkpoint(tmp_path)
    options = '--count', 16, '--min-distance', 0
    suggest(model, tmp_path / 'scenes', '--out', tmp_path / 'next.gpkg', *options)
    found = windows(tmp_path / 'next.gpkg')
    assert len(found) == 8 and {row for _, _, row in found} == {128, 192}


def test_images_without_coordinates_give_a_table(tmp_path: Path) -> None:
    write_tiles(tmp_path)
    unsure = np.zeros((64, 64), bool)
    unsure[:, :50] = True
    write_image(tmp_path / 'img/train/t9.png', paint(64, 64), unsure)
    model = write_training(tmp_path), write_sure_checkpoint(tmp_path)
    with pytest.raises(PredictError, match='has no CRS or no transform.*next.csv'):
        suggest(model, tmp_path / 'img/train', '--out', tmp_path / 'next.gpkg')
    suggest(model, tmp_path / 'img/train', '--out', tmp_path / 'next.csv', '--count', 1)
    with open(str(tmp_path / 'next.csv')) as file:
        (line,) = csv.DictReader(file)
    assert (Path(line['path']).name, line['column'], line['width']) == ('t9.png', '0', '64')
    suggest(
        model,
        tmp_path / 'img/train',
        '--out',
        tmp_path / 'more.csv',
        '--exclude',
        tmp_path / 'next.csv',
    )
    with open(str(tmp_path / 'more.csv')) as file:  # t0 is labeled, t9 was suggested
        assert {Path(line['path']).name for line in csv.DictReader(file)} == {
            't1.png',
            't2.png',
            't3.png',
        }
    image = str(tmp_path / 'img/train/t{}.png')
    decide(
        tmp_path / 'review.gpkg',
        None,
        ('wrong map', image.format(3), 0, 0),
        ('unsure', image.format(9), 0, 0),
        ('right', image.format(1), 0, 0),
    )
    suggest(
        model,
        tmp_path / 'img/train',
        '--out',
        tmp_path / 'last.csv',
        '--exclude',
        tmp_path / 'review.gpkg',
    )
    with open(str(tmp_path / 'last.csv')) as file:
        assert [Path(line['path']).name for line in csv.DictReader(file)] == ['t3.png', 't2.png']


def test_nothing_to_suggest_is_said(scenes: Path, tmp_path: Path) -> None:
    model = scenes / 'color.py', scenes / 'color.pth'
    sure = write_unsure_scene(tmp_path / 'sure.tif', paint(128, 128), np.zeros((128, 128), bool))
    (tmp_path / 'empty').mkdir()
    whole = tmp_path / 'whole.gpkg'
    write_vector(whole, [rectangle(UTM, 0, 0, 128, 128)], [NAMES[0]], 'EPSG:32633')
    for options, words in (
        ([sure], 'no window is uncertain: the model is sure of all 4'),
        ([tmp_path / 'empty'], 'holds no image'),
        ([sure, '--exclude', whole], 'no window is left of 1 input'),
    ):
        with pytest.raises(PredictError, match=words):
            suggest(model, *options, '--out', tmp_path / 'next.gpkg')
    with pytest.raises(DataError, match="data_root=''"):  # labels that are needed and not there
        suggest(model, sure, '--suspicious', '--out', tmp_path / 'next.gpkg')
    assert not (tmp_path / 'next.gpkg').exists()
